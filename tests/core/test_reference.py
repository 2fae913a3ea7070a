"""The second reader, from documents alone: golden files and fresh ones, forward and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical, codec
from plait.cut import Cut
from plait.fingerprint import ZERO
from plait.layout import Layout
from plait.manifest import Kind, Manifest, Statistics
from plait.version_record import VersionRecord
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core import reference, reference_documents
from tests.core.reference import Words, apply_manifest, state_of
from tests.core.reference_documents import Refused, digest_of
from tests.core.strategies import (
    changed_weights,
    covering_cuts,
    densities,
    layouts,
    random_weights,
    seeds,
)

FOLDER: Final = Path(__file__).parent.parent / "golden" / "v1"
GOLDEN: Final = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
LAYOUT: Final = GOLDEN["layout.json"]
CHUNKS: Final = {digest_of(data): data for data in GOLDEN.values()}


def golden_state(name: str) -> Words:
    stored = json.loads(GOLDEN["weights.json"])[name]
    return state_of(LAYOUT, {tensor: bytes.fromhex(text) for tensor, text in stored.items()})


def golden_step(kind: str, state: Words, *, back: bool = False) -> Words:
    manifest = reference_documents.read_manifest(GOLDEN[f"manifest-{kind}.json"])
    return apply_manifest(state, manifest, LAYOUT, GOLDEN[f"cut-{kind}.json"], CHUNKS, back=back)


def test_it_reads_the_golden_anchor() -> None:
    state = golden_step("anchor", np.zeros_like(golden_state("old")))
    assert state.tolist() == golden_state("old").tolist()


def test_it_follows_the_golden_delta_to_the_version_and_back() -> None:
    new = golden_step("delta", golden_state("old"))
    assert new.tolist() == golden_state("new").tolist()
    record = reference_documents.read_version(GOLDEN["version.json"])
    assert record["fingerprint"] == reference.fingerprint(new)
    assert record["layout"] == digest_of(LAYOUT)
    assert golden_step("delta", new, back=True).tolist() == golden_state("old").tolist()
    for state, back in ((new, False), (golden_state("old"), True)):
        with pytest.raises(Refused, match="other weights"):
            golden_step("delta", state, back=back)


def test_it_reads_the_golden_frame_with_a_restart_point() -> None:
    expected = json.loads(GOLDEN["large.json"])
    item_bytes, segments = expected["frame"]
    (frame,) = reference.read_chunk(GOLDEN["chunk-large.safetensors"]).values()
    found = reference.changes(frame, item_bytes, sum(run * n for _, run, _, n in segments))
    assert found == dict(zip(expected["positions"], expected["differences"], strict=True))
    assert frame["increment"] == expected["increment"]


def manifest_of(
    kind: Kind, cut: Cut, old: ArrayWeights, new: ArrayWeights, chunks: list[codec.Chunk]
) -> Manifest:
    layout = new.layout
    changed = 0 if kind == "delta" else layout.total_elements
    counts = Statistics(
        changed, changed, layout.total_elements, layout.dense_bytes, sum(c.size for c in chunks)
    )
    base = fingerprint_weights(old) if kind == "delta" else None
    target = fingerprint_weights(new)
    entries = tuple(chunk.entry for chunk in chunks)
    return Manifest(kind, layout.digest, cut.digest, base, target, entries, counts)


def bits_of(weights: ArrayWeights) -> Words:
    data = {t.name: weights.bits(t.name).tobytes() for t in weights.layout.tensors}
    return state_of(weights.layout.serialize(), data)


def read(
    manifest: Manifest, cut: Cut, layout: Layout, chunks: list[codec.Chunk], state: Words,
    *, back: bool = False,
) -> Words:  # fmt: skip
    known = reference_documents.read_manifest(manifest.data)
    files = {chunk.digest: chunk.data for chunk in chunks}
    return apply_manifest(state, known, layout.serialize(), cut.serialize(), files, back=back)


@given(st.data(), layouts(), seeds, densities)
def test_it_reads_fresh_documents_and_chunks_of_every_mode(
    data: st.DataObject, layout: Layout, seed: int, density: float
) -> None:
    cut = data.draw(covering_cuts(layout))
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, density)
    before, after = bits_of(old), bits_of(new)
    assert reference.fingerprint(after) == str(fingerprint_weights(new))
    numbered = list(enumerate(cut.frames))
    dense = list(codec.pack_chunks(codec.encode_dense(n, f, old) for n, f in numbered))
    anchor = manifest_of("anchor", cut, old, old, dense)
    assert read(anchor, cut, layout, dense, after).tolist() == before.tolist()
    deltas = codec.detect_frames(cut.frames, old, new)
    encoded = (codec.encode_delta(n, f, d) for (n, f), d in zip(numbered, deltas, strict=True))
    chunks = list(codec.pack_chunks(encoded))
    delta = manifest_of("delta", cut, old, new, chunks)
    assert read(delta, cut, layout, chunks, before).tolist() == after.tolist()
    assert read(delta, cut, layout, chunks, after, back=True).tolist() == before.tolist()


numbers = st.one_of(
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False).filter(
        lambda x: abs(x) < 2**53 or abs(x) >= 1e21
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_it_writes_the_same_canonical_text(metadata: Mapping[str, object]) -> None:
    known = {"policy": "p", "layout": "sha256:" + "0" * 64, "parent": None, "nonce": "0" * 64}
    record = VersionRecord(**known, fingerprint=ZERO, proof="full", metadata=metadata)  # type: ignore[arg-type]
    assert reference_documents.read_version(record.data)["metadata"] == json.loads(
        canonical.serialize(metadata)
    )
