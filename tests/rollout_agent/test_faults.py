"""What goes wrong on the way leaves the old version served, is reported, and heals."""

import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from plait.canonical import digest_of
from plait.codec.chunks import pack_chunks
from plait.errors import (
    EngineRefused,
    LineageError,
    NotFound,
    PlaitError,
    RegistryUnavailable,
    UnsupportedFormat,
)
from plait.manifest import ChunkEntry, Manifest
from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_client.upload import put_cut
from plait_rollout.engine import Move
from plait_rollout.torch_module import TorchModuleEngine

from .line import Line
from .registry_process import RegistryProcess
from .replicas import follower_of, running, wrapped
from .states import (
    changed,
    copy_of,
    encoded_delta,
    fine_cut,
    fingerprint_of,
    fresh_state,
    layout_of,
    manifest_of,
    same_bits,
)
from .tampering import client_through, is_channel, is_chunk
from .waiting import until

NewLine = Callable[..., Line]
NewFetcher = Callable[[RegistryClient], Fetcher]


@pytest.fixture
def new_fetcher(tmp_path: Path) -> NewFetcher:
    """Each with an empty cache."""
    folders = iter(range(100))
    return lambda client: Fetcher(client, ChunkCache(tmp_path / f"cache-{next(folders)}"))


def objects_of(line: Line, registry: RegistryProcess) -> list[Path]:
    """Stored objects of the head's chunks."""
    manifest = line.client.manifest(line.versions[-1].manifest_digest)
    names = [entry.digest.removeprefix("sha256:") for entry in manifest.chunks]
    found = [p for n in names for p in registry.object_paths() if p.name.startswith(n)]
    assert len(found) == len(names) > 0
    return found


