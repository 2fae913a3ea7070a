"""The fingerprint of items that lie in torch tensors, on any device.

torch has no unsigned 64-bit arithmetic on every device; two's complement gives the same bits from
int64, with right shifts made logical by a mask.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import LayoutChanged
from plait.fingerprint import (
    FMIX64,
    MIX13,
    SEED_0,
    SEED_1,
    ZERO,
    Fingerprint,
    fingerprint_at,
    fingerprint_run,
)
from plait.layout import Layout, words_per_item
from plait.tensors.bits import integer_view
from plait.weights import UNSIGNED

# Of each lane, in torch's signed arithmetic: what is added to a key, and the finaliser's constants.
_LANES: Final = tuple(
    (int(seed.view(np.int64)), tuple(int(constant.view(np.int64)) for constant in constants))
    for seed, constants in ((SEED_0, FMIX64), (SEED_1, MIX13))
)

# Items hashed at once: int64 temporaries of 8 bytes an item, so some tens of MiB.
_SLICE: Final = 1 << 20
# Shorter contiguous runs are gathered first: a call for each would cost more than the copy.
_LONG_RUN: Final = 1 << 12


def fingerprint_items(words: torch.Tensor, items: torch.Tensor) -> Fingerprint:
    """Fingerprint of scattered items, computed where they lie.

    Args:
        words: 1-d int64, each item's first word.
        items: 1-d uint8, int16, int32 or int64 on the same device, of the same length.
    """
    if items.device.type == "cpu":
        return fingerprint_at(
            np.ascontiguousarray(words.numpy()),
            np.ascontiguousarray(items.numpy()).view(UNSIGNED[items.element_size()]),
        )
    return items_on_device(words, items)


def items_on_device(words: torch.Tensor, items: torch.Tensor) -> Fingerprint:
    """As `fingerprint_items`, by torch's arithmetic on any device, a slice at a time."""
    total = ZERO
    for start in range(0, items.numel(), _SLICE):
        part = slice(start, start + _SLICE)
        total += device_sum(words[part], items[part])
    return total


def fingerprint_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Fingerprint of whole weights: a full pass over every bit, where each tensor lies.

    Args:
        tensors: contiguous, by canonical name; others are ignored.
    Raises:
        LayoutChanged: one is missing, or holds another number of bytes.
    """
    total = ZERO
    for spec, first_word in zip(layout.tensors, layout.starts, strict=False):
        held = tensors.get(spec.name)
        if held is None or (held.element_size(), held.numel()) != (spec.item_bytes, spec.items):
            raise LayoutChanged(f"the tensors hold no {spec.dtype}{list(spec.shape)} {spec.name!r}")
        total += fingerprint_flat(integer_view(held), first_word)
    return total


def fingerprint_flat(flat: torch.Tensor, first_word: int) -> Fingerprint:
    """Fingerprint of adjacent items, computed where they lie.

    Args:
        flat: 1-d contiguous uint8, int16, int32 or int64.
        first_word: canonical index of the first item's first word.
    """
    if flat.device.type == "cpu":
        return fingerprint_run(flat.numpy().view(UNSIGNED[flat.element_size()]), first_word)
    return device_run(flat, first_word)


def device_run(flat: torch.Tensor, first_word: int) -> Fingerprint:
    """As `fingerprint_flat`, by torch's arithmetic on any device, a slice at a time."""
    width, total = words_per_item(flat.element_size()), ZERO
    for start in range(0, flat.numel(), _SLICE):
        items = flat[start : start + _SLICE]
        words = torch.arange(items.numel(), dtype=torch.int64, device=flat.device)
        total += device_sum(words * width + (first_word + start * width), items)
    return total


def device_sum(words: torch.Tensor, items: torch.Tensor) -> Fingerprint:
    """As `fingerprint_items`, by torch's arithmetic on any device, in one piece."""
    lanes = [torch.zeros((), dtype=torch.int64, device=items.device) for _ in range(2)]
    values = items.long()
    bits = 8 * min(items.element_size(), 2)
    for k in range(words_per_item(items.element_size())):
        value = (values >> (16 * k)) & ((1 << bits) - 1)
        key = ((words + k) << 16) | value
        for lane, (seed, constants) in zip(lanes, _LANES, strict=True):
            lane += _mix(key + seed, constants).sum()
    mask = (1 << 64) - 1
    return Fingerprint(*(int(lane.item()) & mask for lane in lanes))


def fingerprint_slab(
    flat: torch.Tensor,
    start: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    first_word: int,
    word_strides: Sequence[int],
) -> Fingerprint:
    """Fingerprint of an affine block: items `start + Σ i·strides` of a flat tensor.

    Args:
        flat: 1-d integers on any device.
        sizes: of the block, outermost first; at least one side.
        strides: in items of `flat`, one a side.
        first_word: canonical index of the block's first word.
        word_strides: in words, one a side.
    """
    width = words_per_item(flat.element_size())
    inner = sizes[-1]
    total = ZERO
    if inner >= _LONG_RUN and (strides[-1], word_strides[-1]) == (1, width):
        for at, word in zip(
            _starts(sizes[:-1], strides[:-1], start),
            _starts(sizes[:-1], word_strides[:-1], first_word),
            strict=True,
        ):
            total += fingerprint_flat(flat[at : at + inner], int(word))
        return total
    outer_at = torch.from_numpy(_starts(sizes[:-1], strides[:-1], start))
    outer_word = torch.from_numpy(_starts(sizes[:-1], word_strides[:-1], first_word))
    rows = max(_SLICE // inner, 1)
    for row in range(0, outer_at.numel(), rows):
        for column in range(0, inner, _SLICE):
            side = torch.arange(column, min(column + _SLICE, inner))
            at = outer_at[row : row + rows, None] + side * strides[-1]
            words = outer_word[row : row + rows, None] + side * word_strides[-1]
            items = flat[at.reshape(-1).to(flat.device)]
            total += fingerprint_items(words.reshape(-1).to(flat.device), items)
    return total


def _starts(sizes: Sequence[int], strides: Sequence[int], first: int) -> NDArray[np.int64]:
    """`first + Σ i·strides` over all indices of `sizes`, row-major, int64."""
    starts = np.array([first], np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts


def _mix(key: torch.Tensor, constants: tuple[int, ...]) -> torch.Tensor:
    first, multiplier, second, other, last = constants
    key = (key ^ _shift_right(key, first)) * multiplier
    key = (key ^ _shift_right(key, second)) * other
    return key ^ _shift_right(key, last)


def _shift_right(key: torch.Tensor, bits: int) -> torch.Tensor:
    return (key >> bits) & ((1 << (64 - bits)) - 1)
