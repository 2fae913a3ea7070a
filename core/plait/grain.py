"""The parallel grain: cuts whose frames belong to one slot each, so that a rank needs only its own.

Slot 0 is common: norms, routers, scalars, whatever has no known parallel side. Slots 1 to `grain`
are equal shares of the rest, cut as tensor- and expert-parallel engines cut it: so one cut serves
every degree of parallelism that divides the grain. Which rank needs what is never decided here: an
engine reads its own map (docs/format.md, section 4). A wrong role costs bytes, not correctness.
"""

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from plait.cut import ITEM_SIZES, Cut, FrameSpec, Segment, items_max, plain_cut
from plait.errors import UsageError
from plait.layout import Layout, TensorSpec, words_per_item
from plait.manifest import ChunkEntry, Manifest

COMMON: Final = 0
GRAIN_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Role:
    """How engines divide a tensor among their ranks.

    Attributes:
        kind: `rows` along the first side, `columns` along the second one of two, `experts` whole
            by the number that its name carries, `common` not at all.
        parts: tensors stacked along the rows, each divided by itself (gate on up).
        padding: engines divide the rows as if they were filled up to a multiple of this.
        key_value: rows are key-value heads, which engines repeat where ranks outnumber them.
    """

    kind: Literal["rows", "columns", "experts", "common"]
    parts: int = 1
    padding: int = 1
    key_value: bool = False


ROWS: Final = Role("rows")
COLUMNS: Final = Role("columns")
EXPERTS: Final = Role("experts")
KEY_VALUE: Final = Role("rows", key_value=True)
VOCABULARY: Final = Role("rows", padding=64)

Rules = Sequence[tuple[str, Role]]

_PARAMETER: Final = r"\.(weight|bias|weight_scale|weight_scale_inv)"

# Whole experts: for engines whose ranks hold whole experts. One that divides every expert among its
# ranks is served by DENSE_RULES alone, at a longer cut.
EXPERT_RULES: Final[Rules] = (
    (r"(?P<group>.*\bexperts)\.(?P<number>\d+)\..*", EXPERTS),
    (r".*\bexperts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(_bias)?", ROWS),
)
DENSE_RULES: Final[Rules] = (
    (rf".*\b(k_proj|v_proj){_PARAMETER}", KEY_VALUE),
    (rf".*\b(gate_up_proj){_PARAMETER}", Role("rows", parts=2)),
    (rf".*\b(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|w1|w3|fc1){_PARAMETER}", ROWS),
    (rf".*\b(o_proj|out_proj|down_proj|w2|fc2){_PARAMETER}", COLUMNS),
    (r".*\b(embed_tokens|lm_head)\.(weight|bias)", VOCABULARY),
)
DEFAULT_RULES: Final[Rules] = (*EXPERT_RULES, *DENSE_RULES)


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
    roles = _Roles(layout, grain, kv_heads, rules)
    numbered = [
        pair for size in ITEM_SIZES for pair in _frames(layout, size, for_anchor, grain, roles)
    ]
    cut = Cut(layout.digest, tuple(frame for _, frame in numbered))
    return SlottedCut(cut, tuple(slot for slot, _ in numbered))


