"""Blocks: the hyper-rectangles of a policy's tensors that a process holds, and their words.

A block's items are numbered row-major within the block; its words are those of the whole layout.
Between the two lie affine runs: equally long, and equally far apart within a group.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.cut import Segment
from plait.errors import LayoutInvalid
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run, fingerprint_strided
from plait.layout import DTYPE_BITS, TensorSpec, words_per_item

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BlockSpec:
    """Which part of which tensor.

    Attributes:
        whole: the tensor.
        offsets, sizes: of the rectangle in it, in elements, one of each for each dimension.

    Raises:
        LayoutInvalid: it isn't inside of the tensor, or is a part of packed elements.
    """

    whole: TensorSpec
    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        shape = self.whole.shape
        fits = len(shape) == len(self.offsets) == len(self.sizes) and all(
            at >= 0 and size >= 0 and at + size <= side
            for at, size, side in zip(self.offsets, self.sizes, shape, strict=True)
        )
        if not fits:
            raise LayoutInvalid(
                f"a block at {list(self.offsets)} of {list(self.sizes)} isn't inside of "
                f"{self.whole.name!r} of {list(shape)}"
            )
        if self.sizes != shape and DTYPE_BITS[self.whole.dtype] < 8:
            raise LayoutInvalid(
                f"{self.whole.name!r} has packed elements of {self.whole.dtype}, which can't be "
                "cut into blocks"
            )

    @classmethod
    def all_of(cls, whole: TensorSpec) -> "BlockSpec":
        return cls(whole, (0,) * len(whole.shape), whole.shape)

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.whole.shape

    @property
    def local(self) -> TensorSpec:
        """The block as a tensor by itself."""
        return TensorSpec(self.whole.name, self.whole.dtype, self.sizes)

    @property
    def items(self) -> int:
        return self.whole.items if self.is_whole else prod(self.sizes)

    @property
    def region(self) -> tuple[slice, ...]:
        """The index of the rectangle in the whole tensor."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)

    def overlaps(self, other: "BlockSpec") -> bool:
        """Whether the two, of one tensor, have an element in common."""
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return self.items > 0 < other.items and all(
            a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides
        )


class PlacedBlock:
    """A block that isn't empty, at its words in the whole layout.

    Args:
        start: first word of the whole tensor.
    """

    def __init__(self, block: BlockSpec, start: int) -> None:
        self.block = block
        self._width = words_per_item(block.whole.item_bytes)
        self._run, self._stride, self._repeats, firsts = _runs_of(block)
        # Item numbers in the whole tensor become words.
        self._stride *= self._width
        self._firsts = start + firsts * self._width

    @property
    def is_contiguous(self) -> bool:
        """Whether its words are adjacent, all of them."""
        return self._run == self.block.items

    @property
    def first_word(self) -> int:
        return int(self._firsts[0])

    def words_of(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """First words of these items of the block: int64, in any order."""
        rows, columns = np.divmod(items, self._run)
        groups, rows = np.divmod(rows, self._repeats)
        words = self._firsts[groups] + rows * self._stride + columns * self._width
        return np.asarray(words, np.int64)

    def fingerprint(self, bits: NDArray[Any], start: int) -> Fingerprint:
        """Fingerprint of consecutive items of the block, the first of which is number `start`.

        Args:
            bits: 1-d contiguous unsigned, of the tensor's item size.
        """
        total, at = ZERO, 0
        for segment in self.segments(start, start + bits.size):
            part = bits[at : at + segment.items]
            if segment.repeats == 1:
                total += fingerprint_run(part, segment.first_word)
            else:
                first, run, stride = segment.first_word, segment.run, segment.stride
                total += fingerprint_strided(part, first, run=run, stride=stride)
            at += segment.items
        return total

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The items [start, stop) of the block, in their order."""
        group = self._run * self._repeats
        while start < stop:
            number, inside = divmod(start, group)
            row, column = divmod(inside, self._run)
            first = int(self._firsts[number]) + row * self._stride + column * self._width
            rows = min((stop - start) // self._run, self._repeats - row)
            if column or not rows:
                run = min(self._run - column, stop - start)
                yield Segment(first, run, 0, 1)
            else:
                run = rows * self._run
                yield Segment(first, self._run, self._stride if rows > 1 else 0, rows)
            start += run


def _runs_of(block: BlockSpec) -> tuple[int, int, int, NDArray[np.int64]]:
    """A block's items in the whole tensor: (run, stride, repeats, first item of each group)."""
    if block.is_whole:
        return block.items, 0, 1, np.zeros(1, np.int64)
    shape = block.whole.shape
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    base = sum(at * step for at, step in zip(block.offsets, steps, strict=True))
    sides = [pair for pair in zip(block.sizes, steps, strict=True) if pair[0] > 1]
    run = repeats = 1
    while sides and sides[-1][1] == run:
        run *= sides.pop()[0]
    stride = sides[-1][1] if sides else 0
    while sides and sides[-1][1] == stride * repeats:
        repeats *= sides.pop()[0]
    outer = itertools.product(*(range(0, size * step, step) for size, step in sides))
    firsts = np.array([base + sum(at) for at in outer], np.int64)
    return run, stride, repeats, firsts
