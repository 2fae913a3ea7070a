"""Manifests, version records and the names in them: what they may say, and what contradicts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.errors import (
    DocumentInvalid,
    FingerprintMismatch,
    FormatError,
    LimitExceeded,
    UnsupportedFormat,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.limits import (
    CHUNK_BYTES_MAX,
    CHUNKS_PER_MANIFEST_MAX,
    FRAMES_MAX,
    METADATA_BYTES_MAX,
    SIDE_FILES_MAX,
)
from plait.manifest import ChunkEntry, Manifest, SideFile, Statistics
from plait.names import check_name, check_side_file_name
from plait.version_record import VersionRecord, check_metadata

DIGEST = "sha256:" + "a" * 64
STATISTICS = Statistics(3, 6, 100, 200, 50)
NO_CHUNKS = Statistics(0, 0, 100, 200, 0)
lanes = st.integers(0, (1 << 64) - 1)
fingerprints = st.builds(Fingerprint, lanes, lanes)


def chunk(*frames: int, increment: Fingerprint = ZERO) -> ChunkEntry:
    return ChunkEntry(DIGEST, 50, 0, frames, increment)


def delta(base: Fingerprint, *chunks: ChunkEntry, target: Fingerprint | None = None) -> Manifest:
    reached = sum((c.increment for c in chunks), base)
    cut = DIGEST if chunks else None
    statistics = Statistics(3, 6, 100, 200, 50 * len(chunks))
    return Manifest("delta", DIGEST, cut, base, target or reached, chunks, statistics)


@given(fingerprints, st.lists(fingerprints, max_size=4))
def test_a_manifest_survives_its_document(base: Fingerprint, increments: list[Fingerprint]) -> None:
    chunks = [chunk(2 * n, 2 * n + 1, increment=step) for n, step in enumerate(increments)]
    manifest = delta(base, *chunks)
    again = Manifest.parse(manifest.data)
    assert again == manifest
    assert again.digest == manifest.digest == canonical.digest_of(manifest.data)
    assert again.increment == sum(increments, ZERO)
    assert again.chunk_bytes == 50 * len(chunks)


def test_an_anchor_carries_side_files() -> None:
    files = (SideFile("config.json", DIGEST, 7), SideFile("tokenizer/vocab.txt", DIGEST, 0))
    manifest = Manifest(
        "anchor", DIGEST, DIGEST, None, Fingerprint(1, 2),
        (chunk(0, increment=Fingerprint(1, 2)),), STATISTICS, side_files=files,
    )  # fmt: skip
    assert Manifest.parse(manifest.data).side_files == files


def test_an_external_anchor_has_a_target_and_no_chunks() -> None:
    manifest = Manifest(
        "anchor", DIGEST, None, None, Fingerprint(1, 2), (), NO_CHUNKS, external=True
    )
    assert Manifest.parse(manifest.data) == manifest


def test_a_lost_or_doubled_change_is_caught_by_the_sum() -> None:
    lost = chunk(0, increment=Fingerprint(5, 5))
    for chunks in ((lost,), (lost, chunk(1, increment=Fingerprint(5, 5)))):
        with pytest.raises(FingerprintMismatch, match="lost or counted twice"):
            delta(ZERO, *chunks, target=Fingerprint(1, 0))


def in_slot(slot: int, *frames: int) -> ChunkEntry:
    return ChunkEntry(DIGEST, 50, slot, frames, ZERO)


def test_a_frame_in_two_chunks_is_refused() -> None:
    for slot in (0, 1):
        with pytest.raises(DocumentInvalid, match="two chunks"):
            delta(ZERO, in_slot(0, 0, 3), in_slot(slot, 3))


@pytest.mark.parametrize(
    "chunks", [((0, 2), (1, 3)), ((2, 3), (0, 1)), ((0, 5), (1,), (6,)), ((4,), (5,), (0,))]
)
def test_chunks_of_a_slot_that_interleave_or_go_back_are_refused(
    chunks: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(DocumentInvalid, match="the chunks of a slot are in order"):
        delta(ZERO, *(in_slot(2, *frames) for frames in chunks))
    apart = [in_slot(slot, *frames) for slot, frames in enumerate(chunks)]
    assert len(delta(ZERO, *apart).chunks) == len(chunks)


def anchor_fields(**fields: Any) -> dict[str, Any]:
    manifest = Manifest(
        "anchor", DIGEST, DIGEST, None, Fingerprint(1, 2),
        (chunk(0, 3, increment=Fingerprint(1, 2)),), STATISTICS,
        side_files=(SideFile("config.json", DIGEST, 7),),
    )  # fmt: skip
    return manifest.to_document() | fields


def chunk_fields(**fields: Any) -> dict[str, Any]:
    row = chunk(0, 3, increment=Fingerprint(1, 2)).to_document() | fields
    return anchor_fields(chunks=[row])


def side_fields(**fields: Any) -> dict[str, Any]:
    return anchor_fields(side_files=[SideFile("config.json", DIGEST, 7).to_document() | fields])


def test_long_lists_are_refused_before_their_rows_are_read() -> None:
    for document in (
        anchor_fields(chunks=[0] * (CHUNKS_PER_MANIFEST_MAX + 1)),
        anchor_fields(side_files=[0] * (SIDE_FILES_MAX + 1)),
        anchor_fields(chunks=[ONE_FRAME | {"frames": [""] * (FRAMES_MAX + 1)}]),
        anchor_fields(chunks=[ONE_FRAME | {"frames": [""] * (FRAMES_MAX // 8)}] * 9),
    ):
        with pytest.raises(LimitExceeded, match="at most"):
            Manifest.from_document(document)


CONFIG = SideFile("config.json", DIGEST, 7).to_document()
BELOW = SideFile("config.json/x", DIGEST, 7).to_document()
ONE_FRAME = chunk(0, increment=ZERO).to_document()


def two_chunks() -> dict[str, Any]:
    """Nothing but one frame in two of them is wrong."""
    sizes = STATISTICS.to_document() | {"chunk_bytes": 100}
    return anchor_fields(chunks=[ONE_FRAME, ONE_FRAME], to="0" * 32, statistics=sizes)


@pytest.mark.parametrize(
    ("document", "error", "why"),
    [
        (anchor_fields(kind="snapshot"), DocumentInvalid, "unknown kind"),
        (anchor_fields(kind="a" * 10_000), DocumentInvalid, "unknown kind"),
        (anchor_fields(kind="delta"), DocumentInvalid, "a delta has a base"),
        (anchor_fields(**{"from": "0" * 32}), DocumentInvalid, "an anchor has none"),
        (anchor_fields(to=None), DocumentInvalid, "fingerprint"),
        (anchor_fields(to="0" * 32), FingerprintMismatch, "add up"),
        (anchor_fields(layout="sha256:zz"), DocumentInvalid, "layout digest"),
        (anchor_fields(cut=None), DocumentInvalid, "names its cut"),
        (anchor_fields(cut=5), DocumentInvalid, "cut digest"),
        (anchor_fields(external=True), DocumentInvalid, "without chunks"),
        (anchor_fields(external=0), DocumentInvalid, "unknown kind"),
        (anchor_fields(chunks={}), DocumentInvalid, "must be lists"),
        (anchor_fields(chunks=[[]]), DocumentInvalid, "chunk must be an object"),
        (two_chunks(), DocumentInvalid, "two chunks"),
        (anchor_fields(side_files=[CONFIG, CONFIG]), DocumentInvalid, "two side files"),
        (anchor_fields(side_files=[CONFIG, BELOW]), DocumentInvalid, "lies in the other"),
        (anchor_fields(side_files=[BELOW, CONFIG]), DocumentInvalid, "lies in the other"),
        (anchor_fields(statistics={}), DocumentInvalid, "missing or unknown fields"),
        (anchor_fields(statistics=NO_CHUNKS.to_document()), DocumentInvalid, "0 bytes of chunks"),
        (
            anchor_fields(statistics=STATISTICS.to_document() | {"more": 1}),
            DocumentInvalid,
            "unknown fields: more",
        ),
        (anchor_fields(more=1), DocumentInvalid, "unknown fields: more"),
        (anchor_fields(format="plait-manifest/9"), UnsupportedFormat, "plait-manifest/9"),
        (anchor_fields(requires=["squash"]), UnsupportedFormat, "requires features"),
        (chunk_fields(digest="x"), DocumentInvalid, "chunk digest"),
        (chunk_fields(size=-1), DocumentInvalid, "chunk size"),
        (chunk_fields(size=1.5), DocumentInvalid, "chunk size"),
        (chunk_fields(size=True), DocumentInvalid, "chunk size"),
        (chunk_fields(size=CHUNK_BYTES_MAX + 1), LimitExceeded, "chunk size"),
        (chunk_fields(slot=-1), DocumentInvalid, "chunk slot"),
        (chunk_fields(frames=[]), DocumentInvalid, "non-empty list"),
        (chunk_fields(frames=[3, 0]), DocumentInvalid, "must increase"),
        (chunk_fields(frames=[3, 3]), DocumentInvalid, "must increase"),
        (chunk_fields(frames=[1 << 20]), LimitExceeded, "frame number"),
        (chunk_fields(frames=["0"]), DocumentInvalid, "frame number"),
        (chunk_fields(increment=""), DocumentInvalid, "fingerprint"),
        (side_fields(name="../evil"), DocumentInvalid, "evil"),
        (side_fields(size=1 << 40), LimitExceeded, "side file size"),
        (side_fields(digest=None), DocumentInvalid, "side file digest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    document: dict[str, Any], error: type[FormatError], why: str
) -> None:
    with pytest.raises(error, match=why) as refusal:
        Manifest.parse(canonical.serialize(document))
    assert len(refusal.value.message) < 400


def test_a_delta_without_a_base_or_with_side_files_is_refused() -> None:
    document = delta(ZERO).to_document()
    for fields in ({"from": None}, {"side_files": [CONFIG]}, {"external": True}):
        with pytest.raises(DocumentInvalid):
            Manifest.parse(canonical.serialize(document | fields))


def record(**fields: Any) -> VersionRecord:
    known: dict[str, Any] = {
        "policy": "p",
        "layout": DIGEST,
        "parent": None,
        "fingerprint": ZERO,
        "proof": "full",
        "nonce": "0123456789abcdef",
    }
    return VersionRecord(**known | fields)


def test_a_version_record_survives_its_document_and_its_nonce_tells_apart() -> None:
    first = record(metadata={"step": 3, "rate": 1e-6, "note": "ü"}, parent=DIGEST)
    assert VersionRecord.parse(first.data) == first
    assert VersionRecord.parse(first.data).digest == first.digest
    assert record().digest != record(nonce="0123456789abcdeg").digest


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"policy": ""}, DocumentInvalid),
        ({"policy": "a/b"}, DocumentInvalid),
        ({"policy": 3}, DocumentInvalid),
        ({"layout": None}, DocumentInvalid),
        ({"parent": "main"}, DocumentInvalid),
        ({"fingerprint": "00"}, DocumentInvalid),
        ({"proof": "sworn"}, DocumentInvalid),
        ({"proof": "a" * 10_000}, DocumentInvalid),
        ({"proof": None}, DocumentInvalid),
        ({"nonce": "short"}, DocumentInvalid),
        ({"nonce": "x" * 65}, DocumentInvalid),
        ({"nonce": 7}, DocumentInvalid),
        ({"metadata": []}, DocumentInvalid),
        ({"metadata": {"text": "x" * METADATA_BYTES_MAX}}, LimitExceeded),
        ({"more": 1}, DocumentInvalid),
        ({"format": "plait-version/2"}, UnsupportedFormat),
        ({"requires": ["x"]}, UnsupportedFormat),
    ],
)
def test_a_broken_version_record_is_refused(
    fields: dict[str, Any], error: type[FormatError]
) -> None:
    with pytest.raises(error) as refusal:
        VersionRecord.parse(canonical.serialize(record().to_document() | fields))
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize("name", ["main", "dc-eu-1", "Qwen3_0.6B", "7b", "1.0"])
def test_names_of_policies_and_channels(name: str) -> None:
    assert check_name(name, "policy") == name


@pytest.mark.parametrize(
    "name", ["", "41", "main~3", "a b", "a@b", ".a", "-a", "é", "a" * 129, "...", None]
)
def test_a_name_that_a_ref_would_misread_is_refused(name: object) -> None:
    with pytest.raises(DocumentInvalid):
        check_name(name, "channel")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "./a",
        "a\\b",
        "a\0",
        ".plait/journal",
        "é" * 128,
        "ill-encoded-\udcff",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        5,
    ],
)
def test_a_side_file_that_could_do_harm_in_a_folder_is_refused(name: object) -> None:
    with pytest.raises(DocumentInvalid):
        check_side_file_name(name)


def test_side_files_deeper_down_may_be_anything() -> None:
    for name in ("adapter/adapter.safetensors", "a/.plait", "tokenizer.model"):
        assert check_side_file_name(name) == name


def test_a_copy_of_metadata_is_what_a_reader_will_find() -> None:
    metadata = {"step": 3, "rates": {"actor": (0.5, 1e-6)}}
    held = check_metadata(metadata)
    assert held == {"step": 3, "rates": {"actor": [0.5, 1e-6]}}
    assert held["rates"] is not metadata["rates"]


def test_metadata_that_could_not_be_read_back_is_refused_at_once() -> None:
    with pytest.raises(DocumentInvalid, match="beyond 2"):
        VersionRecord(
            policy="p",
            layout="sha256:" + "0" * 64,
            parent=None,
            fingerprint=ZERO,
            proof="full",
            nonce="0" * 32,
            metadata={"flops": 1e17},
        )
