"""Writes the golden files of format version 1: `python -m tests.golden.make`.

They are made once. A change of what the tests read from them is a change of the format, and needs
new files beside the old ones. Chunks are pinned by what they decode to, not by a compressor's
output, so making them again with another zstd may change their bytes.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait import codec
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.fingerprint import Fingerprint, fingerprint_run
from plait.layout import Layout, TensorSpec
from plait.manifest import Manifest, SideFile, Statistics
from plait.version_record import VersionRecord
from plait.weights import UNSIGNED, ArrayWeights, fingerprint_weights

FOLDER: Final = Path(__file__).parent / "v1"

LAYOUT: Final = Layout.of(
    [
        TensorSpec("a.embed", "BF16", (12, 16)),
        TensorSpec("b.norm", "BF16", (16,)),
        TensorSpec("c.bias", "F32", (5,)),
        TensorSpec("d.empty", "BF16", (0, 4)),
        TensorSpec("e.scale", "BF16", ()),
        TensorSpec("f.experts", "F8_E4M3", (3, 20)),
        TensorSpec("g.count", "F64", (3,)),
        TensorSpec("h.packed", "F4", (2, 8)),
        TensorSpec("i.phase", "C64", (2,)),
        TensorSpec("ü.last", "F16", (2, 2)),
    ]
)

LARGE_ITEMS: Final = (1 << 20) + (1 << 19)


def bytes_of(count: int, seed: int) -> NDArray[np.uint8]:
    """A Lehmer generator's bytes: the same in every release of numpy."""
    state, data = seed, bytearray()
    for _ in range(count):
        state = state * 48271 % 0x7FFFFFFF
        data.append(state >> 8 & 0xFF)
    return np.frombuffer(bytes(data), np.uint8).copy()


def weights_of(seed: int) -> ArrayWeights:
    tensors = enumerate(LAYOUT.tensors)
    return ArrayWeights(
        LAYOUT,
        {t.name: bytes_of(t.nbytes, seed + i).view(UNSIGNED[t.item_bytes]) for i, t in tensors},
    )


def next_weights(old: ArrayWeights) -> ArrayWeights:
    """Every class of difference, NaN payloads, -0.0, and tensors that don't change at all."""
    arrays = {t.name: old.bits(t.name).copy() for t in LAYOUT.tensors}
    steps = np.array([1, 0xFFFF, 2, 0xFFFE, 127, 0xFF80, 128, 0x8000, 1, 1], np.uint16)
    arrays["a.embed"][: 19 * steps.size : 19] += steps
    arrays["b.norm"][:6] = [0x7FC1, 0x7F81, 0xFFC0, 0x8000, 0x0001, 0xFF80]
    arrays["c.bias"][[0, 4]] = [0x7F800001, 0x80000000]
    arrays["e.scale"][0] += 1
    arrays["f.experts"][[0, 19, 59]] += np.array([1, 255, 128], np.uint8)
    arrays["g.count"][1] ^= 1 << 63
    arrays["ü.last"][3] = 0
    return ArrayWeights(LAYOUT, arrays)


def grain_cut() -> Cut:
    """Columns of the embedding in two frames, one of which also holds the last tensor."""
    start = LAYOUT.start_of("ü.last")
    return Cut(
        LAYOUT.digest,
        (
            FrameSpec(2, (Segment(start, 4, 0, 1), Segment(0, 10, 16, 12))),
            FrameSpec(2, (Segment(10, 6, 16, 12), Segment(12 * 16, 16, 0, 1))),
            FrameSpec(2, (Segment(LAYOUT.start_of("e.scale"), 1, 0, 1),)),
            FrameSpec(1, (Segment(LAYOUT.start_of("f.experts"), 60, 0, 1),)),
            FrameSpec(4, (Segment(LAYOUT.start_of("c.bias"), 5, 0, 1),)),
            FrameSpec(8, (Segment(LAYOUT.start_of("g.count"), 3, 0, 1),)),
        ),
    )


def statistics(changed: int, changed_bytes: int, chunks: list[codec.Chunk]) -> Statistics:
    size = sum(chunk.size for chunk in chunks)
    return Statistics(changed, changed_bytes, LAYOUT.total_elements, LAYOUT.dense_bytes, size)


def make_anchor(old: ArrayWeights) -> tuple[Manifest, list[codec.Chunk]]:
    cut = plain_cut(LAYOUT, for_anchor=True)
    frames = (codec.encode_dense(n, frame, old) for n, frame in enumerate(cut.frames))
    chunks = list(codec.pack_chunks(frames))
    side_file = SideFile("config.json", "sha256:" + "c" * 64, 2)
    manifest = Manifest(
        "anchor", LAYOUT.digest, cut.digest, None, fingerprint_weights(old),
        tuple(chunk.entry for chunk in chunks),
        statistics(LAYOUT.total_elements, LAYOUT.dense_bytes, chunks),
        side_files=(side_file,),
    )  # fmt: skip
    return manifest, chunks


