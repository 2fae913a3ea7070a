"""The Engine port: one live engine, as the follower sees it, whose weights are moved in place.

A move has two phases. *Stage* decodes, checks and compares with the live old bits while the engine
generates; it writes nothing. *Apply* pauses, scatters, re-reads what it touched, stamps and goes
on; what can't be proven is undone before the engine serves again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from plait.cut import Cut
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.manifest import Manifest

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True, slots=True)
class MoveStep:
    """One delta of a chain, fetched and verified.

    Attributes:
        manifest: of the delta.
        direction: `reverse` subtracts it.
        chunks: local files, in the manifest's order.
    """

    manifest: Manifest
    direction: Direction
    chunks: tuple[Path, ...]

    @property
    def base(self) -> Fingerprint:
        """The state that this step leaves."""
        assert self.manifest.base is not None  # a move is made of deltas
        return self.manifest.base if self.direction == "forward" else self.manifest.target

    @property
    def target(self) -> Fingerprint:
        """The state that this step reaches."""
        assert self.manifest.base is not None
        return self.manifest.target if self.direction == "forward" else self.manifest.base


@dataclass(frozen=True, slots=True)
class Move:
    """A chain of deltas of one cut, to be added up and applied at once.

    Attributes:
        layout, cut: shared by all steps; `cut` is None if no step has chunks.
        base, target: the state before the first step and after the last.
        steps: in the order of the chain; may be empty (an unchanged version).
        stamp: what the engine reports as its version afterwards, `POLICY@SEQ#GENERATION`.
    """

    layout: Layout
    cut: Cut | None
    base: Fingerprint
    target: Fingerprint
    steps: Sequence[MoveStep]
    stamp: str


@dataclass(frozen=True, slots=True)
class StageReport:
    """What staging found. `changed_elements` counts items of the added-up delta."""

    changed_elements: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What an apply did.

    Attributes:
        paused_seconds: how long generation stood still.
        scatter_seconds: of them, writing and re-reading the touched words (the slowest rank).
    """

    paused_seconds: float
    scatter_seconds: float


@dataclass(frozen=True, slots=True)
class AttachReport:
    """What attaching found.

    Attributes:
        fingerprint: of everything that the engine holds under the layout, from a full re-read.
        ranks: processes that hold a part.
        unheld: tensors of the layout that the engine doesn't hold; the agent keeps and patches
            them.
        notes: facts worth telling (a fallback, a replicated piece).
    """

    fingerprint: Fingerprint
    ranks: int
    unheld: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


class Engine(Protocol):
    """One live engine. One follower drives it; no method is called from two threads at once."""

    def attach(self, layout: Layout) -> AttachReport:
        """Maps canonical words to the engine's own parameters and re-reads all of them.

        Raises:
            EngineUnavailable: not answering.
            MapUnproven: its parameters can't be mapped (the reload path still works).
        """

    def fingerprint(self) -> Fingerprint:
        """A full re-read of the weights now held. Raises EngineUnavailable."""

    def stage(self, move: Move) -> StageReport:
        """Prepares a move beside the running generation; writes nothing.

        Raises:
            BaseMismatch: the live bits aren't the move's base.
            FormatError, CorruptionError: the chunks aren't what the manifests say.
            EngineRefused, EngineUnavailable.
        """

    def apply(self) -> ApplyReport:
        """Makes the staged move live: pause, scatter, prove, stamp, continue.

        Raises:
            EngineRefused: a proof failed; undone, the base is still served.
            EngineUnavailable: unknown what it holds; attach again.
            ReplicaUnproven: undoing failed too; the engine stays paused.
        """

    def discard(self) -> None:
        """Forgets a staged move."""

    def undo(self, stamp: str) -> ApplyReport:
        """Takes the last applied move back at once from the undo list, and stamps.

        Raises:
            EngineRefused: nothing to undo.
        """

    def version(self) -> str:
        """The stamp that the engine reports. Raises EngineUnavailable."""

    def close(self) -> None:
        """Detaches; the engine goes on serving."""
