"""Finding what changed, tensor by tensor: whatever a detector knows the old bits from.

A detector gives `read`, the old and the new bits of adjacent items; here they are compared, dealt
out to the frames of the share, and hashed, while they are in the cache.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.codec import sweep
from plait.codec.algebra import FrameDelta
from plait.codec.stretches import Part, Scratch
from plait.errors import PublishError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_at
from plait.layout import TensorSpec, words_per_item
from plait.weights import UNSIGNED, Piece
from plait.workers import shared
from plait_trainer.blocks import PlacedBlock
from plait_trainer.share import Share

# Items [start, stop) of a tensor of the local layout, before and now.
Read = Callable[[TensorSpec, int, int], tuple[NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class TensorChange:
    """What was found in one tensor of a share.

    Attributes:
        found: its changes, by the places of their frames in the share.
        now: fingerprint of all its new bits at their words in the whole layout.
    """

    name: str
    found: tuple[sweep.Found, ...]
    now: Fingerprint

    @property
    def increment(self) -> Fingerprint:
        """Fingerprint of the new bits minus that of the old ones."""
        return sum((part.increment for part in self.found), ZERO)


def compare_share(
    share: Share,
    read: Read,
    *,
    names: Collection[str] | None = None,
    threads: int = 1,
    block: int | None = None,
) -> list[TensorChange]:
    """What changed in each tensor of a share.

    Args:
        read: called for adjacent blocks of a tensor's items, each once; on several threads for
            several tensors if there are more than one.
        names: of the tensors to compare; by default all of them.
        threads: of the process's workers, at most, that compare tensors at the same time.
        block: items that `read` is asked for at once; by default as many as the sweep takes.
    Raises:
        PublishError: `read` gave other arrays than it should.
    """
    own = threading.local()

    def compare(parts: list[Part]) -> TensorChange:
        if not hasattr(own, "scratch"):
            own.scratch = Scratch()
        name, now = parts[0].piece.tensor.name, ZERO
        place = share.place(name)
        held: list[_Held] = []

        def read_and_hash(
            tensor: TensorSpec, start: int, stop: int
        ) -> tuple[NDArray[Any], NDArray[Any]]:
            nonlocal now
            old, new = read(tensor, start, stop)
            new = checked_run(tensor, new, stop - start)
            now += place.fingerprint(new, start)
            held[:] = [_Held(start, checked_run(tensor, old, stop - start), new)]
            return held[0].old, new

        if place.is_contiguous:
            parts = _moved(parts, place.first_word)
            found = tuple(sweep.compare(parts, read_and_hash, own.scratch, block=block))
        else:
            # In words of the local layout, and so with another increment.
            swept = sweep.compare(parts, read_and_hash, own.scratch, block=block)
            pieces = {part.frame: part.piece for part in parts}
            found = tuple(_placed(each, pieces[each.frame], place, held[0]) for each in swept)
        return TensorChange(name, found, now)

    groups = [
        parts for parts in share.parts
        if names is None or parts[0].piece.tensor.name in names
    ]  # fmt: skip
    return shared().map(compare, groups, at_once=threads)


@dataclass(frozen=True, slots=True)
class _Held:
    """The block of a tensor's items that was read last, the first of which is number `start`."""

    start: int
    old: NDArray[Any]
    new: NDArray[Any]


def _moved(parts: list[Part], first_word: int) -> list[Part]:
    """Parts of one tensor, as if its first word were another."""
    piece = parts[0].piece
    shift = first_word - (
        piece.first_word - piece.start_item * words_per_item(piece.tensor.item_bytes)
    )
    if not shift:
        return parts
    return [
        Part(part.frame, replace(part.piece, first_word=part.piece.first_word + shift))
        for part in parts
    ]


def _placed(found: sweep.Found, piece: Piece, place: PlacedBlock, held: _Held) -> sweep.Found:
    """What was found, with its increment at the words of the whole layout."""
    items = found.positions.astype(np.int64) + (piece.start_item - piece.frame_offset)
    words = place.words_of(items)
    items -= held.start
    increment = fingerprint_at(words, held.new[items]) - fingerprint_at(words, held.old[items])
    return replace(found, increment=increment)


def deltas_of(share: Share, changes: Iterable[TensorChange]) -> dict[int, FrameDelta]:
    """The frames that changed, by their numbers in the whole cut."""
    found = list(itertools.chain.from_iterable(change.found for change in changes))
    places = sorted({part.frame for part in found})
    order = {place: row for row, place in enumerate(places)}
    deltas = sweep.join(
        [share.local_frames[place] for place in places],
        (replace(part, frame=order[part.frame]) for part in found),
    )
    return {share.numbers[place]: delta for place, delta in zip(places, deltas, strict=True)}


def checked_run(tensor: TensorSpec, bits: NDArray[Any], items: int) -> NDArray[Any]:
    """Bits as the compiled loops, which check nothing, rely on: contiguous, read-only.

    Raises:
        PublishError: another number of items, or of another size.
    """
    if bits.shape != (items,) or bits.dtype != UNSIGNED[tensor.item_bytes]:
        raise PublishError(
            f"{tensor.name!r} gave {bits.dtype}{list(bits.shape)} for {items} items "
            f"of {tensor.dtype}"
        )
    bits = np.ascontiguousarray(bits).view()
    bits.flags.writeable = False
    return bits
