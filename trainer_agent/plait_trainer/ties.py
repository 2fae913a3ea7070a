"""Tied tensors: two names for one value, of which the checkpoint has one.

That two names share memory is an observation, and decides nothing where they were declared to be
tied: declared aliases must be bit-equal, whether they share memory or not, or nothing is published.
"""

from collections.abc import Mapping

import torch

from plait.errors import PublishError
from plait.tensors import integer_view
from plait_trainer.shards import local_part

# Compared at once: a device copy of this many elements is all that it holds.
_RUN = 1 << 22


def without_aliases(
    state: Mapping[str, torch.Tensor], declared: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The tensors that the checkpoint has: each tied value once.

    Args:
        declared: alias → the name that the checkpoint has. Names that share all of their memory
            without being declared are published under the first of them.
    Raises:
        PublishError: a declared alias isn't bit-equal to its tensor.
    """
    kept = dict(state)
    for alias, name in declared.items():
        if alias in kept and name in kept and alias != name:
            _require_equal(alias, kept[alias], name, kept[name])
            del kept[alias]
    firsts: dict[tuple[object, ...], str] = {}
    return {
        name: tensor for name, tensor in kept.items()
        if not tensor.numel() or firsts.setdefault(_place(tensor), name) == name
    }  # fmt: skip


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are one and the same view of memory, or the same shards of one."""
    local = local_part(tensor)
    # The address of an empty shard says nothing; its storage is still itself.
    memory = local.data_ptr() if local.numel() else local.untyped_storage()._cdata
    return (
        *(tensor.device, memory, tensor.dtype, tensor.shape, local.shape, local.stride()),
        str(getattr(tensor, "placements", "")),
    )


def _require_equal(alias: str, found: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    if _place(found) != _place(tensor) and not _bits_equal(found, tensor):
        raise PublishError(
            f"{alias!r} is tied to {name!r}, but their bits differ: the checkpoint holds one of "
            "them",
            remedy="tie the weights again (model.tie_weights()), or declare them untied",
        )


def _bits_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    here, there = local_part(first), local_part(second)
    if here.shape != there.shape:
        return False
    flat, other = here.reshape(-1), there.reshape(-1)
    starts = range(0, flat.numel(), _RUN)
    return all(torch.equal(_bits(flat, at), _bits(other, at).to(flat.device)) for at in starts)


def _bits(flat: torch.Tensor, start: int) -> torch.Tensor:
    run = flat[start : start + _RUN]
    return integer_view(run.resolve_conj().resolve_neg().contiguous())
