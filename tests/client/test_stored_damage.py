"""What the registry's store holds is damaged: a typed error, and the folder stays as it was."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.canonical import digest_of
from plait.codec.chunks import read_chunk
from plait.codec.frames import encode_dense
from plait.cut import plain_cut
from plait.errors import (
    ChunkInvalid,
    CorruptionError,
    DigestMismatch,
    DocumentInvalid,
    FingerprintMismatch,
    LimitExceeded,
    ObjectMissing,
    PlaitError,
    SizeMismatch,
)
from plait.store import LocalStore, MemoryStore
from plait.version_record import VersionRecord
from plait_client.cache import ChunkCache
from plait_client.checkout import checkout
from plait_client.fetch import Fetcher
from plait_client.progress import SILENT
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, put_layout, upload_frames
from plait_client.verification import verify_folder, verify_stored
from tests.client import checkpoints
from tests.client.checkpoint_line import Line, make_line
from tests.client.serving import ServedRegistry

_seeds = iter(range(1000, 2000))


@pytest.fixture
def line(fetcher: Fetcher, policy: str, tmp_path: Path) -> Line:
    """Two versions that share no chunk with any other test."""
    return make_line(fetcher, policy, tmp_path / "in", 2, seed=next(_seeds))


def object_of(registry: ServedRegistry, digest: str) -> Path:
    (path,) = [p for p in registry.object_files() if digest.removeprefix("sha256:") in p.name]
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def swap(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip, DigestMismatch),
        (swap, DigestMismatch),
        (truncate, SizeMismatch),
        (Path.unlink, ObjectMissing),
    ],
)
def test_a_damaged_chunk_is_refused_and_the_folder_stays_as_it_was(
    registry: ServedRegistry, client: RegistryClient, fetcher: Fetcher, line: Line,
    tmp_path: Path, damage: Callable[[Path], object], expected: type[PlaitError],
) -> None:  # fmt: skip
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    checkout(client, line.ref(1), out, fetcher=fetcher)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = client.manifest(client.version(line.policy, "2").manifest_digest)
    damage(object_of(registry, manifest.chunks[0].digest))
    empty = Fetcher(client, ChunkCache(tmp_path / "empty-cache"))
    for folder in (out, fresh):
        with pytest.raises(expected, match=r"sha256[:/]"):
            checkout(client, line.ref(2), folder, fetcher=empty)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not fresh.exists()
    with pytest.raises(expected):
        verify_stored(client, client.version(line.policy, "2"), SILENT)
    assert verify_stored(client, client.version(line.policy, "1"), SILENT).chunks == 1
    # The cache still has the right bytes: they are proven, so they may be used.
    checkout(client, line.ref(2), out, fetcher=fetcher)
    assert checkpoints.read(out) == checkpoints.expected(line.versions[1])


def test_a_publish_mends_what_the_store_has_lost(
    registry: ServedRegistry, client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path
) -> None:
    manifest = client.manifest(client.version(line.policy, "2").manifest_digest)
    object_of(registry, manifest.chunks[0].digest).unlink()
    shutil.rmtree(fetcher.cache.root)
    publish(Request(line.folder(2), f"{line.policy}-again"), fetcher)  # an anchor: other chunks
    again = publish(Request(line.folder(1), line.policy, base=line.folder(2)), fetcher)
    publish(Request(line.folder(2), line.policy, base=line.folder(1)), fetcher)
    assert again.seq == 3
    assert verify_stored(client, client.version(line.policy, "4"), SILENT).manifests >= 1


@pytest.mark.parametrize("wrong", ["changed_elements", "changed_bytes"])
@pytest.mark.parametrize("seq", [1, 2])
def test_verify_compares_a_manifests_statistics_with_its_frames(
    client: RegistryClient, line: Line, seq: int, wrong: str
) -> None:
    """The registry doesn't read chunks: it believes what a publisher says of them."""
    version = client.version(line.policy, str(seq))
    right = client.manifest(version.manifest_digest)
    policy = f"{line.policy}-claims"
    client.create_policy(policy)
    parent = None
    for number in range(1, seq + 1):
        manifest = client.manifest(client.version(line.policy, str(number)).manifest_digest)
        if number == seq:
            claim = {wrong: getattr(right.statistics, wrong) - 1}
            manifest = replace(right, statistics=replace(right.statistics, **claim))
        record = VersionRecord(
            policy, manifest.layout, parent, manifest.target, "full", f"{number:032x}"
        )
        commit_version(
            client, policy=policy, channel="main", record=record, manifest=manifest,
            expected_head=parent, expected_generation=number - 1,
        )  # fmt: skip
        parent = record.digest
    with pytest.raises(DocumentInvalid, match="its frames and its layout say"):
        verify_stored(client, client.version(policy, str(seq)), SILENT)
    assert verify_stored(client, version, SILENT).chunks >= seq


