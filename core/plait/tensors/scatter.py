"""Reading and writing scattered items of a flat integer tensor, on any device."""

from typing import Any, Final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from plait.errors import UsageError
from plait.weights import UNSIGNED

# Positions travel to a device as int64: this many at once, 32 MiB.
_SLICE: Final = 1 << 22


def gather_at(flat: torch.Tensor, positions: NDArray[np.int64]) -> NDArray[Any]:
    """The items at these positions, as unsigned integers of the same length.

    Args:
        flat: 1-d integers on any device (`storage_bits`, `integer_view`).
        positions: 1-d int64.
    Raises:
        UsageError: a position outside `flat`.
    """
    _check_bounds(flat, positions)
    if flat.device.type != "cpu":
        return gather_on_device(flat, positions)
    size = UNSIGNED[flat.element_size()]
    items = np.empty(positions.size, size)
    _gather(flat.numpy().view(size), positions, items)
    return items


def gather_on_device(flat: torch.Tensor, positions: NDArray[np.int64]) -> NDArray[Any]:
    """As `gather_at` of positions within `flat`, by torch's indexing on any device."""
    size = UNSIGNED[flat.element_size()]
    items = np.empty(positions.size, size)
    for start in range(0, positions.size, _SLICE):
        part = slice(start, start + _SLICE)
        index = _index(flat, positions[part])
        items[part] = flat.index_select(0, index).cpu().numpy().view(size)
    return items


def scatter_at(flat: torch.Tensor, positions: NDArray[np.int64], items: NDArray[Any]) -> None:
    """Writes one item to each position.

    Args:
        flat: 1-d integers on any device.
        positions: 1-d int64, each once.
        items: unsigned integers of flat's item size, as many as positions.
    Raises:
        UsageError: a position outside `flat`, or items of another dtype or number.
    """
    _check_bounds(flat, positions)
    if items.shape != positions.shape or items.dtype != UNSIGNED[flat.element_size()]:
        raise UsageError(
            f"{items.dtype}{list(items.shape)} can't be written to {positions.size} items "
            f"of {flat.element_size()} bytes"
        )
    if flat.device.type == "cpu":
        _scatter(flat.numpy().view(UNSIGNED[flat.element_size()]), positions, items)
    else:
        scatter_on_device(flat, positions, items)


def scatter_on_device(
    flat: torch.Tensor, positions: NDArray[np.int64], items: NDArray[Any]
) -> None:
    """As `scatter_at` to positions within `flat`, by torch's indexing on any device."""
    signed = np.dtype("u1") if items.itemsize == 1 else np.dtype(f"<i{items.itemsize}")
    for start in range(0, positions.size, _SLICE):
        part = slice(start, start + _SLICE)
        index = _index(flat, positions[part])
        values = torch.from_numpy(np.ascontiguousarray(items[part]).view(signed)).to(flat.device)
        flat.index_copy_(0, index, values)


def _index(flat: torch.Tensor, positions: NDArray[np.int64]) -> torch.Tensor:
    # torch takes no negative strides.
    return torch.from_numpy(np.ascontiguousarray(positions)).to(flat.device)


def _check_bounds(flat: torch.Tensor, positions: NDArray[np.int64]) -> None:
    if flat.ndim != 1 or positions.dtype != np.int64 or positions.ndim != 1:
        raise UsageError(
            f"expected 1-d items and 1-d int64 positions, got {list(flat.shape)} and "
            f"{positions.dtype}{list(positions.shape)}"
        )
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < flat.numel():
        raise UsageError(
            f"positions {int(positions.min())} to {int(positions.max())} aren't all "
            f"within {flat.numel()} items"
        )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _gather(flat: Any, positions: Any, items: Any) -> None:
    for i in range(positions.size):
        items[i] = flat[positions[i]]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scatter(flat: Any, positions: Any, items: Any) -> None:
    for i in range(positions.size):
        flat[positions[i]] = items[i]
