"""Cuts along a grain: the frames of all slots, which fill up together."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from plait.cut import ITEM_SIZES, Cut, FrameSpec, plain_cut
from plait.errors import UsageError
from plait.grain.filling import Filling
from plait.grain.roles import DEFAULT_RULES, Rules
from plait.grain.shares import COMMON, Shares
from plait.layout import Layout

GRAIN_MAX: Final = 1024


@dataclass(frozen=True)
class SlottedCut:
    """A cut and the grain slot of each of its frames: what a publisher needs.

    Attributes:
        slots: one for each frame, 0 to the grain.
    """

    cut: Cut
    slots: tuple[int, ...]


def grain_cut(
    layout: Layout,
    *,
    grain: int = 8,
    for_anchor: bool,
    kv_heads: int | None = None,
    rules: Rules = DEFAULT_RULES,
) -> SlottedCut:
    """The cut of a publisher with a grain: every word once, each frame in one slot.

    Frames of all slots fill up together and are numbered in that order, so whoever encodes them in
    order reads each part of the weights while it is still near.

    Args:
        grain: shares, 1 for `plain_cut`. What it doesn't divide is common.
        for_anchor: frames small enough to be coded `dense`.
        kv_heads: the model's key-value heads. Unless the grain divides them, or where it isn't
            known, keys and values are common: some ranks need more of them than their share.
        rules: (pattern, role), the first pattern that matches the whole name decides; none: common.
    Raises:
        UsageError: an impossible grain.
        LimitExceeded: a cut of more runs than limits.py allows: columns of very many tensors.
    """
    if not 1 <= grain <= GRAIN_MAX:
        raise UsageError(f"a grain of {grain}; expected 1 to {GRAIN_MAX}")
    if grain == 1:
        cut = plain_cut(layout, for_anchor=for_anchor)
        return SlottedCut(cut, (COMMON,) * len(cut.frames))
    shares = Shares(layout, grain, kv_heads, rules)
    numbered = [
        pair for size in ITEM_SIZES for pair in _frames(layout, size, for_anchor, grain, shares)
    ]
    cut = Cut(layout.digest, tuple(frame for _, frame in numbered))
    return SlottedCut(cut, tuple(slot for slot, _ in numbered))


def _frames(
    layout: Layout, item_bytes: int, for_anchor: bool, grain: int, shares: Shares
) -> Iterator[tuple[int, FrameSpec]]:
    """(slot, frame) of one item size: the first of every slot, the second of every slot…"""
    filling = [Filling(item_bytes, for_anchor) for _ in range(grain + 1)]
    frames: list[list[FrameSpec]] = [[] for _ in filling]
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if tensor.item_bytes == item_bytes and tensor.items:
            for slot, segment in shares.of(tensor, start):
                frames[slot] += filling[slot].add(segment)
    for slot, rest in enumerate(filling):
        frames[slot] += rest.last()
    for together in itertools.zip_longest(*frames):
        yield from ((slot, frame) for slot, frame in enumerate(together) if frame is not None)


@dataclass(frozen=True)
class Grain:
    """What a publisher cuts along, for all cuts of a policy: the arguments of `grain_cut`.

    Attributes:
        shares: 1 for none.

    Raises:
        UsageError: shares or heads that aren't whole numbers from 1 up.
    """

    shares: int = 1
    kv_heads: int | None = None
    rules: Rules = DEFAULT_RULES

    def __post_init__(self) -> None:
        for what, value in (("a grain", self.shares), ("a number of heads", self.kv_heads)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{what} of {value!r}; expected a whole number from 1 up")

    def cut(self, layout: Layout, *, for_anchor: bool) -> SlottedCut:
        return grain_cut(
            layout, grain=self.shares, for_anchor=for_anchor, kv_heads=self.kv_heads,
            rules=self.rules,
        )  # fmt: skip
