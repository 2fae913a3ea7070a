"""A replica whose live engine is moved in place, and reloaded where that can't be done."""

import logging

from plait.errors import (
    EngineUnavailable,
    FingerprintMismatch,
    LayoutChanged,
    MapUnproven,
    NoPlan,
    PlaitError,
    ReplicaUnproven,
    UnknownBase,
)
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait_rollout.engine import Engine, Move
from plait_rollout.goal import Goal, Held
from plait_rollout.reload import ReloadReplica
from plait_rollout.replica import MoveReport, OnPhase
from plait_rollout.source import DeltaSource, moves_of
from plait_rollout.stopwatch import stopwatch

# What no repetition heals: deltas can't lead from what is held to the goal, or can't be placed.
_NOT_BY_DELTAS = (MapUnproven, UnknownBase, NoPlan, LayoutChanged)

_logger = logging.getLogger(__name__)


class InPlaceReplica:
    """One live engine under the Engine port.

    Args:
        engine: attached by `attach`.
        source: of deltas.
        reload: another way into the same engine, taken when deltas can't lead to the goal
            (unknown weights, no chain of deltas, another layout, parameters that can't be mapped)
            or when they failed `reload_after` times. Without it such a goal is refused.
    """

    def __init__(
        self,
        engine: Engine,
        source: DeltaSource,
        *,
        reload: ReloadReplica | None = None,
        reload_after: int = 2,
    ) -> None:
        self._engine = engine
        self._source = source
        self._reload = reload
        self._reload_after = reload_after
        self._held: Held | None = None
        self._unmapped: MapUnproven | LayoutChanged | None = None

    @property
    def kind(self) -> str:
        return "reload" if self._unmapped is not None else "in-place"

    @property
    def held(self) -> Held | None:
        return self._held

    def attach(self, layout: Layout) -> Held | None:
        """See Replica. An engine that can't be mapped is only given up if it can be reloaded."""
        self._held = self._unmapped = None
        try:
            report = self._engine.attach(layout)
        except (MapUnproven, LayoutChanged) as error:
            if self._reload is None:
                raise
            _logger.warning("not in place, but by reload: %s", error)
            self._unmapped = error
            return None
        for note in report.notes:
            _logger.info("engine: %s", note)
        self._held = Held(layout.digest, report.fingerprint, self._engine.version())
        return self._held

    def still_holds(self) -> bool:
        """See Replica: compares the engine's stamp, which another process would not have."""
        if self._held is None:
            return False
        try:
            same = self._engine.version() == self._held.stamp
        except EngineUnavailable:
            same = False
        if not same:
            self._held = None
        return same

    def move(self, goal: Goal, layout: Layout, on_phase: OnPhase, *, attempt: int) -> MoveReport:
        """See Replica."""
        if self._reload is not None and self._unmapped is not None:
            return self._by_reload(goal, layout, on_phase, why=self._unmapped, attempt=attempt)
        if self._held is None:
            raise EngineUnavailable("nothing is proven about the engine", remedy="attach it")
        if self._reload is not None and attempt >= self._reload_after:
            why = NoPlan(f"moving in place failed {attempt} times")
            tried = attempt - self._reload_after
            return self._by_reload(goal, layout, on_phase, why=why, attempt=tried)
        try:
            return self._by_deltas(self._held, goal, layout, on_phase)
        except _NOT_BY_DELTAS as error:
            if self._reload is None:
                raise
            return self._by_reload(goal, layout, on_phase, why=error, attempt=attempt)
        except (EngineUnavailable, ReplicaUnproven):
            self._held = None
            raise

    def verify(self) -> Fingerprint:
        """See Replica."""
        if self._unmapped is not None and self._reload is not None:
            return self._reload.verify()
        return self._engine.fingerprint()

    def close(self) -> None:
        """See Replica."""
        self._engine.close()
        if self._reload is not None:
            self._reload.close()

    def _by_deltas(self, held: Held, goal: Goal, layout: Layout, on_phase: OnPhase) -> MoveReport:
        durations: dict[str, float] = {}
        with stopwatch() as planning:
            plan = self._source.plan(held, goal)
        on_phase("fetching")
        with stopwatch() as fetching:
            fetched = self._source.fetch(plan)
        durations |= {"plan": planning.seconds, "fetch": fetching.seconds}
        changed = 0
        for move in moves_of(fetched, layout, held.fingerprint, goal):
            changed += self._one_move(move, on_phase, durations)
        if self._held is None or not self._held.has(goal):
            raise FingerprintMismatch(f"the plan's steps don't reach version {goal.seq}")
        return MoveReport(durations, changed)

    def _one_move(self, move: Move, on_phase: OnPhase, durations: dict[str, float]) -> int:
        staged = self._engine.stage(move)
        on_phase("staged")
        on_phase("applying")
        with stopwatch() as applying:
            applied = self._engine.apply()
        self._held = Held(move.layout.digest, move.target, move.stamp)
        for name, seconds in (
            ("stage", staged.seconds),
            ("apply", applying.seconds),
            ("pause", applied.paused_seconds),
            ("verify", applied.scatter_seconds),
        ):
            durations[name] = durations.get(name, 0.0) + seconds
        return staged.changed_elements

    def _by_reload(
        self, goal: Goal, layout: Layout, on_phase: OnPhase, *, why: PlaitError, attempt: int
    ) -> MoveReport:
        """Loads the whole version, and then proves by a full re-read what the engine holds.

        Args:
            attempt: how often this goal was reloaded in vain.
        """
        assert self._reload is not None
        _logger.warning("going to version %d by reload: %s", goal.seq, why)
        try:
            loaded = self._reload.move(goal, layout, on_phase, attempt=attempt)
        except (EngineUnavailable, ReplicaUnproven):
            self._held = None
            raise
        with stopwatch() as proving:
            held = self.attach(layout)
        if held is None:
            held = self._held = self._reload.held
        elif not held.has(goal):
            self._held = None
            raise ReplicaUnproven(
                f"after a reload of version {goal.seq} the engine holds {held.fingerprint}, "
                f"expected {goal.fingerprint}",
                remedy="restart the engine from a checkpoint of this version",
            )
        durations = {**loaded.durations, "verify": proving.seconds}
        return MoveReport(durations, fallback=f"reloaded: {why.message}")