def _flip(paths: list[Path]) -> None:
    data = bytearray(paths[0].read_bytes())
    data[len(data) // 2] ^= 0x10
    paths[0].write_bytes(data)


def _truncate(paths: list[Path]) -> None:
    paths[0].write_bytes(paths[0].read_bytes()[:-7])


def _remove(paths: list[Path]) -> None:
    paths[0].unlink()


def _swap(paths: list[Path]) -> None:
    first, second = paths[0].read_bytes(), paths[-1].read_bytes()
    paths[0].write_bytes(second)
    paths[-1].write_bytes(first)


@pytest.mark.parametrize("damage", [_flip, _truncate, _remove, _swap])
def test_a_damaged_stored_chunk_is_reported_and_the_old_version_served(
    client: RegistryClient,
    shared_registry: RegistryProcess,
    new_line: NewLine,
    new_fetcher: NewFetcher,
    damage: Callable[[list[Path]], None],
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
    follower.catch_up()
    line.publish(items=600, split=True)
    paths = objects_of(line, shared_registry)
    kept = {path: path.read_bytes() for path in paths}
    if damage is _swap:
        assert len(paths) > 1
    damage(paths)
    with running(follower):
        until(lambda: bool(follower.status().error_code))
        until(lambda: bool(client.replicas(line.policy)[0].report.error_code))
        status = follower.status()
        assert (status.seq, status.head_seq) == (1, 2)
        assert same_bits(live, line.first)
        for path, data in kept.items():
            path.write_bytes(data)
        until(lambda: follower.status().seq == 2)
        until(lambda: client.replicas(line.policy)[0].report.error_code == "")
    assert same_bits(live, line.head)


def test_a_chunk_of_an_unknown_format_is_refused(
    client: RegistryClient, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
    follower.catch_up()
    after = changed(line.first, 1)
    cut = fine_cut(layout_of(after), 4000)
    (chunk,) = pack_chunks(encoded_delta(cut, line.first, after))
    data = chunk.data.replace(b"plait-chunk/1", b"plait-chunk/9")
    assert data != chunk.data
    client.put_chunk(digest_of(data), data)
    put_cut(client, cut)
    entry = ChunkEntry(digest_of(data), len(data), 0, chunk.frames, chunk.increment)
    plain = manifest_of(cut, [chunk], line.first, after)
    manifest = Manifest.from_document({**plain.to_document(), "chunks": [entry.to_document()]})
    line.commit(manifest, after)
    with pytest.raises(UnsupportedFormat, match="plait-chunk/9"):
        follower.catch_up()
    assert follower.status().error_code == "unsupported_format"
    assert same_bits(live, line.first)


def test_a_registry_that_is_away_is_waited_for(
    own_registry: RegistryProcess, tmp_path: Path
) -> None:
    with RegistryClient(own_registry.url, attempts=1) as client:
        line = Line(client, "away", fresh_state()).start()
        live = copy_of(line.first)
        own_registry.stop()
        fetcher = Fetcher(client, ChunkCache(tmp_path / "cache"))
        follower = follower_of(fetcher, line, TorchModuleEngine(live))
        with pytest.raises(RegistryUnavailable):
            follower.catch_up()
        with running(follower):
            until(lambda: follower.status().error_code == "registry_unavailable")
            assert not follower.is_ready
            own_registry.start()
            until(lambda: follower.is_ready)
            own_registry.stop()
            until(lambda: follower.status().error_code == "registry_unavailable")
            status = follower.status()
            assert (status.phase, status.seq, status.ready) == ("serving", 1, True)
            own_registry.start()
            until(lambda: follower.status().error_code == "")
            line.publish()
            until(lambda: follower.status().seq == 2)
        assert same_bits(live, line.head)


def test_objects_that_become_visible_late_and_out_of_order_are_waited_for(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    line.publish(items=100)
    live = copy_of(line.first)
    seen_at: dict[str, float] = {}

    def hide(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        path = request.url.path
        if is_chunk(request) or "/documents/" in path:
            first = seen_at.setdefault(path, time.monotonic())
            if time.monotonic() - first < 0.02 * (zlib.crc32(path.encode()) % 10):
                return httpx.Response(404, text="not yet")
        return pass_on()

    with client_through(shared_registry.url, hide) as client:
        follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
        with running(follower):
            until(lambda: follower.status().seq == 2)
    assert same_bits(live, line.head)


def test_a_replica_whose_apply_failed_stays_behind_and_catches_up_through_both(
    client: RegistryClient, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    lives = {name: copy_of(line.first) for name in "ab"}
    engines = {name: wrapped(lives[name]) for name in "ab"}
    followers = {
        name: follower_of(new_fetcher(client), line, engines[name], name=name) for name in "ab"
    }
    line.publish()
    for follower in followers.values():
        follower.catch_up()

    def refuse() -> None:
        raise EngineRefused("a checksum is wrong")

    engines["b"].before_apply = refuse
    line.publish()
    followers["a"].catch_up()
    with pytest.raises(EngineRefused):
        followers["b"].catch_up()
    followers["b"].stop()
    served = {r.replica: (r.report.seq, r.report.error_code) for r in client.replicas(line.policy)}
    assert served["b"] == (2, "engine_refused")
    assert same_bits(lives["b"], line.states[2])
    engines["b"].before_apply = lambda: None
    line.publish()
    for follower in followers.values():
        assert follower.catch_up().seq == 4
    assert len(engines["b"].staged[-1].steps) == 2
    assert same_bits(lives["a"], lives["b"])


def test_a_transfer_that_breaks_off_applies_nothing_of_what_came(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    line.publish(changed(line.first, 1), items=100, split=True)
    live = copy_of(line.first)
    served, broken = 0, True

    def break_off(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        nonlocal served
        if is_chunk(request):
            served += 1
            if broken and served > 2:
                raise httpx.ReadError("connection reset")
        return pass_on()

    with client_through(shared_registry.url, break_off) as client:
        follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
        with pytest.raises(RegistryUnavailable):
            follower.catch_up()
        assert same_bits(live, line.first)
        broken = False
        assert follower.catch_up().seq == 2
    assert same_bits(live, line.head)


def test_an_older_head_is_ignored_also_after_a_restart(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher, tmp_path: Path
) -> None:
    line = new_line()
    live = copy_of(line.first)
    old = line.client.channel(line.policy, "main")
    line.publish()
    stale = False

    def answer(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        if stale and is_channel(request):
            return httpx.Response(200, text=old.model_dump_json())
        return pass_on()

    with client_through(shared_registry.url, answer) as client:
        memory = tmp_path / "memory.json"
        first = follower_of(new_fetcher(client), line, TorchModuleEngine(live), memory=memory)
        first.catch_up()
        stale = True
        with pytest.raises(LineageError, match="generation 1"):
            first.catch_up()
        second = follower_of(new_fetcher(client), line, TorchModuleEngine(live), memory=memory)
        with pytest.raises(LineageError, match="generation 1"):
            second.catch_up()
        assert same_bits(live, line.head)
        stale = False
        assert second.catch_up().seq == 2
        stale = True
        with running(second):
            until(lambda: second.status().error_code == "lineage")
            assert second.status().seq == 2
    assert same_bits(live, line.head)


def test_another_epoch_is_another_database(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    for _ in range(2):
        line.publish()
    reborn = False

    def answer(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        if reborn and is_channel(request):
            now = line.client.channel(line.policy, "main")
            other = now.model_copy(update={"epoch": "another", "generation": 1})
            return httpx.Response(200, text=other.model_dump_json())
        return pass_on()

    with client_through(shared_registry.url, answer) as client:
        follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
        follower.catch_up()
        reborn = True
        assert follower.catch_up().generation == 1
    assert same_bits(live, line.head)


def test_a_chunk_that_never_comes_ends_in_time_and_leaves_no_thread(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    line.publish()
    release = threading.Event()

    def stall(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        if is_chunk(request):
            release.wait(0.3)
            raise httpx.ReadTimeout("nothing came")
        return pass_on()

    before = threading.active_count()
    with client_through(shared_registry.url, stall) as client:
        follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
        with running(follower):
            until(lambda: follower.status().error_code == "registry_unavailable")
            assert follower.status().seq == 1
    assert threading.active_count() == before
    assert same_bits(live, line.first)


def test_a_chunk_that_was_evicted_before_it_was_read_is_fetched_again(
    client: RegistryClient, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = wrapped(live)
    follower = follower_of(new_fetcher(client), line, engine)
    line.publish()

    def evict(move: Move) -> None:
        engine.before_stage = lambda move: None
        for step in move.steps:
            for path in step.chunks:
                path.unlink()

    engine.before_stage = evict
    with running(follower):
        until(lambda: follower.status().seq == 2)
    assert same_bits(live, line.head)


def test_a_version_that_is_gone_is_said_clearly(
    shared_registry: RegistryProcess, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    line.publish()
    line.publish()
    live = copy_of(line.first)

    def gone(request: httpx.Request, pass_on: Callable[[], httpx.Response]) -> httpx.Response:
        return httpx.Response(404, text="gone") if is_chunk(request) else pass_on()

    with client_through(shared_registry.url, gone) as client:
        follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
        with pytest.raises(PlaitError) as refused:
            follower.go_to("2")
        assert refused.value.message
        assert same_bits(live, line.first)
    follower = follower_of(new_fetcher(line.client), line, TorchModuleEngine(live))
    assert follower.catch_up().seq == 3


def test_what_fails_in_place_again_and_again_is_reloaded(
    client: RegistryClient, new_line: NewLine, new_fetcher: NewFetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(line.first)
    module = TorchModuleEngine(live)
    engine = wrapped(live)
    engine.inner = module
    follower = follower_of(
        new_fetcher(client), line, engine, reload_into=tmp_path / "d", module=module
    )
    follower.catch_up()

    def refuse() -> None:
        raise EngineRefused("no")

    engine.before_apply = refuse
    line.publish()
    with running(follower):
        until(lambda: follower.status().seq == 2)
    assert follower.status().fallback == "reloaded: moving in place failed 2 times"
    assert same_bits(live, line.head)


def test_a_policy_that_does_not_exist_yet_is_waited_for(
    client: RegistryClient, new_fetcher: NewFetcher
) -> None:
    line = Line(client, f"later-{os.getpid()}", fresh_state())
    follower = follower_of(new_fetcher(client), line, TorchModuleEngine(copy_of(line.first)))
    with pytest.raises(NotFound):
        follower.catch_up()
    with running(follower):
        until(lambda: follower.status().error_code == "not_found")
        line.start()
        until(lambda: follower.is_ready)


def test_two_hundred_moves_leave_memory_and_descriptors_flat(
    client: RegistryClient, new_line: NewLine, new_fetcher: NewFetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(new_fetcher(client), line, TorchModuleEngine(live))
    line.publish()
    follower.catch_up()
    measured: dict[int, tuple[int, int]] = {}
    for turn in range(1, 201):
        assert follower.go_to(str(1 + turn % 2)).seq == 1 + turn % 2
        if turn in (60, 200):
            measured[turn] = (_resident_bytes(), len(list(Path("/proc/self/fd").iterdir())))
    assert measured[200][1] == measured[60][1]
    assert measured[200][0] <= 1.02 * measured[60][0]
    assert fingerprint_of(live) == fingerprint_of(line.first)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