def test_verify_reads_every_weight_of_a_folder(
    client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path
) -> None:
    version = client.version(line.policy, "2")
    assert verify_folder(line.folder(2), version).weights == version.total_elements
    with pytest.raises(CorruptionError, match="isn't"):
        verify_folder(line.folder(1), version)
    flip(line.folder(2) / "model.safetensors")
    with pytest.raises(FingerprintMismatch):
        verify_folder(line.folder(2), version)


def test_chunks_travel_straight_through_the_store_where_it_can_be_reached(
    registry: ServedRegistry, client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path
) -> None:
    store = LocalStore(registry.data / "objects")
    direct = Fetcher(client, ChunkCache(tmp_path / "direct-cache"), store=store)
    checkout(client, line.ref(2), tmp_path / "out", fetcher=direct)
    assert checkpoints.read(tmp_path / "out") == checkpoints.expected(line.versions[1])
    # A store that lacks the objects (another region's, say) is said and gone around.
    other = Fetcher(client, ChunkCache(tmp_path / "other-cache"), store=MemoryStore())
    checkout(client, line.ref(1), tmp_path / "other", fetcher=other)
    assert checkpoints.read(tmp_path / "other") == checkpoints.expected(line.versions[0])


@pytest.mark.parametrize("direct", [False, True])
def test_uploaded_frames_are_what_the_entries_say(
    registry: ServedRegistry, client: RegistryClient, line: Line, direct: bool
) -> None:
    from plait_client.checkpoint import CheckpointFolder

    checkpoints.write(line.folder(1), checkpoints.first_bits(next(_seeds)))
    weights = CheckpointFolder(line.folder(1))
    cut = plain_cut(weights.layout, for_anchor=True)
    assert put_layout(client, weights.layout) == weights.layout.digest
    assert put_cut(client, cut) == cut.digest
    frames = [encode_dense(number, frame, weights) for number, frame in enumerate(cut.frames)]
    store = LocalStore(registry.data / "objects") if direct else None
    kept: dict[str, bytes] = {}
    entries = upload_frames(client, iter(frames), store=store, keep=kept.__setitem__)
    assert [number for entry in entries for number in entry.frames] == list(range(len(frames)))
    for entry in entries:
        data = client.chunk(entry.digest, entry.size)
        assert digest_of(data) == entry.digest
        assert kept[entry.digest] == data
        assert read_chunk(data, entry=entry).numbers == entry.frames
    files = registry.object_files()
    assert upload_frames(client, iter(frames)) == entries
    assert registry.object_files() == files  # nothing was sent twice


def test_a_chunk_of_the_right_digest_but_another_content_is_refused(
    client: RegistryClient, fetcher: Fetcher, line: Line
) -> None:
    """A publisher may store anything under its true digest; a reader takes only chunks."""
    data = b"not a chunk"
    client.put_chunk(digest_of(data), data)
    with pytest.raises((ChunkInvalid, LimitExceeded)):
        read_chunk(fetcher.object(digest_of(data), len(data)))
