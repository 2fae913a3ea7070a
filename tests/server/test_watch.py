"""Watching: long-polls and event streams, woken by commits of this process and of others."""

import asyncio
import json
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from plait.store import MemoryStore
from plait.wire import ChannelDocument
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.metrics import Metrics
from plait_server.settings import Settings
from plait_server.watch import ChannelWait, Watch
from tests.server.lines import Line, code_of, grown_line, move
from tests.server.processes import RegistryProcess, registry_process


def watched(http: httpx.Client, line: Line, etag: str, seconds: int) -> httpx.Response:
    headers = {"if-none-match": etag, "prefer": f"wait={seconds}"}
    url = f"/v1/policies/{line.policy}/channels/{line.channel}"
    return http.get(url, headers=headers, timeout=seconds + 30)


def watched_alone(registry: RegistryProcess, line: Line, etag: str) -> httpx.Response:
    with httpx.Client(base_url=registry.url) as http:
        return watched(http, line, etag, 60)


def etag_of(http: httpx.Client, line: Line) -> str:
    answer = http.get(f"/v1/policies/{line.policy}/channels/{line.channel}")
    return answer.headers["etag"]


def wait_for_watchers(registry: RegistryProcess, count: int) -> None:
    deadline = time.monotonic() + 60
    while f"plait_watchers {count}.0" not in registry.http.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_long_poll_ends_with_the_next_commit_of_any_process(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    here, there = two
    line = grown_line(here.http, 1)
    etag = etag_of(there.http, line)
    epoch = here.http.get("/v1/config").json()["epoch"]
    assert etag == f'"{epoch}.2"'
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(watched_alone, registry, line, etag) for registry in two]
        wait_for_watchers(here, 1)
        wait_for_watchers(there, 1)
        line.commit(line.delta())
        answers = [wait.result(60) for wait in waits]
    for answer in answers:
        assert (answer.status_code, answer.json()["generation"]) == (200, 3)
        assert answer.headers["etag"] == f'"{epoch}.3"'
        assert answer.headers["preference-applied"] == "wait=60"


