"""The follower: keeps one replica at a channel's head, or wherever it is sent.

watch → plan → fetch → stage → apply → report. A failure leaves the replica serving what it proved
last. What it holds is always asked of the replica, never remembered.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from plait.errors import (
    FingerprintMismatch,
    NotFound,
    PlaitError,
    RegistryUnavailable,
    ServiceError,
    StoreError,
)
from plait.wire import ChannelDocument, Phase
from plait_client.fetch import Fetcher
from plait_client.registry import etag_of
from plait_rollout.goal import Goal
from plait_rollout.heads import Heads
from plait_rollout.memory import Memory, recall, remember
from plait_rollout.mover import Mover
from plait_rollout.replica import Replica
from plait_rollout.reporter import Reporter
from plait_rollout.standing import Standing
from plait_rollout.status import Status
from plait_rollout.stopwatch import stopwatch

_POLL_SECONDS_LEAST: Final = 0.5  # an answer without news that comes sooner wasn't waited for
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How a follower behaves.

    Attributes:
        allowed_lag: versions that the replica may be behind and still count as ready. None: it has
            to reach the head once, and then is ready as long as its weights are proven.
        wait_seconds: of one long-poll; also how long `stop` may take while the registry answers.
        backoff_seconds, backoff_seconds_most: between two tries of what failed.
        verify_seconds: between two full re-reads of the live weights; None: at attach only.
        ttl_seconds: silent for longer, the registry counts the replica as lost.
        location: where it is, for the fleet.
    """

    allowed_lag: int | None = None
    wait_seconds: float = 10.0
    backoff_seconds: float = 0.5
    backoff_seconds_most: float = 60.0
    verify_seconds: float | None = None
    ttl_seconds: float = 60.0
    location: str = ""


