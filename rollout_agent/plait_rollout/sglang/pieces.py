"""Affine pieces: which canonical items lie where in one rank's parameters.

A piece is a block of items of one tensor that a rank holds, with strides on both sides. Items of a
piece are numbered row-major; because the strides on the tensor's side are nested, a larger number
is a later canonical item. A staged delta is kept as these numbers (4 bytes an item), from which
both the word and the place in memory follow.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.errors import MapUnproven
from plait.layout import TensorSpec, words_per_item

# Overlap is checked on contiguous runs, 16 bytes each; a map more shattered than this isn't affine
# in any useful sense, and the reload path takes it.
RUNS_MAX: Final = 1 << 22


@dataclass(frozen=True)
class Piece:
    """A block of a tensor's items in a parameter's storage.

    Attributes:
        tensor: canonical tensor that the items belong to.
        parameter: name of the engine's parameter (or buffer) whose storage holds them.
        sizes: sides of the block, outermost first; at least one.
        source_start, source_strides: items in the tensor, row-major.
        target_start, target_strides: items in the parameter's storage.
    """

    tensor: str
    parameter: str
    sizes: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]

    @cached_property
    def items(self) -> int:
        return math.prod(self.sizes)

    @property
    def source(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        """Which canonical items it holds: equal on every holder of the same block."""
        return (self.tensor, self.source_start, self.sizes, self.source_strides)

    def numbers_of(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Piece numbers of tensor items; -1 for those outside the block."""
        numbers = np.empty(items.size, np.int64)
        _locate(items, self.source_start, _array(self.sizes), _array(self.source_strides), numbers)
        return numbers

    def source_items(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Tensor items of piece numbers, as int64."""
        return _place(numbers, self.source_start, self.sizes, self.source_strides)

    def target_items(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Storage items of piece numbers, as int64."""
        return _place(numbers, self.target_start, self.sizes, self.target_strides)

    def words(self, numbers: NDArray[Any], tensor_word: int, item_bytes: int) -> NDArray[np.int64]:
        """First canonical words of piece numbers; `tensor_word` is the tensor's own first word."""
        return self.source_items(numbers) * words_per_item(item_bytes) + tensor_word

    def to_document(self) -> list[Any]:
        return [
            self.tensor, self.parameter, list(self.sizes),
            self.source_start, list(self.source_strides),
            self.target_start, list(self.target_strides),
        ]  # fmt: skip

    @classmethod
    def parse(cls, row: Sequence[Any]) -> "Piece":
        tensor, parameter, sizes, source_start, source_strides, target_start, target_strides = row
        return cls(
            tensor, parameter, tuple(sizes), source_start, tuple(source_strides),
            target_start, tuple(target_strides),
        )  # fmt: skip


def piece_of(
    tensor: TensorSpec,
    parameter: str,
    sizes: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
) -> Piece:
    """A piece from one recorded copy, with its sides merged and in canonical order.

    Args:
        sizes: of the copied block.
        source, target: (start, strides) in items.
    Raises:
        MapUnproven: the source is no nested block of the tensor (broadcast, overlapping, outside).
    """
    sides = [
        (size, s, t) for size, s, t in zip(sizes, source[1], target[1], strict=True) if size != 1
    ]
    sides.sort(key=lambda side: -side[1])
    merged: list[tuple[int, int, int]] = []
    for size, s, t in sides:
        if merged and merged[-1][1:] == (s * size, t * size):
            merged[-1] = (merged[-1][0] * size, s, t)
        else:
            merged.append((size, s, t))
    merged = merged or [(1, 1, 1)]
    last = source[0] + sum((size - 1) * s for size, s, _ in merged)
    nested = all(outer[1] >= inner[0] * inner[1] for outer, inner in itertools.pairwise(merged))
    if not nested or merged[-1][1] < 1 or source[0] < 0 or last >= tensor.items:
        raise MapUnproven(
            f"the engine's loader copies {tensor.name!r} with sizes {list(sizes)} and strides "
            f"{list(source[1])} from item {source[0]}: not a nested block of {tensor.items} items"
        )
    columns = tuple(zip(*merged, strict=True))
    return Piece(tensor.name, parameter, columns[0], source[0], columns[1], target[0], columns[2])


def runs_of(start: int, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Any, int]:
    """Contiguous runs of a block: (first items, int64 array; length of each run).

    Raises:
        MapUnproven: more than RUNS_MAX of them.
    """
    inner = sizes[-1] if strides[-1] == 1 else 1
    outer = list(zip(sizes, strides, strict=True))
    outer = outer[:-1] if strides[-1] == 1 else outer
    if math.prod(size for size, _ in outer) > RUNS_MAX:
        raise MapUnproven(f"a block of {list(sizes)} falls into more than {RUNS_MAX} runs")
    starts = np.array([start], np.int64)
    for size, stride in outer:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, inner


def overlap_of(blocks: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> int | None:
    """The first item that two of the blocks (start, sizes, strides) share, or None.

    Raises:
        MapUnproven: more than RUNS_MAX runs in one of them.
    """
    firsts, ends = [], []
    for start, sizes, strides in blocks:
        starts, inner = runs_of(start, sizes, strides)
        firsts.append(starts)
        ends.append(starts + inner)
    if not firsts:
        return None
    first, end = np.sort(np.concatenate(firsts)), np.sort(np.concatenate(ends))
    shared = np.flatnonzero(first[1:] < end[:-1])
    return int(first[shared[0] + 1]) if shared.size else None


def _array(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _place(
    numbers: NDArray[Any], start: int, sizes: Sequence[int], strides: Sequence[int]
) -> NDArray[np.int64]:
    items = np.empty(numbers.size, np.int64)
    _positions(numbers, start, _array(sizes), _array(strides), items)
    return items


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _locate(items: Any, start: Any, sizes: Any, strides: Any, numbers: Any) -> None:
    for i in range(items.size):
        rest = items[i] - start
        number = np.int64(0)
        if rest < 0:
            numbers[i] = -1
            continue
        for side in range(sizes.size):
            index = rest // strides[side]
            rest -= index * strides[side]
            if index >= sizes[side]:
                number = np.int64(-1)
                break
            number = number * sizes[side] + index
        numbers[i] = number if rest == 0 else -1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _positions(numbers: Any, start: Any, sizes: Any, strides: Any, items: Any) -> None:
    for i in range(numbers.size):
        rest = np.int64(numbers[i])
        item = np.int64(start)
        for side in range(sizes.size - 1, -1, -1):
            outer = rest // sizes[side]
            item += (rest - outer * sizes[side]) * strides[side]
            rest = outer
        items[i] = item