def test_a_poll_without_news_is_not_modified(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    here, _ = two
    line = grown_line(here.http, 0)
    etag = etag_of(here.http, line)
    at_once = here.http.get(
        f"/v1/policies/{line.policy}/channels/main", headers={"if-none-match": etag}
    )
    assert at_once.status_code == 304
    assert watched(here.http, line, etag, 1).status_code == 304
    stale = watched(here.http, line, '"0123456789abcdef.7"', 60)
    assert stale.status_code == 200


def test_a_hundred_watchers_are_all_woken(two: tuple[RegistryProcess, RegistryProcess]) -> None:
    here, there = two
    line = grown_line(here.http, 0)
    etag = etag_of(there.http, line)
    limits = httpx.Limits(max_connections=100)
    with httpx.Client(base_url=there.url, limits=limits) as http, ThreadPoolExecutor(100) as pool:
        waits = [pool.submit(watched, http, line, etag, 60) for _ in range(100)]
        wait_for_watchers(there, 100)
        # Watchers hold no thread and no connection: the registry still answers.
        move(line, "1", "promote", 1)
        assert {wait.result(60).json()["generation"] for wait in waits} == {2}
    wait_for_watchers(there, 0)


def read_stream(
    http: httpx.Client, want: int, headers: dict[str, str], params: dict[str, str],
    opened: threading.Event,
) -> list[dict[str, str]]:  # fmt: skip
    """The first events of a stream, as their fields."""
    events: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    accept = {"accept": "text/event-stream"} | headers
    with http.stream("GET", "/v1/events", headers=accept, params=params, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for row in answer.iter_lines():
            opened.set()
            if row and not row.startswith(":"):
                name, _, value = row.partition(": ")
                fields[name] = value
            elif not row:
                events += [fields] if "data" in fields else []
                fields = {}
            if len(events) == want:
                return events
    return events


def test_a_stream_tells_everything_once_and_goes_on_after_a_break(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    here, there = two
    line = grown_line(here.http, 0)
    opened = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_stream, there.http, 4, {}, {"policy": line.policy}, opened)
        assert opened.wait(60)
        line.commit(line.delta())
        line.commit(line.delta())
        first = reading.result(60)
    types = [event["event"] for event in first]
    assert types == ["version_committed", "channel_moved"] * 2
    assert json.loads(first[3]["data"])["payload"]["seq"] == 3
    line.commit(line.delta())
    resumed = read_stream(there.http, 3, {"last-event-id": first[2]["id"]}, {}, opened)
    assert resumed[0] == first[3]
    assert json.loads(resumed[2]["data"])["payload"]["seq"] == 4
    page = here.http.get("/v1/events", params={"policy": line.policy}).json()
    revisions = [event["revision"] for event in page["events"]]
    assert revisions == list(range(revisions[0], revisions[0] + 9))


def test_a_stream_of_another_epoch_is_refused(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    here, _ = two
    for last, status, code in (
        ("0123456789abcdef-7", 409, "conflict"),
        ("seven", 400, "request_rejected"),
    ):
        headers = {"accept": "text/event-stream", "last-event-id": last}
        answer = here.http.get("/v1/events", headers=headers)
        assert (answer.status_code, code_of(answer)) == (status, code)


def test_sigterm_with_watchers_attached_ends_within_five_seconds(
    database: str, tmp_path: Path
) -> None:
    with registry_process(tmp_path, database) as registry:
        line = grown_line(registry.http, 0)
        etag = etag_of(registry.http, line)
        clients = [httpx.Client(base_url=registry.url) for _ in range(9)]
        opened = threading.Event()
        with ThreadPoolExecutor(9) as pool:
            polls = [pool.submit(watched, http, line, etag, 60) for http in clients[:8]]
            stream = pool.submit(read_stream, clients[8], 99, {}, {}, opened)
            wait_for_watchers(registry, 9)
            began = time.monotonic()
            assert registry.terminate(30) == 0
            assert time.monotonic() - began < 5
            assert {poll.result(30).status_code for poll in polls} == {304}
            assert stream.result(30) == []
        for http in clients:
            http.close()


def test_news_that_a_watcher_knows_already_does_not_end_its_wait(tmp_path: Path) -> None:
    """The tailer may tell of a movement after the watcher has read the channel."""
    database = f"sqlite:///{tmp_path}/p.db"
    with TestClient(
        create_app(Settings(), catalog=SqlCatalog(database), store=MemoryStore())
    ) as http:
        line = grown_line(http, 1)
        channel = ChannelDocument(**http.get(f"/v1/policies/{line.policy}/channels/main").json())
    older = channel.model_copy(update={"generation": 1})
    newer = channel.model_copy(update={"generation": 3})

    async def main() -> None:
        wait = ChannelWait()
        for known in (older, channel):
            wait.wake(known)
            assert await wait.moved(2, 0.05) is None
        wait.wake(newer)
        assert await wait.moved(2, 60) == newer
        wait.end()
        assert await wait.moved(3, 60) is None

    asyncio.run(main())


def test_a_stream_that_fell_far_behind_does_not_keep_the_others_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait_server.watch._BACKLOG", 3)
    catalog = SqlCatalog(f"sqlite:///{tmp_path}/p.db")

    async def main() -> None:
        watch = Watch(catalog, Metrics())
        await watch.start()
        slow = [watch.stream(0, None, idle_seconds=60) for _ in range(3)]
        for number, stream in enumerate(slow):
            catalog.create_policy(f"p-{number}")
            watch.poke()
            assert await anext(stream) is not None  # from here on nobody reads
        while sum(queue.full() for queue in watch._streams) < 1:
            catalog.create_policy(f"q-{secrets.token_hex(4)}")
            watch.poke()
            await asyncio.sleep(0.01)
        watch.stop()
        for stream in slow:
            rest = [event async for event in stream]
            assert len(rest) < 100
        await watch.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    catalog.close()
