"""A real `plait serve` on SQLite: commits a second, and how soon watchers hear of one."""

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.report import Section
from benchmarks.timing import percentile
from plait.fingerprint import Fingerprint
from plait.layout import Layout, TensorSpec
from plait.manifest import Manifest, Statistics
from plait.version_record import VersionRecord
from plait.wire import CommitRequest, VersionDocument
from plait_client.registry import RegistryClient, etag_of
from plait_demo.processes import Child, free_port, plait_command

_PUBLISHERS: Final = 8
_COMMITS_EACH: Final = 60
_WATCHERS: Final = (200, 1000)
_ROUNDS: Final = 3
_LAYOUT: Final = Layout.of([TensorSpec("w", "BF16", (2,))])
_STATE: Final = Fingerprint(1, 2)
_STATISTICS: Final = Statistics(0, 0, 2, 4, 0)


def registry_section() -> Section:
    with _registry() as url:
        rows = [_commits(url), *(_watchers(url, count) for count in _WATCHERS)]
    return Section(
        "Registry: one process, SQLite, a local folder",
        "Publishers and watchers run on the same cores as the registry, so these are wall-clock "
        "figures of the whole machine. A commit is a version without changes: one transaction.",
        ["what", "result", "budget"],
        rows,
    )


@contextmanager
def _registry() -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "registry.log"
        data = str(Path(folder) / "data")
        child = Child(plait_command("serve", "--data", data, "--port", str(port)), log=log)
        try:
            child.wait_until(lambda: "serving on" in log.read_text(), within_s=60)
            yield url
        finally:
            child.stop()


def _commits(url: str) -> list[str]:
    with RegistryClient(url) as client, ThreadPoolExecutor(_PUBLISHERS) as pool:
        lines = [_Line(client, f"policy-{number}") for number in range(_PUBLISHERS)]
        started = time.perf_counter()
        took = [second for line in pool.map(_Line.commit_many, lines) for second in line]
        rate = len(took) / (time.perf_counter() - started)
    slow = percentile(took, 0.99)
    return [
        f"commits by {_PUBLISHERS} publishers at once",
        f"{rate:.0f}/s (p99 {1000 * slow:.0f} ms)",
        ">= 100/s",
    ]


class _Line:
    """One policy whose versions all have the same weights."""

    def __init__(self, client: RegistryClient, policy: str) -> None:
        self._client, self._policy = client, policy
        client.create_policy(policy)
        client.put_document(_LAYOUT.serialize())
        self._head: VersionDocument = self._commit(None)

    def commit_many(self) -> list[float]:
        return [self.commit() for _ in range(_COMMITS_EACH)]

    def commit(self) -> float:
        started = time.perf_counter()
        self._head = self._commit(self._head)
        return time.perf_counter() - started

    def _commit(self, head: VersionDocument | None) -> VersionDocument:
        parent = None if head is None else head.version_digest
        record = VersionRecord(
            self._policy, _LAYOUT.digest, parent, _STATE, "unproven", secrets.token_hex(16)
        )
        manifest = Manifest(
            kind="anchor" if head is None else "delta",
            layout=_LAYOUT.digest,
            cut=None,
            base=None if head is None else _STATE,
            target=_STATE,
            chunks=(),
            statistics=_STATISTICS,
            external=head is None,
        )
        request = CommitRequest(
            channel="main",
            expected_head=parent,
            expected_generation=0 if head is None else head.generation,
            record=record.to_document(),
            manifest=manifest.to_document(),
        )
        return self._client.commit(self._policy, request, record.digest)


def _watchers(url: str, count: int) -> list[str]:
    with RegistryClient(url) as client:
        line = _Line(client, f"watched-by-{count}")
        policy = f"watched-by-{count}"
        delays = [
            delay
            for _ in range(_ROUNDS)
            for delay in asyncio.run(_one_round(url, client, line, policy, count))
        ]
    return [
        f"from a commit to its {count} watchers",
        f"p50 {percentile(delays, 0.5):.2f} s, p99 {percentile(delays, 0.99):.2f} s",
        "p99 < 2 s" if count == max(_WATCHERS) else "",
    ]


async def _one_round(
    url: str, client: RegistryClient, line: _Line, policy: str, count: int
) -> list[float]:
    """Seconds from the start of a commit until each watcher has its answer."""
    etag = etag_of(client.channel(policy, "main"))
    host, port = url.removeprefix("http://").split(":")
    request = (
        f"GET /v1/policies/{policy}/channels/main HTTP/1.1\r\nHost: {host}\r\n"
        f"If-None-Match: {etag}\r\nPrefer: wait=50\r\n\r\n"
    ).encode()

    asked: list[asyncio.StreamWriter] = []

    # Bare sockets: the watchers share the cores with the registry, which is what is measured.
    async def watch() -> float:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        await writer.drain()
        asked.append(writer)
        status = await reader.readline()
        heard = time.perf_counter()
        writer.close()
        if b" 200 " not in status:
            sys.exit(f"a watcher got {status!r}")
        return heard

    tasks = [asyncio.create_task(watch()) for _ in range(count)]
    while len(asked) < count:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)  # for the last of them to be waiting
    started = time.perf_counter()
    await asyncio.to_thread(line.commit)
    heard = [await task for task in tasks]
    if min(heard) < started:
        sys.exit("a watcher was answered before anything had happened")
    return [moment - started for moment in heard]
