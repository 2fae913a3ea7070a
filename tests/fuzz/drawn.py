"""Whole policies made fresh from a few bytes: layouts, cuts with a grain or without, two states."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from plait.cut import ITEM_SIZES, Cut, FrameSpec, Segment, plain_cut
from plait.grain import SlottedCut, filling, grain_cut
from plait.layout import DTYPE_BITS, Layout, TensorSpec, words_per_item
from plait.weights import ArrayWeights
from tests.core.strategies import changed_weights, random_weights
from tests.fuzz.material import Source

# Every way in which a grain divides tensors, and none.
_ROLES: Final = (
    "q_proj.weight", "down_proj.weight", "k_proj.weight", "gate_up_proj.weight", "q_proj.bias",
    "embed_tokens.weight", "norm.weight", "experts.gate_up_proj", "é",
)  # fmt: skip
_SIDES: Final = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 33, 64, 65, 130, 0)
_ITEMS_MAX: Final = 1024
# All that there are in one frame of a slot; or so few that frames of all slots follow each other.
_FRAME_ITEMS: Final = (1 << 20, 1, 7, 64, 300)
_FRAMES_AIM: Final = 24  # above which an input says nothing new, but takes long

DTYPES: Final = tuple(sorted(DTYPE_BITS, key=lambda name: (name != "BF16", name)))


def fresh_layout(source: Source, dtypes: Sequence[str] = DTYPES) -> Layout:
    """Up to six tensors of at most 1024 elements, some of them experts."""
    tensors, experts = [], 0
    for number in range(1 + source.below(6)):
        if source.chance(4):
            name = f"mlp.experts.{experts}.{source.pick(('w1', 'down_proj'))}.weight"
            experts += 1
        else:
            name = f"{number}.{source.pick(_ROLES)}"
        dtype = source.pick(dtypes)
        sides = [source.pick(_SIDES) for _ in range(source.pick((2, 1, 0, 3)))]
        while math.prod(sides) > _ITEMS_MAX:
            sides.pop()
        if math.prod(sides) * DTYPE_BITS[dtype] % 8:
            sides = [4, *sides[1:], 8]
        tensors.append(TensorSpec(name, dtype, tuple(sides)))
    return Layout.of(tensors)


def fresh_cut(source: Source, layout: Layout) -> SlottedCut:
    """A cut along a grain, a plain one, or one of frames at random, some of which are left out."""
    match source.below(4):
        case 0:
            cut = plain_cut(layout, for_anchor=source.chance(2))
            return SlottedCut(cut, (0,) * len(cut.frames))
        case 1:
            frames = tuple(_dealt(source, layout))
            return SlottedCut(Cut(layout.digest, frames), (0,) * len(frames))
    most = max(source.pick(_FRAME_ITEMS), layout.total_elements // _FRAMES_AIM)
    with mock.patch.object(filling, "items_max", return_value=most):
        return grain_cut(
            layout,
            grain=source.pick((8, 1, 2, 3, 4, 16)),
            for_anchor=source.chance(2),
            kv_heads=source.pick((None, 1, 2, 4, 8)),
        )


def _dealt(source: Source, layout: Layout) -> Iterator[FrameSpec]:
    """Tensors cut flat, by rows or by columns; segments of one item size dealt out to frames."""
    parts: dict[int, list[Segment]] = {size: [] for size in ITEM_SIZES}
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if tensor.items:
            parts[tensor.item_bytes] += _cut_up(source, tensor, start)
    for size, held in parts.items():
        while held:
            taken = [held.pop(source.below(len(held))) for _ in range(source.below(len(held)) + 1)]
            if not source.chance(8):
                yield FrameSpec(size, tuple(taken))


def _cut_up(source: Source, tensor: TensorSpec, start: int) -> list[Segment]:
    width = words_per_item(tensor.item_bytes)
    # Not always the tensor's own rows: any divisor makes a matrix of it.
    rows = source.pick([n for n in range(1, tensor.items + 1) if tensor.items % n == 0])
    columns = tensor.items // rows
    if source.chance(2):
        return [
            Segment(start + first * width, end - first, columns * width, rows)
            for first, end in _borders(source, columns)
        ]
    found = []
    for first, end in _borders(source, rows):
        # Runs that fill their stride are one run, written as several.
        runs = (end - first, columns) if source.chance(3) else (1, (end - first) * columns)
        at = start + first * columns * width
        found.append(Segment(at, runs[1], runs[1] * width, runs[0]))
    return found


def _borders(source: Source, items: int) -> list[tuple[int, int]]:
    inner = {1 + source.below(items - 1) for _ in range(source.below(4))} if items > 1 else set()
    return list(itertools.pairwise([0, *sorted(inner), items]))


def fresh_states(source: Source, layout: Layout) -> tuple[ArrayWeights, ArrayWeights]:
    """Old and new bits: at random with every special value, then a few as the fuzzer likes."""
    old = random_weights(layout, source.below(1 << 16))
    new = changed_weights(old, source.below(1 << 16), source.pick((0.02, 0.0, 0.3, 1.0)))
    held = [tensor for tensor in layout.tensors if tensor.items]
    for _ in range(source.below(6) if held else 0):
        tensor = source.pick(held)
        place, top = source.below(tensor.items), (1 << 8 * tensor.item_bytes) - 1
        step = source.pick((1, top, 127, 128, top - 127, top - 128, top // 2 + 1, 0))
        bits = new.bits(tensor.name)
        bits[place] = (int(old.bits(tensor.name)[place]) + step) & top
    return old, new


def items_at(state: NDArray[np.uint16], words: NDArray[np.int64], item_bytes: int) -> NDArray[Any]:
    """The items whose first words these are: unsigned integers of as many."""
    width = max(item_bytes // 2, 1)
    items = np.zeros(words.size, np.uint64)
    for k in range(width):
        items |= state[words + k].astype(np.uint64) << np.uint64(16 * k)
    return items.astype(f"<u{item_bytes}")