class Follower:
    """One replica that follows one channel of one policy.

    In the background (`start`, `stop`), on demand (`catch_up`, `go_to`, `at_least`, `max_lag`), or
    both: moves are made one at a time.

    Args:
        fetcher: of the registry; shared with the replica's own source.
        replica: driven by nobody else.
        name: of the replica in the fleet.
        memory: a small file; keeps an older head from being believed after a restart.
        on_change: told of every move and every new failure, in the thread that it happened in.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        replica: Replica,
        *,
        policy: str,
        name: str,
        channel: str = "main",
        memory: Path | None = None,
        options: FollowOptions | None = None,
        on_change: Callable[[Status], None] | None = None,
    ) -> None:
        self._client = fetcher.client
        self._policy, self._channel = policy, channel
        self._options = options or FollowOptions()
        self._memory = memory
        self._on_change = on_change
        seen = recall(memory, policy=policy, channel=channel) if memory is not None else None
        self._heads = Heads(seen)
        likely = seen.seq if seen is not None else None
        self._mover = Mover(replica, fetcher, policy=policy, likely_seq=likely)
        beat = self._options.ttl_seconds / 3
        self._reporter = Reporter(self._client, policy=policy, name=name, heartbeat_seconds=beat)
        self._standing = Standing(
            Status(policy, channel, name, replica.kind, generation=self._heads.generation),
            self._reporter,
            allowed_lag=self._options.allowed_lag,
            ttl_seconds=self._options.ttl_seconds,
            location=self._options.location,
        )
        self._moving = threading.RLock()
        self._pin: Goal | None = None
        self._moves = 0
        self._noted: PlaitError | None = None
        self._verified_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_ready(self) -> bool:
        return self.status().ready

    @property
    def is_following(self) -> bool:
        """Whether the thread that `start` began is at work still."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and not self._stopping.is_set()

    def status(self) -> Status:
        """What is true now."""
        return self._standing.status()

    # On demand ----------------------------------------------------------------------------------

    def catch_up(self) -> Status:
        """Moves to the channel's head now. One that was sent elsewhere follows again.

        Raises:
            PlaitError: not reached; the status says what is served still.
        """
        head = self._look()
        with self._moving:
            self._pin_to(None)
            self._advance(Goal.of_head(head))
        return self.status()

    def go_to(self, ref: str) -> Status:
        """Moves to exactly this version and stays there, until `catch_up`.

        Args:
            ref: a seq, `CHANNEL~k`, a version digest; the followed channel's name: as `catch_up`.
        Raises:
            PlaitError: not reached; the status says what is served still.
        """
        if ref == self._channel:
            return self.catch_up()
        self._look()
        version = self._client.version(self._policy, ref)
        with self._moving:
            goal = Goal.of_version(version, generation=self._heads.generation)
            self._pin_to(goal)
            self._advance(goal)
        return self.status()

    def at_least(self, seq: int, *, timeout: float = 60.0) -> Status:
        """Returns when this version, or a later one of the channel, is served.

        Raises:
            NotFound: the channel's head didn't get there within `timeout` seconds.
            PlaitError: it did, but the replica can't be moved there.
        """
        deadline = time.monotonic() + timeout
        head = self._look()
        while head.seq < seq:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotFound(
                    f"{self._policy!r} has no version {seq} on channel {self._channel!r} after "
                    f"{timeout:g} s: its head is {head.seq}"
                )
            head = self._look(etag_of(head), wait=min(left, self._options.wait_seconds))
        served = self.status()
        return served if served.seq is not None and served.seq >= seq else self.catch_up()

    def max_lag(self, versions: int) -> Status:
        """Returns when the replica is at most so many versions behind the head of this moment."""
        self._look()
        self._reporter.send()
        status = self.status()
        near = status.lag_versions is not None and status.lag_versions <= versions
        return status if near else self.catch_up()

    def verify(self) -> Status:
        """Re-reads all live weights now.

        Raises:
            FingerprintMismatch: they aren't what was proven; the next move brings them back.
        """
        with self._moving:
            self._verify()
        return self.status()

    # In the background --------------------------------------------------------------------------

    def start(self) -> None:
        """Follows in a thread, until `stop`."""
        if not self.is_following:
            if self._thread is not None:
                self._thread.join()  # it was told to stop, and may hang in its last long-poll
            self._stopping.clear()
            self._reporter.start()
            self._thread = threading.Thread(target=self._run, name="plait-follow", daemon=True)
            self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread, after the move that it is in. The replica goes on serving.

        Args:
            wait: for the thread's end too, which may hang in a long-poll; without it, only until
                it is certain that it moves nothing any more.
        """
        self._stopping.set()
        with self._moving:
            pass
        if self._thread is not None and wait:
            self._thread.join()
        self._reporter.stop()

    def _run(self) -> None:
        delay, wait, news_only = 0.0, self._options.wait_seconds, False
        try:
            while not self._stopping.is_set():
                try:
                    self._turn(wait=wait, news_only=news_only)
                    delay, wait = 0.0, self._options.wait_seconds
                except PlaitError as error:
                    if self._stopping.is_set():
                        return  # a poll that broke off because its client was closed, say
                    self._failed(error)
                    longer = max(2 * delay, self._options.backoff_seconds)
                    delay = min(longer, self._options.backoff_seconds_most)
                    # The rest of the delay is a long-poll: a newer head is tried at once.
                    wait = delay - min(delay, self._options.backoff_seconds)
                    self._stopping.wait(delay - wait)
                news_only = True
        finally:
            if not self._stopping.is_set():
                self._failed(ServiceError("the follower ended by an unexpected error; see the log"))

    def _turn(self, *, wait: float, news_only: bool) -> None:
        """One look at the channel, and what follows from it.

        Args:
            wait: seconds, for a head that isn't known yet.
            news_only: the known head was acted upon, or tried; until then it is news itself.
        """
        known = self._heads.head if news_only else None
        with stopwatch() as polling:
            head = self._look(None if known is None else etag_of(known), wait=wait)
        if head is known and polling.seconds < min(wait, _POLL_SECONDS_LEAST):
            # Something between here and the registry doesn't let a poll wait.
            self._stopping.wait(_POLL_SECONDS_LEAST)
        with self._moving:
            if self._stopping.is_set():
                return
            every = self._options.verify_seconds
            if every is not None and time.monotonic() - self._verified_at >= every:
                self._verify()
            self._advance(self._pin or Goal.of_head(head))

    # --------------------------------------------------------------------------------------------

    def _look(self, etag: str | None = None, *, wait: float = 0.0) -> ChannelDocument:
        """The channel's head, as far as it can be believed; waits until it isn't `etag`'s."""
        asked_at = self._heads.generation
        found = self._client.wait_channel(self._policy, self._channel, etag, wait)
        if found is None and self._heads.head is not None:
            return self._heads.head
        if found is None:
            raise RegistryUnavailable("the registry says 'not modified' of what it never said")
        head = self._heads.accept(found, asked_at=asked_at)
        self._standing.saw(head)
        return head

    def _pin_to(self, goal: Goal | None) -> None:
        self._pin = goal
        self._standing.pinned(goal is not None)

    def _advance(self, goal: Goal) -> None:
        """Moves the replica to the goal unless it is there, and says so."""
        try:
            with stopwatch() as whole:
                report = self._mover.reach(goal, self._enters)
        except PlaitError as error:
            self._know()
            self._failed(error)
            raise
        before = self.status()
        self._know()
        self._standing.arrived()
        if report is None:
            if before.phase != "serving" or before.error:
                self._standing.enters("serving")
            return
        self._moves += 1
        self._verified_at = time.monotonic() if report.fallback else self._verified_at
        self._remember(goal)
        self._standing.enters(
            "serving",
            moves=self._moves,
            durations={**report.durations, "total": whole.seconds},
            changed_elements=report.changed_elements,
            fallback=report.fallback,
        )
        self._changed()

    def _verify(self) -> None:
        try:
            self._mover.verify()
        except PlaitError as error:
            if isinstance(error, FingerprintMismatch):
                self._standing.drifted(error.details["found"])
            self._failed(error)
            self._know()
            raise
        self._verified_at = time.monotonic()

    def _know(self) -> None:
        """What is proven to be held goes into the status."""
        held = self._mover.held
        self._standing.holds(held, self._mover.seq, way=self._mover.replica.kind)

    def _enters(self, phase: Phase) -> None:
        if phase == "attaching":
            self._know()
        self._standing.enters(phase)

    def _failed(self, error: PlaitError) -> None:
        if error is self._noted:
            return
        self._noted = error
        # A registry that is away is no failure of the replica's.
        away = isinstance(error, RegistryUnavailable)
        serving = self.status().fingerprint is not None
        phase: Phase = "serving" if away and serving else "idle" if away else "failed"
        if self._standing.failed(error, phase=phase):
            _logger.warning("%s: %s", error.code, error)
            self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.status())

    def _remember(self, goal: Goal) -> None:
        head = self._heads.head
        if self._memory is None or head is None:
            return
        memory = Memory(
            policy=self._policy,
            channel=self._channel,
            epoch=head.epoch,
            generation=head.generation,
            seq=goal.seq,
            fingerprint=str(goal.fingerprint),
        )
        try:
            remember(self._memory, memory)
        except StoreError as error:
            # The move is made and proven; what is lost is only the guard over a restart.
            _logger.warning("%s", error)