def make_delta(old: ArrayWeights, new: ArrayWeights) -> tuple[Manifest, list[codec.Chunk]]:
    cut = grain_cut()
    deltas = [codec.detect(frame, old, new) for frame in cut.frames]
    numbered = enumerate(zip(cut.frames, deltas, strict=True))
    frames = [codec.encode_delta(n, frame, delta) for n, (frame, delta) in numbered]
    chunks = [*codec.pack_chunks(frames[:2]), *codec.pack_chunks(frames[2:], slot=1)]
    changed = sum(delta.count for delta in deltas)
    changed_bytes = sum(delta.count * delta.item_bytes for delta in deltas)
    manifest = Manifest(
        "delta", LAYOUT.digest, cut.digest, fingerprint_weights(old), fingerprint_weights(new),
        tuple(chunk.entry for chunk in chunks), statistics(changed, changed_bytes, chunks),
    )  # fmt: skip
    return manifest, chunks


def make_large() -> tuple[dict[str, Any], codec.Chunk]:
    """A frame with a restart point: a delta on its own, without weights."""
    steps = bytes_of(3000, 77).astype(np.int64) * bytes_of(3000, 78)
    positions = np.unique(np.cumsum(steps))
    positions = positions[positions < LARGE_ITEMS].astype(np.uint32)
    pick = bytes_of(positions.size, 79)
    other = bytes_of(2 * positions.size, 80).view(np.uint16)
    differences = np.where(pick < 230, 1 + (pick & 1) * np.uint16(0xFFFE), np.maximum(other, 1))
    frame = FrameSpec(2, (Segment(0, LARGE_ITEMS, 0, 1),))
    delta = codec.FrameDelta(2, positions, differences.astype(np.uint16), Fingerprint(5, 6))
    (chunk,) = codec.pack_chunks([codec.encode_delta(0, frame, delta)])
    document = {
        "frame": [2, [[0, LARGE_ITEMS, 0, 1]]],
        "positions": positions.tolist(),
        "differences": delta.differences.tolist(),
        "increment": str(delta.increment),
    }
    return document, chunk


def make_vectors() -> list[dict[str, Any]]:
    vectors = [("BF16", 0, "01000200"), ("BF16", 0, ""), ("U8", 0, "00"), ("BF16", 0, "0000")]
    data = bytes_of(64, 9).tobytes().hex()
    vectors += [(dtype, 3 << 20, data) for dtype in ("F8_E5M2", "F16", "F32", "C64")]
    vectors += [("F64", (1 << 48) - 4, "ffffffffffffffff")]
    return [
        {
            "dtype": dtype,
            "first_word": word,
            "bytes": text,
            "fingerprint": str(fingerprint_run(_bits(dtype, text), word)),
        }
        for dtype, word, text in vectors
    ]


def _bits(dtype: str, text: str) -> NDArray[Any]:
    item_bytes = TensorSpec("x", dtype, ()).item_bytes
    return np.frombuffer(bytes.fromhex(text), UNSIGNED[item_bytes])


def in_hex(weights: ArrayWeights) -> dict[str, str]:
    return {t.name: weights.bits(t.name).tobytes().hex() for t in LAYOUT.tensors}


def write_json(name: str, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    old = weights_of(1)
    new = next_weights(old)
    write_json("weights.json", {"old": in_hex(old), "new": in_hex(new)})
    write_json("fingerprints.json", make_vectors())
    (FOLDER / "layout.json").write_bytes(LAYOUT.serialize())
    (FOLDER / "cut-anchor.json").write_bytes(plain_cut(LAYOUT, for_anchor=True).serialize())
    (FOLDER / "cut-delta.json").write_bytes(grain_cut().serialize())
    for name, (manifest, chunks) in {
        "anchor": make_anchor(old),
        "delta": make_delta(old, new),
    }.items():
        (FOLDER / f"manifest-{name}.json").write_bytes(manifest.data)
        for number, chunk in enumerate(chunks):
            (FOLDER / f"chunk-{name}-{number}.safetensors").write_bytes(chunk.data)
    record = VersionRecord(
        "golden", LAYOUT.digest, "sha256:" + "0" * 63 + "1", fingerprint_weights(new), "full",
        "0123456789abcdef", {"step": 2, "learning_rate": 1e-6, "message": "größer"},
    )  # fmt: skip
    (FOLDER / "version.json").write_bytes(record.data)
    document, chunk = make_large()
    write_json("large.json", document)
    (FOLDER / "chunk-large.safetensors").write_bytes(chunk.data)


if __name__ == "__main__":
    main()
