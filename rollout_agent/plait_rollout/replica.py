"""The Replica port: what a follower drives, however weights get into it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.wire import Phase
from plait_rollout.engine import ApplyReport
from plait_rollout.goal import Goal, Held

# Told of every phase that a move enters.
OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How a move went.

    Attributes:
        durations: seconds by step: plan, fetch, stage, pause, apply, verify, reload.
        changed_elements: items that it changed; None where that isn't known.
        fallback: why the usual way wasn't taken; empty if it was.
    """

    durations: Mapping[str, float]
    changed_elements: int | None = None
    fallback: str = field(default="")


class Replica(Protocol):
    """One copy of the weights. No method is called from two threads at once.

    Attributes:
        kind: short name of the way, for the fleet.
        held: what it is proven to hold; None: nothing is proven, `attach` finds out.
    """

    @property
    def kind(self) -> str: ...

    @property
    def held(self) -> Held | None: ...

    def attach(self, layout: Layout) -> Held | None:
        """Asks by content what is held; None: no weights of this layout.

        Raises:
            EngineUnavailable, LayoutChanged, MapUnproven.
        """

    def still_holds(self) -> bool:
        """A cheap look whether `held` may still be true. False: forgotten, attach again."""

    def move(self, goal: Goal, layout: Layout, on_phase: OnPhase, *, attempt: int) -> MoveReport:
        """Goes to the goal. Afterwards `held` is the goal's state, proven, under its stamp.

        Args:
            layout: the goal's.
            attempt: how often this goal was tried before in vain; a replica that knows
                another way takes it from some number on.
        Raises:
            PlaitError: not reached. `held` says what is served still, None if that is unknown.
        """

    def verify(self) -> Fingerprint:
        """A full re-read of what is held now; `held` is not changed by it."""

    def close(self) -> None:
        """Lets go of it; it goes on serving."""


class DirectoryLoader(Protocol):
    """An engine that loads whole versions from a directory."""

    def load_directory(self, path: Path, stamp: str) -> ApplyReport:
        """Replaces all weights, and stamps, with generation paused.

        Raises:
            EngineRefused: it serves the old weights still.
            EngineUnavailable, ReplicaUnproven: unknown what it holds.
        """

    def version(self) -> str:
        """The stamp that the engine reports. Raises EngineUnavailable."""

    def close(self) -> None:
        """Lets go of it; it goes on serving."""
