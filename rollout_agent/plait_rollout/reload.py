"""A replica whose engine loads whole versions from a directory that is moved by deltas."""

from plait.errors import EngineUnavailable, ReplicaUnproven
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait_rollout.directory import DirectoryReplica
from plait_rollout.goal import Goal, Held
from plait_rollout.replica import DirectoryLoader, MoveReport, OnPhase
from plait_rollout.stopwatch import stopwatch


class ReloadReplica:
    """An engine that can't be asked for its bits: it holds what was loaded into it last.

    Args:
        directory: proven before every load.
        loader: of the engine that reads it.
    """

    kind = "reload"

    def __init__(self, directory: DirectoryReplica, loader: DirectoryLoader) -> None:
        self._directory = directory
        self._loader = loader
        self._held: Held | None = None

    @property
    def held(self) -> Held | None:
        return self._held

    def attach(self, layout: Layout) -> Held | None:
        """See Replica. What an engine loaded before this follower's time is not known: None."""
        self._directory.attach(layout)
        self._held = None
        return None

    def still_holds(self) -> bool:
        """See Replica: compares the engine's stamp, which another process would not have."""
        try:
            if self._held is not None and self._loader.version() != self._held.stamp:
                self._held = None
        except EngineUnavailable:
            self._held = None
        return self._held is not None

    def move(self, goal: Goal, layout: Layout, on_phase: OnPhase, *, attempt: int) -> MoveReport:
        """See Replica. The engine is touched only when the directory is proven."""
        checked_out = self._directory.move(goal, layout, on_phase, attempt=attempt)
        on_phase("applying")
        try:
            with stopwatch() as loading:
                applied = self._loader.load_directory(self._directory.path, goal.stamp)
            found = self._loader.version()
            if found != goal.stamp:
                raise ReplicaUnproven(f"the engine calls itself {found!r}, not {goal.stamp!r}")
        except (EngineUnavailable, ReplicaUnproven):
            self._held = None
            raise
        self._held = Held(layout.digest, goal.fingerprint, goal.stamp)
        durations = {"reload": loading.seconds, "pause": applied.paused_seconds}
        return MoveReport({**checked_out.durations, **durations})

    def verify(self) -> Fingerprint:
        """See Replica: of the directory, all that can be read."""
        return self._directory.verify()

    def close(self) -> None:
        """See Replica."""
        self._loader.close()
