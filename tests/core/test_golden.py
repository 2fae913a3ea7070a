"""The golden files of format version 1 keep their meaning for ever."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from plait import codec
from plait.canonical import digest_of
from plait.cut import Cut, FrameSpec, Segment
from plait.fingerprint import Fingerprint, fingerprint_run
from plait.layout import Layout, TensorSpec
from plait.manifest import ChunkEntry, Manifest
from plait.version_record import VersionRecord
from plait.weights import UNSIGNED, ArrayWeights, fingerprint_weights, scatter
from tests.core import reference
from tests.core.strategies import equal_bits

FOLDER: Final = Path(__file__).parent.parent / "golden" / "v1"

# Written out once: a file that changes together with the code would pin nothing.
DIGESTS: Final = {
    "layout.json": "55b0ea256e705c2f0d4bcd2b77d99c464c855717c38f1a729bd26f3652871ee2",
    "cut-anchor.json": "cdbcf6c89555dfa0373079039fa8f607160f2e3b15ef5e20da01c6d97d010a4b",
    "cut-delta.json": "46c2f90df00e87cc758c0ed7128dbec84bba3971521c8b19037dd9108763efcb",
    "manifest-anchor.json": "ef9ce944215d94c620c673ce2790bbdfb67be1ac2d33bfa42ec4fcf5a6cd135d",
    "manifest-delta.json": "57060a0a20f78a073a17970f68d38cc1564be703b07da9c5139a8c277a36af24",
    "version.json": "081bc4730f4390dfc7776e052c9329ba74d3e92ef623ede25e0ccd5af1c128e2",
}

LAYOUT: Final = Layout.parse((FOLDER / "layout.json").read_bytes())


def read_json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def weights(state: str) -> ArrayWeights:
    stored = read_json("weights.json")[state]
    arrays = {
        t.name: np.frombuffer(bytearray.fromhex(stored[t.name]), UNSIGNED[t.item_bytes])
        for t in LAYOUT.tensors
    }
    return ArrayWeights(LAYOUT, arrays)


def chunk_of(entry: ChunkEntry) -> codec.ChunkReader:
    data = {digest_of(p.read_bytes()): p for p in FOLDER.glob("*.safetensors")}
    return codec.read_chunk(data[entry.digest].read_bytes(), entry=entry)


@pytest.mark.parametrize("name", DIGESTS)
def test_documents_keep_their_bytes(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    digest = "sha256:" + DIGESTS[name]
    assert digest_of(data) == digest
    parsers: dict[str, Any] = {"layout": Layout, "cut": Cut, "version": VersionRecord}
    parser = parsers.get(name.split("-")[0].removesuffix(".json"), Manifest)
    parsed = parser.parse(data)
    assert parsed.digest == digest
    assert (parsed.serialize() if hasattr(parsed, "serialize") else parsed.data) == data


def test_cuts_fit_the_layout() -> None:
    anchor = Cut.parse((FOLDER / "cut-anchor.json").read_bytes())
    assert anchor.covers(LAYOUT)
    delta = Cut.parse((FOLDER / "cut-delta.json").read_bytes())
    assert not delta.covers(LAYOUT)


@pytest.mark.parametrize("vector", read_json("fingerprints.json"), ids=lambda v: v["dtype"])
def test_fingerprints_keep_their_values(vector: dict[str, Any]) -> None:
    item_bytes = TensorSpec("x", vector["dtype"], ()).item_bytes
    bits = np.frombuffer(bytes.fromhex(vector["bytes"]), UNSIGNED[item_bytes])
    expected = vector["fingerprint"]
    assert str(fingerprint_run(bits, vector["first_word"])) == expected
    assert reference.fingerprint(bits, vector["first_word"]) == expected


def test_the_fingerprint_of_the_design_is_the_first_vector() -> None:
    first, empty = read_json("fingerprints.json")[:2]
    assert first["fingerprint"] == "2e7bad61eed17858a83c245cd0bc9ba7"
    assert empty["fingerprint"] == "0" * 32


def test_the_anchor_decodes_to_the_old_weights() -> None:
    manifest = Manifest.parse((FOLDER / "manifest-anchor.json").read_bytes())
    cut = Cut.parse((FOLDER / "cut-anchor.json").read_bytes())
    assert (manifest.layout, manifest.cut) == (LAYOUT.digest, cut.digest)
    arrays = {t.name: np.zeros(t.items, UNSIGNED[t.item_bytes]) for t in LAYOUT.tensors}
    held = ArrayWeights(LAYOUT, arrays)
    for entry in manifest.chunks:
        for encoded in chunk_of(entry).frames:
            frame = cut.frames[encoded.number]
            scatter(frame, held, codec.decode_dense(encoded, frame))
    assert equal_bits(held, weights("old"))
    assert fingerprint_weights(held) == manifest.target


def test_the_delta_leads_from_the_old_to_the_new_weights() -> None:
    manifest = Manifest.parse((FOLDER / "manifest-delta.json").read_bytes())
    record = VersionRecord.parse((FOLDER / "version.json").read_bytes())
    cut = Cut.parse((FOLDER / "cut-delta.json").read_bytes())
    held, new = weights("old"), weights("new")
    assert fingerprint_weights(held) == manifest.base
    for entry in manifest.chunks:
        for encoded in chunk_of(entry).frames:
            frame = cut.frames[encoded.number]
            delta = codec.decode_delta(encoded, frame)
            assert codec.increment_on(frame, held, delta) == delta.increment
            codec.apply(frame, held, delta)
    assert equal_bits(held, new)
    assert fingerprint_weights(held) == manifest.target == record.fingerprint


def test_a_frame_with_a_restart_point_decodes_to_its_changes() -> None:
    expected = read_json("large.json")
    item_bytes, rows = expected["frame"]
    frame = FrameSpec(item_bytes, tuple(Segment(*row) for row in rows))
    data = (FOLDER / "chunk-large.safetensors").read_bytes()
    delta = codec.decode_delta(codec.read_chunk(data).frame(0), frame)
    assert delta.positions.tolist() == expected["positions"]
    assert delta.differences.tolist() == expected["differences"]
    assert delta.increment == Fingerprint.parse(expected["increment"])


def test_today_s_encoder_makes_frames_of_the_same_content() -> None:
    manifest = Manifest.parse((FOLDER / "manifest-delta.json").read_bytes())
    cut = Cut.parse((FOLDER / "cut-delta.json").read_bytes())
    old, new = weights("old"), weights("new")
    for entry in manifest.chunks:
        for stored in chunk_of(entry).frames:
            frame = cut.frames[stored.number]
            made = codec.encode_delta(stored.number, frame, codec.detect(frame, old, new))
            assert (made.mode, made.count, made.increment) == (
                stored.mode, stored.count, stored.increment
            )  # fmt: skip
            assert [(p.name, p.raw_size) for p in made.planes] == [
                (p.name, p.raw_size) for p in stored.planes
            ]
