"""Reports of a replica to the registry: the newest one, soon, and again as a heartbeat."""

import logging
import threading

from plait.errors import PlaitError
from plait.wire import ReplicaDocument, ReplicaReport
from plait_client.registry import RegistryClient

_logger = logging.getLogger(__name__)


class Reporter:
    """Sends in a thread of its own, so that a slow registry holds up no move.

    A report that can't be sent is followed by a newer one; nothing waits for it.

    Attributes:
        answer: the registry's last judgement of this replica; None before the first.
        error: why the last report wasn't sent; None if it was.
    """

    def __init__(
        self, client: RegistryClient, *, policy: str, name: str, heartbeat_seconds: float
    ) -> None:
        self._client = client
        self._policy, self._name = policy, name
        self._heartbeat_seconds = heartbeat_seconds
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._report: ReplicaReport | None = None
        self._fresh = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.answer: ReplicaDocument | None = None
        self.error: PlaitError | None = None

    def post(self, report: ReplicaReport) -> None:
        """To be sent next; it replaces one that wasn't sent yet."""
        with self._condition:
            self._report, self._fresh = report, True
            self._condition.notify_all()

    def send(self) -> None:
        """Sends the newest report now, in the caller's thread."""
        with self._sending:
            with self._condition:
                report, self._fresh = self._report, False
            if report is None:
                return
            try:
                self.answer = self._client.report_replica(self._policy, self._name, report)
                self.error = None
            except PlaitError as error:
                _logger.warning("report not sent: %s", error)
                self.error = error

    def start(self) -> None:
        """Sends from now on; a stopped one may be started again."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="plait-report", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Sends what is new, and ends the thread."""
        if self._thread is not None:
            with self._condition:
                self._stopping = True
                self._condition.notify_all()
            self._thread.join()
            self._thread = None
        if self._fresh:
            self.send()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._fresh or self._stopping, timeout=self._heartbeat_seconds
                )
                if self._stopping:
                    return
            self.send()
