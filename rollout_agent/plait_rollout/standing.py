"""Where a replica stands: the status that is shown beside it, and the report to the registry."""

import threading
from dataclasses import replace
from typing import Any, Final

from plait.errors import PlaitError
from plait.wire import ChannelDocument, Phase, ReplicaReport
from plait_rollout.goal import Held
from plait_rollout.reporter import Reporter
from plait_rollout.status import Status

_ERROR_CHARACTERS: Final = 2000  # of a message, in a report


class Standing:
    """Keeps one follower's status. Safe to read from any thread.

    Args:
        allowed_lag: see FollowOptions.
    """

    def __init__(
        self,
        status: Status,
        reporter: Reporter,
        *,
        allowed_lag: int | None,
        ttl_seconds: float,
        location: str,
    ) -> None:
        self._status = status
        self._reporter = reporter
        self._allowed_lag = allowed_lag
        self._ttl_seconds = ttl_seconds
        self._location = location
        self._head: ChannelDocument | None = None
        self._arrived = False
        self._lock = threading.Lock()

    def status(self) -> Status:
        """What is true now, lag and readiness included."""
        with self._lock:
            status, head = self._status, self._head
        lag = self._lag(status, head)
        return replace(status, lag_versions=lag, ready=self._is_ready(status, lag))

    def saw(self, head: ChannelDocument) -> None:
        """A head of the channel was accepted."""
        with self._lock:
            self._head = head
            self._status = replace(self._status, head_seq=head.seq, generation=head.generation)

    def pinned(self, pinned: bool) -> None:
        with self._lock:
            self._status = replace(self._status, pinned=pinned)

    def holds(self, held: Held | None, seq: int | None, *, way: str) -> None:
        """What is proven; None: nothing."""
        with self._lock:
            self._arrived = self._arrived and held is not None
            self._status = replace(
                self._status,
                way=way,
                seq=seq,
                layout_digest=held.layout_digest if held else None,
                fingerprint=str(held.fingerprint) if held else None,
                stamp=held.stamp if held else "",
            )

    def drifted(self, found: str) -> None:
        """Other weights were found than were proven: shown under the seq that they should have."""
        with self._lock:
            self._arrived = False
            self._status = replace(self._status, fingerprint=found)

    def arrived(self) -> None:
        """It is where it should be: what went wrong before doesn't matter any more."""
        with self._lock:
            self._arrived = True
            self._status = replace(self._status, error="", error_code="", remedy="")

    def enters(self, phase: Phase, **changes: Any) -> None:
        """A new phase, with other fields of the status; reported."""
        with self._lock:
            self._status = replace(self._status, phase=phase, **changes)
            report = self._report()
        self._reporter.post(report)

    def failed(self, error: PlaitError, *, phase: Phase) -> bool:
        """Takes an error down; True if it is another one than before."""
        with self._lock:
            new = (error.message, error.code) != (self._status.error, self._status.error_code)
        self.enters(phase, error=error.message, error_code=error.code, remedy=error.remedy)
        return new

    def _report(self) -> ReplicaReport:
        status = self._status
        remedy = f" ({status.remedy})" if status.remedy else ""
        return ReplicaReport.of(
            channel=status.channel,
            engine=status.way,
            location=self._location,
            phase=status.phase,
            seq=status.seq,
            layout_digest=status.layout_digest,
            fingerprint=status.fingerprint,
            seen_generation=status.generation,
            error=_sendable(f"{status.error}{remedy}"),
            error_code=status.error_code,
            durations=status.durations,
            ttl_seconds=self._ttl_seconds,
        )

    def _lag(self, status: Status, head: ChannelDocument | None) -> int | None:
        """Versions behind the head: known here if none, else as the registry judged it last."""
        if head is None or status.fingerprint is None:
            return None
        if (status.layout_digest, status.fingerprint) == (head.layout_digest, head.fingerprint):
            return 0
        answer = self._reporter.answer
        if answer is None or answer.generation != head.generation:
            return None
        return answer.lag_versions if answer.report.fingerprint == status.fingerprint else None

    def _is_ready(self, status: Status, lag: int | None) -> bool:
        if status.fingerprint is None:
            return False
        if self._allowed_lag is None or status.pinned:
            return self._arrived
        return lag is not None and lag <= self._allowed_lag


def _sendable(text: str) -> str:
    """Without what a JSON string or a database can't hold, such as a file's name in other bytes."""
    return text[:_ERROR_CHARACTERS].replace("\0", "").encode(errors="replace").decode()
