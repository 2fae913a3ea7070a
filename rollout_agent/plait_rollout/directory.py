"""A replica that is a directory: an ordinary checkpoint, kept at a version."""

from pathlib import Path

from plait.errors import CorruptionError, FingerprintMismatch, FormatError
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.weights import fingerprint_weights
from plait_client.checkout import checkout
from plait_client.checkout_folder import open_checkout_folder
from plait_client.checkpoint import STATE_FOLDER, CheckpointFolder
from plait_client.fetch import Fetcher
from plait_client.progress import SILENT, Progress
from plait_rollout.goal import Goal, Held
from plait_rollout.replica import MoveReport, OnPhase
from plait_rollout.stopwatch import stopwatch


class DirectoryReplica:
    """A checkout that follows. What a killed run left half-done is finished by the next.

    Args:
        path: new, empty, or a checkout.
        base: a checkpoint folder to begin with, where the line's anchor is external.
        rebuild_after: a goal that deltas failed to reach so often is built anew from its anchor.
    """

    kind = "directory"

    def __init__(
        self,
        path: Path,
        fetcher: Fetcher,
        *,
        base: Path | None = None,
        progress: Progress = SILENT,
        rebuild_after: int = 2,
    ) -> None:
        self.path = path
        self._fetcher = fetcher
        self._base = base
        self._progress = progress
        self._rebuild_after = rebuild_after
        self._held: Held | None = None

    @property
    def held(self) -> Held | None:
        return self._held

    def attach(self, layout: Layout) -> Held | None:  # noqa: ARG002 (the directory knows its own)
        """See Replica. Finishes a move that was cut short, then reads every weight.

        Raises:
            ConflictError: another run works on the directory.
        """
        self._held = None
        if not (self.path / STATE_FOLDER / "state.json").exists():
            return None
        try:
            with open_checkout_folder(self.path) as place:
                place.repair()
            folder = CheckpointFolder(self.path)
            self._held = Held(folder.layout.digest, fingerprint_weights(folder), stamp="")
        except (CorruptionError, FormatError):
            # The next move says the same, or builds the directory anew.
            self._held = None
        return self._held

    def still_holds(self) -> bool:
        """See Replica."""
        if not self.path.is_dir():
            self._held = None
        return self._held is not None

    def move(self, goal: Goal, layout: Layout, on_phase: OnPhase, *, attempt: int) -> MoveReport:
        """See Replica."""
        on_phase("fetching")
        anew = attempt >= self._rebuild_after
        self._held = None
        with stopwatch() as working:
            result = checkout(
                self._fetcher.client,
                f"{goal.policy}@{goal.seq}",
                self.path,
                base=self._base,
                fetcher=self._fetcher,
                progress=self._progress,
                rebuild=anew,
            )
        if result.version.fingerprint != str(goal.fingerprint):
            raise FingerprintMismatch(
                f"{self.path} came to hold {result.version.fingerprint}, expected "
                f"{goal.fingerprint} of version {goal.seq}"
            )
        self._held = Held(layout.digest, goal.fingerprint, goal.stamp)
        fallback = f"built anew: moving it by deltas failed {attempt} times" if anew else ""
        return MoveReport({"checkout": working.seconds}, fallback=fallback)

    def verify(self) -> Fingerprint:
        """See Replica."""
        return fingerprint_weights(CheckpointFolder(self.path))

    def close(self) -> None:
        """See Replica."""