def _frames(
    layout: Layout, item_bytes: int, for_anchor: bool, grain: int, roles: "_Roles"
) -> Iterator[tuple[int, FrameSpec]]:
    """(slot, frame) of one item size: the first of every slot, the second of every slot…"""
    filling = [_Filling(item_bytes, for_anchor) for _ in range(grain + 1)]
    frames: list[list[FrameSpec]] = [[] for _ in filling]
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if tensor.item_bytes == item_bytes and tensor.items:
            for slot, segment in roles.shares(tensor, start):
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
    """

    shares: int = 1
    kv_heads: int | None = None
    rules: Rules = DEFAULT_RULES

    def cut(self, layout: Layout, *, for_anchor: bool) -> SlottedCut:
        return grain_cut(
            layout, grain=self.shares, for_anchor=for_anchor, kv_heads=self.kv_heads,
            rules=self.rules,
        )  # fmt: skip


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


def kv_heads_of(config: Mapping[str, Any]) -> int | None:
    """Key-value heads that a Hugging Face `config.json` states, of the text model if nested."""
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, Mapping) else {}):
        for name in ("num_key_value_heads", "num_attention_heads"):
            if isinstance(fields.get(name), int):
                return int(fields[name])
    return None


class _Roles:
    """The shares of every tensor of a layout."""

    def __init__(self, layout: Layout, grain: int, kv_heads: int | None, rules: Rules) -> None:
        self._grain = grain
        self._heads_divide = kv_heads is not None and kv_heads % grain == 0
        self._rules = [(re.compile(pattern), role) for pattern, role in rules]
        self._experts: dict[str, set[int]] = {}
        for tensor in layout.tensors:
            role, match = self._role_of(tensor.name)
            if role.kind == "experts" and match is not None:
                self._experts.setdefault(match["group"], set()).add(int(match["number"]))

    def shares(self, tensor: TensorSpec, start: int) -> Iterator[tuple[int, Segment]]:
        """(slot, segment) of the tensor's parts, which cover it in order of their slots."""
        role, match = self._role_of(tensor.name)
        found: list[tuple[int, Segment]] = []
        if role.kind == "experts" and match is not None:
            found = self._expert(tensor, start, match)
        elif role.kind == "rows" and (self._heads_divide or not role.key_value):
            found = self._rows(tensor, start, role)
        elif role.kind == "columns":
            found = self._columns(tensor, start)
        yield from found or [(COMMON, _run(start, tensor.items))]

    def _role_of(self, name: str) -> tuple[Role, re.Match[str] | None]:
        for pattern, role in self._rules:
            if match := pattern.fullmatch(name):
                return role, match
        return Role("common"), None

    def _rows(self, tensor: TensorSpec, start: int, role: Role) -> list[tuple[int, Segment]]:
        rows = tensor.shape[0] if tensor.shape else 0
        # Packed items of sub-byte types may cross the rows.
        if not rows or rows % role.parts or tensor.items % rows:
            return []
        part, row_items = rows // role.parts, tensor.items // rows
        padded = -(-part // role.padding) * role.padding
        if padded % self._grain:
            return []
        share, width = padded // self._grain, row_items * words_per_item(tensor.item_bytes)
        return [
            (1 + slot, _run(start + (number * part + first) * width, (end - first) * row_items))
            for slot in range(self._grain)
            for first, end in [(min(slot * share, part), min((slot + 1) * share, part))]
            for number in range(role.parts if first < end else 0)
        ]

    def _columns(self, tensor: TensorSpec, start: int) -> list[tuple[int, Segment]]:
        if len(tensor.shape) != 2:
            return []
        rows, row_items = tensor.shape[0], tensor.items // tensor.shape[0]
        if rows * row_items != tensor.items or row_items % self._grain:
            return []
        if tensor.shape[1] % self._grain:
            return []
        run, width = row_items // self._grain, words_per_item(tensor.item_bytes)
        if rows == 1:
            return [(1 + s, _run(start + s * run * width, run)) for s in range(self._grain)]
        return [
            (1 + slot, Segment(start + slot * run * width, run, row_items * width, rows))
            for slot in range(self._grain)
        ]

    def _expert(
        self, tensor: TensorSpec, start: int, match: re.Match[str]
    ) -> list[tuple[int, Segment]]:
        numbers = self._experts[match["group"]]
        if len(numbers) % self._grain or max(numbers) != len(numbers) - 1:
            return []
        slot = 1 + int(match["number"]) * self._grain // len(numbers)
        return [(slot, _run(start, tensor.items))]


class _Filling:
    """One slot's frames of one item size, as segments come in."""

    def __init__(self, item_bytes: int, for_anchor: bool) -> None:
        self._item_bytes = item_bytes
        self._width = words_per_item(item_bytes)
        self._most = self._room = items_max(item_bytes, dense=for_anchor)
        self._segments: list[Segment] = []

    def add(self, segment: Segment) -> Iterator[FrameSpec]:
        """Takes a segment in; yields the frames that are full with it."""
        parts = deque([segment])
        while parts:
            part = parts.popleft()
            head, rest = self._split(part)
            if head is not None:
                self._append(head)
            parts.extendleft(reversed(rest))
            if head is None or not self._room:
                yield from self.last()

    def last(self) -> Iterator[FrameSpec]:
        """The frame begun, if there is one."""
        if self._segments:
            yield FrameSpec(self._item_bytes, tuple(self._segments))
            self._segments, self._room = [], self._most

    def _split(self, segment: Segment) -> tuple[Segment | None, list[Segment]]:
        """What still fits into the frame, in whole runs where there are several; and the rest."""
        if segment.items <= self._room:
            return segment, []
        first, run, stride, repeats = (
            segment.first_word, segment.run, segment.stride, segment.repeats,
        )  # fmt: skip
        if repeats == 1:
            room = self._room
            return _run(first, room), [_run(first + room * self._width, run - room)]
        fits = self._room // run
        if not fits and not self._segments:
            return None, [_run(first, run), _strided(first + stride, run, stride, repeats - 1)]
        rest = _strided(first + fits * stride, run, stride, repeats - fits)
        return (_strided(first, run, stride, fits) if fits else None), [rest]

    def _append(self, segment: Segment) -> None:
        last = self._segments[-1] if self._segments else segment
        if (
            last.repeats == segment.repeats == 1
            and last.first_word + last.run * self._width == segment.first_word
        ):
            self._segments.pop()
            self._room += last.run
            segment = _run(last.first_word, last.run + segment.run)
        self._segments.append(segment)
        self._room -= segment.items


def _run(first_word: int, items: int) -> Segment:
    return Segment(first_word, items, 0, 1)


def _strided(first_word: int, run: int, stride: int, repeats: int) -> Segment:
    return Segment(first_word, run, stride, repeats) if repeats > 1 else _run(first_word, run)
