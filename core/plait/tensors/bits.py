"""Tensors as raw bits: integer views without copies, and safetensors' names of torch's dtypes."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from numpy.typing import NDArray

from plait.errors import LayoutInvalid, UsageError
from plait.weights import UNSIGNED

# safetensors' dtype names → torch's, without F4 and F6: torch has none for F6, and counts pairs of
# elements where F4 counts elements.
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

# torch's arithmetic and indexing are complete for signed types only (and uint8).
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype.

    Raises:
        LayoutInvalid: it has none.
    """
    if dtype not in _NAMES:
        raise LayoutInvalid(f"{dtype} is not a dtype that a layout can have")
    return _NAMES[dtype]


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's items as 1-d uint8, int16, int32 or int64, sharing its memory.

    Raises:
        UsageError: not contiguous: a flat view would be a copy, and writes to it lost; or
            conjugated or negated by a flag, so that its memory holds other bits than it has.
    """
    _refuse_lazy(tensor)
    if not tensor.is_contiguous():
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} "
            "has no flat view; expected a contiguous one"
        )
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.is_complex():
        return flat.detach().reshape(-1).view(torch.int64)
    return flat.detach().reshape(-1).view(INTEGERS[tensor.element_size()])


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor as 1-d integers of the tensor's item size.

    Item `tensor.storage_offset()` of it is the tensor's first one. Shares its memory.

    Raises:
        UsageError: conjugated or negated by a flag.
    """
    _refuse_lazy(tensor)
    storage = tensor.untyped_storage()
    integers = INTEGERS[tensor.element_size()]
    view = torch.empty(0, dtype=integers, device=tensor.device)
    items = storage.nbytes() // tensor.element_size()
    return view.set_(storage, 0, (items,), (1,))


def bits_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A contiguous CPU tensor's items as a 1-d unsigned numpy view, sharing its memory.

    Raises:
        UsageError: not contiguous, or not in CPU memory.
    """
    if tensor.device.type != "cpu":
        raise UsageError(f"numpy can't view a tensor on {tensor.device}; expected one on a CPU")
    bits: NDArray[Any] = integer_view(tensor).numpy().view(UNSIGNED[tensor.element_size()])
    return bits


def _refuse_lazy(tensor: torch.Tensor) -> None:
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "a tensor is conjugated or negated by a flag: its memory holds other bits",
            remedy="call resolve_conj() and resolve_neg() on it",
        )
