"""Slots: which of them a rank needs, and their chunks."""

from collections.abc import Iterable

from plait.errors import UsageError
from plait.grain.shares import COMMON
from plait.manifest import ChunkEntry, Manifest


def slots_of(rank: int, size: int, *, grain: int = 8) -> frozenset[int]:
    """Slots that hold everything of rank `rank` of `size`: the common one and its shares.

    Exact where `size` divides the grain; for any other size its neighbours' shares come along.
    It holds for engines whose ranks divide the model in equal, consecutive shares (and whose
    expert-parallel size is `size` too); an engine's own map (`needed_chunks`) knows for certain.

    Raises:
        UsageError: no such rank.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}")
    first, end = rank * grain // size, -(-(rank + 1) * grain // size)
    return frozenset({COMMON, *range(first + 1, end + 1)})


def chunks_in_slots(manifest: Manifest, slots: Iterable[int]) -> tuple[ChunkEntry, ...]:
    """The manifest's chunks of these slots, in its order."""
    wanted = frozenset(slots)
    return tuple(chunk for chunk in manifest.chunks if chunk.slot in wanted)
