"""Sharing a policy out among the processes that hold it: who publishes which blocks, and how.

Everything here follows from what each process says it holds, so all of them come to the same
result without a word more. What several hold alike is published by one of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import DocumentInvalid, PublishError
from plait.grain import COMMON, Grain, SlottedCut
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import pieces
from plait_trainer.blocks import BlockSpec, PlacedBlock
from plait_trainer.share import Share

# Differences named in one message.
_NAMED_MOST: Final = 8

# What one process holds: at most one block of each tensor.
Holding = Sequence[BlockSpec]


@dataclass(frozen=True, eq=False)
class Division:
    """A policy, shared out among its processes.

    Attributes:
        layout: of the whole policy.
        owned: by each process, in order of their ranks: the blocks that it publishes.
        rank: of this process.
        grain: what the cuts follow where there is one process.
    """

    layout: Layout
    owned: tuple[tuple[BlockSpec, ...], ...]
    rank: int = 0
    grain: Grain = field(default_factory=Grain)

    @cached_property
    def deltas(self) -> Share:
        """What this process publishes of a delta."""
        return self._share(for_anchor=False)

    @cached_property
    def anchors(self) -> Share:
        """What this process publishes of an anchor, over the same local layout."""
        return self._share(for_anchor=True)

    def _share(self, *, for_anchor: bool) -> Share:
        if len(self.owned) == 1:
            return Share.whole(self.layout, self.grain.cut(self.layout, for_anchor=for_anchor))
        frames: list[FrameSpec] = []
        for rank, blocks in enumerate(self.owned):
            local = Layout.of(block.local for block in blocks)
            local_frames = plain_cut(local, for_anchor=for_anchor).frames
            if rank == self.rank:
                mine = local, range(len(frames), len(frames) + len(local_frames)), local_frames
            placed = {block.name: self._place(block) for block in blocks}
            frames += (_at_words(frame, local, placed) for frame in local_frames)
        cut = Cut(self.layout.digest, tuple(frames))
        self._require_cover(cut)
        return Share(
            self.layout, SlottedCut(cut, (COMMON,) * len(frames)), mine[0], tuple(mine[1]), mine[2],
            {block.name: block for block in self.owned[self.rank] if not block.is_whole},
        )  # fmt: skip

    def _place(self, block: BlockSpec) -> PlacedBlock:
        return PlacedBlock(block, self.layout.start_of(block.name))

    def _require_cover(self, cut: Cut) -> None:
        try:
            if cut.covers(self.layout):
                return
        except DocumentInvalid as error:
            raise _overlap(self.owned) from error
        raise AssertionError("share_out has counted the elements")


def share_out(held: Sequence[Holding], *, rank: int = 0, grain: Grain | None = None) -> Division:
    """Who publishes what.

    Blocks that several processes hold alike go to the one among them that has least to publish.

    Args:
        held: what each process holds, in order of their ranks.
        rank: of this process.
        grain: only for one process.
    Raises:
        PublishError: the tensors differ between the processes; a part of one is held by none of
            them; or two hold parts that overlap without being the same.
    """
    wholes = _agreed_tensors(held)
    holders: dict[BlockSpec, list[int]] = {}
    for holder, blocks in enumerate(held):
        for block in blocks:
            # Nothing to publish: but a tensor without elements is part of the layout.
            if block.items:
                holders.setdefault(block, []).append(holder)
    _require_all(wholes.values(), holders)
    owned = _dealt_out(holders, len(held))
    if len(held) == 1:
        owned = [list(map(BlockSpec.all_of, wholes.values()))]
    layout = Layout.of(wholes.values())
    return Division(layout, tuple(map(tuple, owned)), rank, grain or Grain())


def _agreed_tensors(held: Sequence[Holding]) -> dict[str, TensorSpec]:
    wholes: dict[str, TensorSpec] = {}
    first: dict[str, int] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            known = wholes.setdefault(block.name, block.whole)
            first.setdefault(block.name, rank)
            if known != block.whole:
                raise PublishError(
                    f"tensor {block.name!r} is {known.dtype}{list(known.shape)} on rank "
                    f"{first[block.name]} and {block.whole.dtype}{list(block.whole.shape)} on "
                    f"rank {rank}"
                )
    return wholes


def _require_all(wholes: Iterable[TensorSpec], holders: dict[BlockSpec, list[int]]) -> None:
    """Every element is held. By number: overlaps are found with the cut."""
    counted: dict[str, int] = {}
    for block in holders:
        counted[block.name] = counted.get(block.name, 0) + block.items
    missing = [whole for whole in wholes if counted.get(whole.name, 0) < whole.items]
    if missing:
        names = [
            f"{whole.name!r} ({whole.items - counted.get(whole.name, 0)} of {whole.items} elements)"
            for whole in missing[:_NAMED_MOST]
        ]
        raise PublishError(
            f"of {len(missing)} tensors no process that publishes holds all: {', '.join(names)}",
            remedy="every process that holds a part of the model constructs a Publisher, in one "
            "group",
        )
    if any(counted.get(whole.name, 0) > whole.items for whole in wholes):
        raise _overlap(_dealt_out(holders, 1 + max(map(max, holders.values()))))


def _dealt_out(holders: dict[BlockSpec, list[int]], size: int) -> list[list[BlockSpec]]:
    owned: list[list[BlockSpec]] = [[] for _ in range(size)]
    load = [0] * size
    shared = []
    for block, ranks in holders.items():
        if len(ranks) > 1:
            shared.append(block)
        else:
            owned[ranks[0]].append(block)
            load[ranks[0]] += _bytes_of(block)
    # The largest first; the order doesn't depend on who says it.
    for block in sorted(shared, key=lambda block: (-_bytes_of(block), block.name, block.offsets)):
        rank = min(holders[block], key=lambda rank: (load[rank], rank))
        owned[rank].append(block)
        load[rank] += _bytes_of(block)
    return owned


def _bytes_of(block: BlockSpec) -> int:
    return block.items * block.whole.item_bytes


def _overlap(owned: Sequence[Holding]) -> PublishError:
    """The error that names two blocks which overlap."""
    found: dict[str, list[tuple[int, BlockSpec]]] = {}
    for rank, blocks in enumerate(owned):
        for block in blocks:
            for other_rank, other in found.setdefault(block.name, []):
                if block.overlaps(other):
                    return PublishError(
                        f"ranks {other_rank} and {rank} hold parts of {block.name!r} that overlap "
                        f"and aren't the same: at {list(other.offsets)} of {list(other.sizes)}, "
                        f"and at {list(block.offsets)} of {list(block.sizes)}"
                    )
            found[block.name].append((rank, block))
    raise AssertionError("nothing overlaps")


def _at_words(frame: FrameSpec, local: Layout, placed: dict[str, PlacedBlock]) -> FrameSpec:
    """A frame of the local layout in words of the whole one: the same items in the same order."""
    segments: list[Segment] = []
    width = words_per_item(frame.item_bytes)
    for segment in _segments(frame, local, placed):
        last = segments[-1] if segments else None
        if (
            last is not None
            and last.repeats == segment.repeats == 1
            and last.first_word + last.run * width == segment.first_word
        ):
            segments[-1] = Segment(last.first_word, last.run + segment.run, 0, 1)
        else:
            segments.append(segment)
    return FrameSpec(frame.item_bytes, tuple(segments))


def _segments(frame: FrameSpec, local: Layout, placed: dict[str, PlacedBlock]) -> Iterator[Segment]:
    for piece in pieces(frame, local):
        start = piece.start_item
        yield from placed[piece.tensor.name].segments(start, start + piece.items)
