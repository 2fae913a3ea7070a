"""Getting one replica to a goal: attach by content, move, and know what is held if that fails."""

import logging

from plait.errors import (
    BaseMismatch,
    EngineUnavailable,
    FingerprintMismatch,
    PlaitError,
    UnknownBase,
)
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait_client.fetch import Fetcher
from plait_rollout.goal import Goal, Held
from plait_rollout.replica import MoveReport, OnPhase, Replica

# Answered by asking the replica again what it holds, and trying once more from there.
_ASK_AGAIN = (BaseMismatch, UnknownBase, EngineUnavailable)

_logger = logging.getLogger(__name__)


class Mover:
    """Drives one replica of one policy.

    Attributes:
        seq: number of the version that is held; None: nothing proven, or unknown to the policy.
    """

    def __init__(
        self, replica: Replica, fetcher: Fetcher, *, policy: str, likely_seq: int | None = None
    ) -> None:
        """`likely_seq` tells apart versions with equal weights; it proves nothing."""
        self.replica = replica
        self._fetcher = fetcher
        self._policy = policy
        self._likely_seq = likely_seq
        self._doubted = True
        self._failed_goal: Goal | None = None
        self._failures = 0
        self.seq: int | None = None

    @property
    def held(self) -> Held | None:
        """What is proven; None: nothing is."""
        return None if self._doubted else self.replica.held

    def reach(self, goal: Goal, on_phase: OnPhase) -> MoveReport | None:
        """Moves the replica to the goal; None: it was there, and is called so.

        Raises:
            PlaitError: not reached; `held` says what is served still.
        """
        layout = self._fetcher.layout(goal.layout_digest)
        try:
            report = self._reach(goal, layout, on_phase)
        except PlaitError as error:
            if not error.retryable:
                self._failures = self._failures + 1 if goal == self._failed_goal else 1
                self._failed_goal = goal
            raise
        self._failed_goal, self._failures = None, 0
        self.seq = self._likely_seq = goal.seq
        return report

    def doubt(self) -> None:
        """Nothing counts as proven until the replica has been asked again."""
        self._doubted = True
        self.seq = None

    def verify(self) -> Fingerprint:
        """A full re-read.

        Raises:
            FingerprintMismatch: other weights than were proven before; they count as unproven now.
        """
        held = self.held
        found = self.replica.verify()
        if held is not None and found != held.fingerprint:
            seq = self.seq
            self.doubt()
            raise FingerprintMismatch(
                f"the replica held version {seq} ({held.fingerprint}), and now holds {found}: "
                "something else changed its weights",
                remedy="it is asked again what it holds, and brought back",
                expected=str(held.fingerprint),
                found=str(found),
            )
        return found

    def _reach(self, goal: Goal, layout: Layout, on_phase: OnPhase) -> MoveReport | None:
        fresh = self._prove(layout, on_phase)
        if self._is_at(goal):
            return None
        try:
            return self._move(goal, layout, on_phase)
        except _ASK_AGAIN as error:
            if fresh:
                raise
            _logger.warning("asking the replica what it holds: %s", error)
        self.doubt()
        self._prove(layout, on_phase)
        return None if self._is_at(goal) else self._move(goal, layout, on_phase)

    def _prove(self, layout: Layout, on_phase: OnPhase) -> bool:
        """Makes sure that what is held is known; True if the replica had to be asked for it."""
        if not self._doubted and self.replica.still_holds():
            return False
        self.doubt()
        on_phase("attaching")
        held = self.replica.attach(layout)
        self._doubted = False
        self.seq = None if held is None else self._seq_of(held)
        return True

    def _seq_of(self, held: Held) -> int | None:
        try:
            versions = self._fetcher.client.versions_with(
                self._policy, held.layout_digest, str(held.fingerprint)
            )
        except UnknownBase as error:
            _logger.warning("the replica holds weights of no version: %s", error)
            return None
        seqs = [version.seq for version in versions]
        return self._likely_seq if self._likely_seq in seqs else max(seqs, default=None)

    def _is_at(self, goal: Goal) -> bool:
        held = self.held
        return held is not None and held.has(goal) and held.stamp == goal.stamp

    def _move(self, goal: Goal, layout: Layout, on_phase: OnPhase) -> MoveReport:
        attempt = self._failures if goal == self._failed_goal else 0
        report = self.replica.move(goal, layout, on_phase, attempt=attempt)
        held = self.replica.held
        if held is None or not held.has(goal):
            raise FingerprintMismatch(f"version {goal.seq} was announced but isn't held: {held}")
        return report
