"""The lineage: the tree of versions, the graph of their states, and the way through both.

Pure: it knows numbers and names, no bytes and no clock. A *state* is what weights are (layout and
fingerprint); several versions may have one state. Manifests are the graph's edges: a delta leads
both ways, an anchor leads from nothing.
"""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from plait.canonical import is_digest
from plait.errors import DocumentInvalid, NotFound, UsageError
from plait.limits import INTEGER_MAX
from plait.names import check_name

_STEP_BACK: Final = re.compile(r"(?P<channel>[^~]+)(?:~(?P<back>[0-9]{1,16}))?")


@dataclass(frozen=True, slots=True)
class SeqRef:
    """`41`: the version with that number."""

    seq: int

    def __str__(self) -> str:
        return str(self.seq)


@dataclass(frozen=True, slots=True)
class ChannelRef:
    """`main`, or `main~3`: three steps back along the parents of the channel's head."""

    channel: str
    back: int = 0

    def __str__(self) -> str:
        return f"{self.channel}~{self.back}" if self.back else self.channel


@dataclass(frozen=True, slots=True)
class DigestRef:
    """`sha256:…`: the version with that version digest."""

    digest: str

    def __str__(self) -> str:
        return self.digest


Ref = SeqRef | ChannelRef | DigestRef


def parse_ref(text: str) -> Ref:
    """A version of a policy as people write it.

    Raises:
        UsageError: none of the three forms.
    """
    if text.isascii() and text.isdigit() and len(text) <= 16 and 1 <= int(text) <= INTEGER_MAX:
        return SeqRef(int(text))
    if is_digest(text):
        return DigestRef(text)
    match = _STEP_BACK.fullmatch(text)
    try:
        if match is not None:
            return ChannelRef(check_name(match["channel"], "channel"), int(match["back"] or 0))
    except DocumentInvalid:
        pass  # said below, with all that a REF may be
    raise UsageError(
        f"{text[:80]!r} names no version; expected a number (41), a channel (main), "
        "a step back along its chain (main~3) or a version digest"
    )


class State(NamedTuple):
    """Identity of weights: digest of their layout, and their fingerprint in hex."""

    layout: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Edge:
    """One manifest in the graph of states.

    Attributes:
        base: None for an anchor.
        cost: bytes to fetch in order to follow it.
        external: an anchor whose bytes are not stored.
    """

    manifest: str
    base: State | None
    target: State
    cost: int
    external: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One edge as it is walked."""

    edge: Edge
    kind: Literal["forward", "reverse", "anchor", "external"]
    base: State | None
    target: State


@dataclass
class Lineage:
    """Versions and manifests of one policy. It only grows; reading while it grows is safe."""

    states: dict[int, State] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    versions: dict[State, list[int]] = field(default_factory=dict)
    anchors: list[Edge] = field(default_factory=list)
    deltas: dict[State, list[Step]] = field(default_factory=dict)

    def add_version(self, seq: int, parent: int | None, state: State) -> None:
        self.states[seq] = state
        self.parents[seq] = parent
        self.versions.setdefault(state, []).append(seq)

    def add_edge(self, edge: Edge) -> None:
        if edge.base is None:
            self.anchors.append(edge)
        elif edge.base != edge.target:
            forward = Step(edge, "forward", edge.base, edge.target)
            reverse = Step(edge, "reverse", edge.target, edge.base)
            self.deltas.setdefault(edge.base, []).append(forward)
            self.deltas.setdefault(edge.target, []).append(reverse)

    def chain(self, seq: int) -> Iterator[int]:
        """The version itself, its parent, and so on back to the first of its line."""
        version: int | None = seq
        while version is not None:
            yield version
            version = self.parents[version]

    def back(self, seq: int, steps: int) -> int:
        """The version that lies `steps` parents back.

        Raises:
            NotFound: the line begins later.
        """
        for distance, version in enumerate(self.chain(seq)):
            if distance == steps:
                return version
        raise NotFound(f"version {seq} has no ancestor {steps} steps back")

    def distance(self, ancestor: int, seq: int) -> int | None:
        """Steps from a version back to one of its ancestors; None if it isn't one."""
        for distance, version in enumerate(self.chain(seq)):
            if version == ancestor:
                return distance
        return None

    def cheapest(
        self,
        base: State | None,
        target: State,
        *,
        allow_external: bool,
        allow_anchor: bool = True,
    ) -> list[Step] | None:
        """The chain of steps that costs the fewest bytes, then the fewest steps.

        Args:
            base: what the caller holds; None for nothing. External anchors are followed from
                nothing only: whoever holds a state isn't known to hold the base model as well.
            allow_anchor: False asks for a chain of deltas alone.
        Returns:
            The steps, none if the caller is there already; None if no chain leads there.
        """
        best: dict[State, tuple[int, int]] = {}
        came_by: dict[State, Step] = {}
        queue: list[tuple[int, int, State]] = []

        def reach(step: Step, cost: int, length: int) -> None:
            if step.target not in best or (cost, length) < best[step.target]:
                best[step.target] = (cost, length)
                came_by[step.target] = step
                heapq.heappush(queue, (cost, length, step.target))

        if base is not None:
            best[base] = (0, 0)
            heapq.heappush(queue, (0, 0, base))
        if allow_anchor:
            for step in self._beginnings(external=base is None and allow_external):
                reach(step, step.edge.cost, 1)
        while queue:
            cost, length, state = heapq.heappop(queue)
            if state == target:
                return _walked_back(came_by, target)
            if (cost, length) == best[state]:
                for step in self.deltas.get(state, ()):
                    reach(step, cost + step.edge.cost, length + 1)
        return None

    def _beginnings(self, *, external: bool) -> Iterator[Step]:
        for anchor in self.anchors:
            if not anchor.external:
                yield Step(anchor, "anchor", None, anchor.target)
            elif external:
                yield Step(anchor, "external", None, anchor.target)


def _walked_back(came_by: dict[State, Step], target: State) -> list[Step]:
    steps: list[Step] = []
    state: State | None = target
    while state is not None and state in came_by:
        steps.append(came_by[state])
        state = came_by[state].base
    return steps[::-1]
