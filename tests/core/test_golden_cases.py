"""The golden cases: every dtype, several restart blocks, documents at their edges, and refusals."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from plait import codec
from plait.codec import EncodedFrame
from plait.cut import Cut, FrameSpec, Segment
from plait.errors import PlaitError
from plait.layout import DTYPE_BITS, Layout
from plait.manifest import Manifest
from plait.version_record import VersionRecord
from plait.weights import UNSIGNED, ArrayWeights, fingerprint_weights, scatter
from tests.core import reference, reference_documents
from tests.core.reference_documents import Refused, digest_of
from tests.core.strategies import equal_bits

FOLDER: Final = Path(__file__).parent.parent / "golden" / "v1"
DTYPES: Final = {path.name: path.read_bytes() for path in (FOLDER / "dtypes").iterdir()}
LAYOUT: Final = Layout.parse(DTYPES["layout.json"])
CUT: Final = Cut.parse(DTYPES["cut.json"])
CHUNKS: Final = {digest_of(data): data for data in DTYPES.values()}

# Of every file of a folder: a case that changes together with the code would pin nothing.
DIGESTS: Final = {
    "documents": "e48edf19eeddc4da0dcdbe1175dd87c9febd87d765d3264dfbaec30435e7bf10",
    "dtypes": "9a1ac5050f8533e4cca690e1ba76d3f25f3708db54972df9a2fe097588f20cf7",
    "frames": "f26cd6e1b0996346206d75b305ea69acf352b1c909ca4d3ef74c714cba8ad1f6",
    "refused": "c32e3d91d3572af4478b3cd33c61a79ea0ec0e86c0430f39250d2dadb21a8d36",
}
HUNDRED: Final = FrameSpec(2, (Segment(0, 100, 0, 1),))


@pytest.mark.parametrize("folder", DIGESTS)
def test_no_case_is_changed_lost_or_added_unseen(folder: str) -> None:
    total = hashlib.sha256()
    for path in sorted((FOLDER / folder).iterdir()):
        total.update(f"{path.name} {digest_of(path.read_bytes())}\n".encode())
    assert total.hexdigest() == DIGESTS[folder]


def weights(state: str) -> ArrayWeights:
    stored = json.loads(DTYPES["weights.json"])[state]
    arrays = {
        t.name: np.frombuffer(bytearray.fromhex(stored[t.name]), UNSIGNED[t.item_bytes])
        for t in LAYOUT.tensors
    }
    return ArrayWeights(LAYOUT, arrays)


def frames_of(manifest: Manifest) -> list[tuple[EncodedFrame, FrameSpec]]:
    return [
        (encoded, CUT.frames[encoded.number])
        for entry in manifest.chunks
        for encoded in codec.read_chunk(CHUNKS[entry.digest], entry=entry).frames
    ]


def test_every_dtype_is_there_and_changes() -> None:
    assert {tensor.dtype for tensor in LAYOUT.tensors} == set(DTYPE_BITS)
    assert reference_documents.DTYPES == DTYPE_BITS
    old, new = weights("old"), weights("new")
    for tensor in LAYOUT.tensors:
        assert (old.bits(tensor.name) != new.bits(tensor.name)).any()


def test_an_anchor_and_a_delta_of_every_dtype_lead_to_its_bits() -> None:
    anchor = Manifest.parse(DTYPES["manifest-anchor.json"])
    delta = Manifest.parse(DTYPES["manifest-delta.json"])
    held = weights("new")
    for encoded, frame in frames_of(anchor):
        scatter(frame, held, codec.decode_dense(encoded, frame))
    assert equal_bits(held, weights("old"))
    assert fingerprint_weights(held) == anchor.target == delta.base
    for encoded, frame in frames_of(delta):
        change = codec.decode_delta(encoded, frame)
        assert codec.increment_on(frame, held, change) == change.increment
        codec.apply(frame, held, change)
    assert equal_bits(held, weights("new"))
    assert fingerprint_weights(held) == delta.target


def test_the_second_reader_finds_the_same_in_every_dtype() -> None:
    stored = json.loads(DTYPES["weights.json"])
    layout, cut = DTYPES["layout.json"], DTYPES["cut.json"]
    old, new = (
        reference.state_of(layout, {n: bytes.fromhex(t) for n, t in stored[state].items()})
        for state in ("old", "new")
    )
    anchor, delta = (
        reference_documents.read_manifest(DTYPES[f"manifest-{kind}.json"])
        for kind in ("anchor", "delta")
    )
    found = reference.apply_manifest(new, anchor, layout, cut, CHUNKS)
    assert found.tolist() == old.tolist()
    assert reference.apply_manifest(old, delta, layout, cut, CHUNKS).tolist() == new.tolist()
    back = reference.apply_manifest(new, delta, layout, cut, CHUNKS, back=True)
    assert back.tolist() == old.tolist()


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_frames_of_several_restart_blocks_decode_to_their_changes(item_bytes: int) -> None:
    path = FOLDER / "frames" / f"blocks-of-{item_bytes}-byte-items.json"
    expected = json.loads(path.read_bytes())
    size, rows = expected["frame"]
    frame = FrameSpec(size, tuple(Segment(*row) for row in rows))
    data = path.with_suffix(".safetensors").read_bytes()
    delta = codec.decode_delta(codec.read_chunk(data).frame(0), frame)
    assert delta.positions.tolist() == expected["positions"]
    assert delta.differences.tolist() == expected["differences"]
    assert str(delta.increment) == expected["increment"]
    (stored,) = reference.read_chunk(data).values()
    changes = reference.changes(stored, size, frame.items)
    assert (list(changes), list(changes.values())) == (
        expected["positions"],
        expected["differences"],
    )
    marks = np.frombuffer(stored["planes"]["restart"], "<u4").reshape(3, -1)
    # The first block and the third have no change, and the planes go on in different steps.
    assert marks[:, 1].tolist() == [0, marks[1, 1], marks[1, 1]]
    assert item_bytes == 1 or (marks[1, 2] > 0 and marks[1, 3] > 0)
    assert 255 in stored["planes"]["gap"]


def test_documents_at_their_edges_are_read_and_written_the_same() -> None:
    parsers: dict[str, Any] = {"manifest": Manifest, "version": VersionRecord}
    readers: dict[str, Any] = {
        "manifest": reference_documents.read_manifest,
        "version": reference_documents.read_version,
    }
    found = {}
    for path in sorted((FOLDER / "documents").iterdir()):
        data, kind = path.read_bytes(), path.name.split("-")[0]
        found[path.stem] = readers[kind](data)
        assert parsers[kind].parse(data).data == data
    external, empty, first = found.values()
    assert external["external"]
    assert (external["chunks"], external["cut"]) == ([], None)
    assert "tokenizer/special/map.json" in {file["name"] for file in external["side_files"]}
    assert (empty["from"], empty["chunks"]) == (empty["to"], [])
    assert (first["parent"], len(first["nonce"])) == (None, 64)


def refused(kind: str) -> list[Path]:
    return sorted((FOLDER / "refused").glob(f"{kind}-*"))


GOLDEN_LAYOUT: Final = Layout.parse((FOLDER / "layout.json").read_bytes())
PARSERS: Final[dict[str, Any]] = {
    "layout": (Layout.parse, reference_documents.read_layout),
    "cut": (
        lambda data: Cut.parse(data).check_against(GOLDEN_LAYOUT),
        lambda data: reference_documents.read_cut(data, GOLDEN_LAYOUT.serialize()),
    ),
    "manifest": (Manifest.parse, reference_documents.read_manifest),
    "version": (VersionRecord.parse, reference_documents.read_version),
}


@pytest.mark.parametrize("kind", PARSERS)
def test_the_unbroken_document_is_read(kind: str) -> None:
    for path in FOLDER.glob(f"{kind}*.json"):
        for read in PARSERS[kind]:
            read(path.read_bytes())


@pytest.mark.parametrize(
    "path", [p for kind in PARSERS for p in refused(kind)], ids=lambda p: p.stem
)
def test_a_document_with_one_fault_is_refused(path: Path) -> None:
    parse, read = PARSERS[path.name.split("-")[0]]
    with pytest.raises(PlaitError):
        parse(path.read_bytes())
    with pytest.raises(Refused):
        read(path.read_bytes())


@pytest.mark.parametrize("path", refused("chunk"), ids=lambda path: path.stem)
def test_a_chunk_with_one_fault_is_refused(path: Path) -> None:
    with pytest.raises(PlaitError):
        list(codec.read_chunk(path.read_bytes()).frames)
    with pytest.raises(Refused):
        reference.read_chunk(path.read_bytes())


def test_the_unbroken_frame_is_read() -> None:
    data = (FOLDER / "frames" / "two-items.safetensors").read_bytes()
    delta = codec.decode_delta(codec.read_chunk(data).frame(0), HUNDRED)
    assert (delta.positions.tolist(), delta.differences.tolist()) == ([0, 4], [0xFFFD, 256])
    assert reference.changes(reference.read_chunk(data)[0], 2, 100) == {0: 0xFFFD, 4: 256}


@pytest.mark.parametrize("path", refused("frame"), ids=lambda path: path.stem)
def test_a_frame_with_one_fault_is_refused(path: Path) -> None:
    encoded = codec.read_chunk(path.read_bytes()).frame(0)
    with pytest.raises(PlaitError):
        codec.decode_delta(encoded, HUNDRED)
    (stored,) = reference.read_chunk(path.read_bytes()).values()
    with pytest.raises(Refused):
        reference.changes(stored, 2, 100)
