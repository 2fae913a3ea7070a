"""A replica that is a directory: an ordinary checkpoint, kept at a version."""

from pathlib import Path

from plait.errors import CorruptionError, FingerprintMismatch, FormatError
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.weights import fingerprint_weights
from plait_client.checkout import checkout
from plait_client.checkout_folder import HeldVersion, open_checkout_folder, untouched
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
                held = Held(folder.layout.digest, fingerprint_weights(folder), stamp="")
                state = place.state()
                if state is not None and _is(state.version, held):
                    place.stamp(state.version)  # so that a touch shows from now on
            self._held = held
        except (CorruptionError, FormatError):
            # The next move says the same, or builds the directory anew.
            self._held = None
        return self._held

    def still_holds(self) -> bool:
        """See Replica: looks whether anybody touched the files or moved them elsewhere."""
        version = None if self._held is None else untouched(self.path)
        if self._held is None or version is None or not _is(version, self._held):
            self._held = None
        return self._held is not None

    def move(self, goal: Goal, layout: Layout, on_phase: OnPhase, *, attempt: int) -> MoveReport:
        """See Replica."""
        on_phase("fetching")
        anew = attempt >= self._rebuild_after
        try:
            with stopwatch() as working:
                reached = self._check_out(goal, rebuild=anew)
        except BaseException:
            # What failed before it wrote anything took nothing away.
            self.still_holds()
            raise
        if reached != str(goal.fingerprint):
            self._held = None
            raise FingerprintMismatch(
                f"{self.path} came to hold {reached}, expected {goal.fingerprint} of version "
                f"{goal.seq}"
            )
        self._held = Held(layout.digest, goal.fingerprint, goal.stamp)
        fallback = f"built anew: moving it by deltas failed {attempt} times" if anew else ""
        return MoveReport({"checkout": working.seconds}, fallback=fallback)

    def _check_out(self, goal: Goal, *, rebuild: bool) -> str:
        """The fingerprint of the version that the directory came to."""
        result = checkout(
            self._fetcher.client,
            f"{goal.policy}@{goal.seq}",
            self.path,
            base=self._base,
            fetcher=self._fetcher,
            progress=self._progress,
            rebuild=rebuild,
        )
        return result.version.fingerprint

    def verify(self) -> Fingerprint:
        """See Replica."""
        return fingerprint_weights(CheckpointFolder(self.path))

    def close(self) -> None:
        """See Replica."""


def _is(version: HeldVersion, held: Held) -> bool:
    return (version.layout_digest, version.fingerprint) == (
        held.layout_digest,
        str(held.fingerprint),
    )
