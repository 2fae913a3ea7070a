"""Where tensors lie in memory, and the view of one tensor that another view is of its like."""

import torch


def memory_of(tensor: torch.Tensor) -> tuple[object, int]:
    """Device and address of a tensor's storage: equal for all tensors that share it."""
    return tensor.device, int(tensor.untyped_storage().data_ptr())


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage reach over the same items of it."""
    (first, end), (start, stop) = _span(one), _span(other)
    return first < stop and start < end


def lies_within(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether `same_view` can tell it: the very tensor, or part of one without gaps."""
    (first, end), (start, stop) = _span(view), _span(whole)
    gapless = stop - start == whole.numel()
    return _form(view) == _form(whole) or (gapless and start <= first and end <= stop)


def same_view(view: torch.Tensor, whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The view of `other` that `view` is of `whole`, in which it lies.

    Args:
        other: of the shape of `whole`.
    Returns:
        None if the items of `other` lie in another order than those of `whole`.
    """
    if _form(view) == _form(whole):
        return other
    if other.stride() != whole.stride():
        return None
    offset = other.storage_offset() + view.storage_offset() - whole.storage_offset()
    return other.as_strided(view.shape, view.stride(), offset)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First item in the storage, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + int(reach) + 1
