"""Watching: one tailer per process reads the events and wakes whoever waits.

Waiters are tasks of the event loop. They hold no database connection and no thread.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from plait.errors import PlaitError
from plait.limits import PAGE_SIZE_MAX
from plait.wire import ChannelDocument, EventDocument
from plait_server.catalog import Catalog
from plait_server.metrics import Metrics

_log: Final = logging.getLogger("plait.server")

# How late a movement made by another process may be noticed. One indexed query each time.
_TAIL_SECONDS: Final = 0.1
_BACKLOG: Final = 10_000  # events an SSE client may be behind before it is cut off and reconnects


class Watch:
    """Waiters and the tailer that wakes them. Started and stopped with the event loop."""

    def __init__(self, catalog: Catalog, metrics: Metrics) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._waiters: dict[tuple[str, str], set[ChannelWait]] = defaultdict(set)
        self._streams: set[asyncio.Queue[EventDocument | None]] = set()
        self._thread = ThreadPoolExecutor(1, "plait-tail")
        self._poke = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tailer: asyncio.Task[None] | None = None
        self.stopping = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stopping = False
        first = await self._loop.run_in_executor(self._thread, self._catalog.revision)
        self._tailer = asyncio.create_task(self._tail(first))
        self._tailer.add_done_callback(_complain)

    @property
    def alive(self) -> bool:
        """Whether movements are noticed at all."""
        return self._tailer is not None and not self._tailer.done()

    async def close(self) -> None:
        self.stop()
        if self._tailer is not None:
            self._tailer.cancel()
            await asyncio.gather(self._tailer, return_exceptions=True)
        self._thread.shutdown()

    def stop(self) -> None:
        """Ends every wait now. Safe in a signal handler of the loop's own thread."""
        self.stopping = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.end()
        for stream in self._streams:
            if not stream.full():  # a full one ends by itself: its last entry is the end
                stream.put_nowait(None)

    def stop_soon(self) -> None:
        """`stop` from any thread or signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    def poke(self) -> None:
        """Something happened in this process: look now. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._poke.set)

    @contextmanager
    def waiting_for(self, policy: str, channel: str) -> Iterator["ChannelWait"]:
        """Registers a waiter. Read the channel after this: whatever moves from now on wakes."""
        waiter = ChannelWait()
        if self.stopping:
            waiter.end()
        waiters = self._waiters[policy, channel]
        waiters.add(waiter)
        try:
            with self._metrics.watchers.track_inprogress():
                yield waiter
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop((policy, channel), None)

    async def stream(
        self, after: int, policy: str | None, *, idle_seconds: float
    ) -> AsyncIterator[EventDocument | None]:
        """Every event after a revision, for ever; None where nothing came for a while.

        Ends when the process shuts down.
        """
        queue: asyncio.Queue[EventDocument | None] = asyncio.Queue(_BACKLOG)
        self._streams.add(queue)
        try:
            with self._metrics.watchers.track_inprogress():
                async for event in self._from_the_past(after, policy):
                    after = max(after, event.revision)
                    yield event
                while not self.stopping:
                    try:
                        async with asyncio.timeout(idle_seconds):
                            news = await queue.get()
                    except TimeoutError:
                        yield None
                        continue
                    if news is None:
                        return
                    if news.revision > after and policy in (None, news.policy):
                        after = news.revision
                        yield news
        finally:
            self._streams.discard(queue)

    async def _from_the_past(self, after: int, policy: str | None) -> AsyncIterator[EventDocument]:
        while not self.stopping:
            page = await asyncio.to_thread(self._catalog.events, after, policy, PAGE_SIZE_MAX)
            for event in page.events:
                yield event
            after = page.revision
            if len(page.events) < PAGE_SIZE_MAX:
                return

    async def _tail(self, revision: int) -> None:
        assert self._loop is not None
        while True:
            try:
                async with asyncio.timeout(_TAIL_SECONDS):
                    await self._poke.wait()
            except TimeoutError:
                pass  # look anyway: another process may have written
            self._poke.clear()
            try:
                revision = await self._loop.run_in_executor(self._thread, self._look, revision)
            except PlaitError as error:
                _log.warning("watching is late: %s", error)
                await asyncio.sleep(_TAIL_SECONDS)

    def _look(self, revision: int) -> int:
        """In the tailer's thread: reads what is new and hands it to the loop."""
        page = self._catalog.events(revision, None, PAGE_SIZE_MAX)
        if not page.events:
            return page.revision
        moved = {(event.policy, event.channel) for event in page.events if event.channel}
        # Read once for all waiters, and only where somebody waits.
        awaited = [key for key in moved if key in self._waiters]
        channels = [self._catalog.channel(policy, channel) for policy, channel in awaited]
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, page.events, channels)
        return page.revision

    def _deliver(self, events: list[EventDocument], channels: list[ChannelDocument]) -> None:
        for channel in channels:
            for waiter in self._waiters.get((channel.policy, channel.channel), ()):
                waiter.wake(channel)
        for event in events:
            self._note(event)
            for stream in list(self._streams):
                _offer(stream, event)

    def _note(self, event: EventDocument) -> None:
        if event.type == "channel_moved":
            gauge = self._metrics.head_generation.labels(event.policy, event.channel)
            gauge.set(event.payload["generation"])


class ChannelWait:
    """One registered wait for a channel's next movement. For the loop's thread."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._latest: ChannelDocument | None = None
        self._ended = False

    def wake(self, channel: ChannelDocument) -> None:
        self._latest = channel
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def moved(self, known: int, seconds: float) -> ChannelDocument | None:
        """The channel once it is beyond the generation `known`; None if time or process ends.

        (The tailer may still be telling of the movement that made the known generation.)
        """
        try:
            async with asyncio.timeout(seconds):
                while not self._ended:
                    await self._news.wait()
                    self._news.clear()
                    if self._latest is not None and self._latest.generation > known:
                        return self._latest
        except TimeoutError:
            pass
        return None


def _complain(tailer: "asyncio.Task[None]") -> None:
    if not tailer.cancelled() and (error := tailer.exception()) is not None:
        _log.error("watching has ended; restart the registry", exc_info=error)


def _offer(stream: "asyncio.Queue[EventDocument | None]", event: EventDocument) -> None:
    if stream.qsize() >= _BACKLOG - 1:
        # Too slow: end its stream. It reconnects with Last-Event-ID and misses nothing.
        if not stream.full():
            stream.put_nowait(None)
        return
    stream.put_nowait(event)
