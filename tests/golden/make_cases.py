"""Writes the golden cases of format version 1: `python -m tests.golden.make_cases`.

Beside the first files, which make.py wrote: every dtype, frames of several restart blocks,
documents at the edges of what they may say, and files that a reader must refuse, one fault each.
They are made once too.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import xxhash

from plait import canonical, codec
from plait.cut import FrameSpec, Segment, plain_cut
from plait.fingerprint import Fingerprint
from plait.layout import DTYPE_BITS, Layout, TensorSpec
from plait.manifest import Manifest, SideFile, Statistics
from plait.version_record import VersionRecord
from plait.weights import UNSIGNED, ArrayWeights, fingerprint_weights
from tests.core.chunk_files import put_together, take_apart
from tests.golden.make import FOLDER, bytes_of

BLOCK: Final = 1 << 20
DTYPES: Final = Layout.of(TensorSpec(f"t.{dtype}", dtype, (3, 8)) for dtype in DTYPE_BITS)


def write(name: str, data: bytes) -> None:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_json(name: str, value: object) -> None:
    write(name, (json.dumps(value, indent=1) + "\n").encode())


def write_manifest(name: str, manifest: Manifest, chunks: list[codec.Chunk]) -> None:
    write(f"{name}.json", manifest.data)
    for number, chunk in enumerate(chunks):
        write(f"{name.replace('manifest', 'chunk')}-{number}.safetensors", chunk.data)


def in_hex(weights: ArrayWeights) -> dict[str, str]:
    return {t.name: weights.bits(t.name).tobytes().hex() for t in weights.layout.tensors}


def counted(layout: Layout, changed: int, size: int, chunks: list[codec.Chunk]) -> Statistics:
    stored = sum(chunk.size for chunk in chunks)
    return Statistics(changed, size, layout.total_elements, layout.dense_bytes, stored)


def make_dtypes() -> None:
    """Every dtype in one layout: an anchor, and a delta that changes an item of each."""
    layout = DTYPES
    arrays = {
        t.name: bytes_of(t.nbytes, 100 + i).view(UNSIGNED[t.item_bytes])
        for i, t in enumerate(layout.tensors)
    }
    old = ArrayWeights(layout, arrays)
    new = ArrayWeights(layout, {name: bits.copy() for name, bits in arrays.items()})
    for number, tensor in enumerate(layout.tensors):
        new.bits(tensor.name)[number % tensor.items] += np.array(1 + number, np.uint8)
        new.bits(tensor.name)[-1] ^= np.array(1 << 8 * tensor.item_bytes - 1).astype(
            UNSIGNED[tensor.item_bytes]
        )
    cut = plain_cut(layout, for_anchor=True)
    numbered = list(enumerate(cut.frames))
    dense = list(codec.pack_chunks(codec.encode_dense(n, frame, old) for n, frame in numbered))
    deltas = codec.detect_frames(cut.frames, old, new)
    pairs = zip(numbered, deltas, strict=True)
    chunks = list(codec.pack_chunks(codec.encode_delta(n, f, d) for (n, f), d in pairs))
    anchor = Manifest(
        "anchor", layout.digest, cut.digest, None, fingerprint_weights(old),
        tuple(chunk.entry for chunk in dense),
        counted(layout, layout.total_elements, layout.dense_bytes, dense),
    )  # fmt: skip
    changed = sum(delta.count for delta in deltas)
    size = sum(delta.count * delta.item_bytes for delta in deltas)
    delta = Manifest(
        "delta", layout.digest, cut.digest, fingerprint_weights(old), fingerprint_weights(new),
        tuple(chunk.entry for chunk in chunks), counted(layout, changed, size, chunks),
    )  # fmt: skip
    write("dtypes/layout.json", layout.serialize())
    write("dtypes/cut.json", cut.serialize())
    write_json("dtypes/weights.json", {"old": in_hex(old), "new": in_hex(new)})
    write_manifest("dtypes/manifest-anchor", anchor, dense)
    write_manifest("dtypes/manifest-delta", delta, chunks)


# Four blocks: the first without a change, the third empty, gaps of several skips, and ends of
# blocks on either side.
POSITIONS: Final = (
    *range(BLOCK, BLOCK + 40, 3), BLOCK + 1000, BLOCK + 1255, BLOCK + 1256, 2 * BLOCK - 1,
    3 * BLOCK, 3 * BLOCK + 255, 3 * BLOCK + 256 + 510, 3 * BLOCK + 5000,
)  # fmt: skip
STEPS: Final = (1, 0xFFFF, 2, 0xFFFE, 127, 0xFF80, 128, 0x8000, 0x7FFF, 0xFF7F)


def make_frames() -> None:
    """Frames of several restart blocks, of 1- and of 2-byte items."""
    for item_bytes in (1, 2):
        frame = FrameSpec(item_bytes, (Segment(0, 3 * BLOCK + 5001, 0, 1),))
        steps = [
            STEPS[i % len(STEPS)] & (1 << 8 * item_bytes) - 1 or 1 for i in range(len(POSITIONS))
        ]
        delta = codec.FrameDelta(
            item_bytes, np.array(POSITIONS, np.uint32), np.array(steps, UNSIGNED[item_bytes]),
            Fingerprint(7, item_bytes),
        )  # fmt: skip
        (chunk,) = codec.pack_chunks([codec.encode_delta(0, frame, delta)])
        name = f"frames/blocks-of-{item_bytes}-byte-items"
        write(f"{name}.safetensors", chunk.data)
        document = {
            "frame": [item_bytes, [[0, frame.items, 0, 1]]], "positions": POSITIONS,
            "differences": steps, "increment": str(delta.increment),
        }  # fmt: skip
        write_json(f"{name}.json", document)


def documents() -> dict[str, bytes]:
    """Documents at the edges of what they may say."""
    none = Statistics(0, 0, 10, 20, 0)
    layout, state = "sha256:" + "1" * 64, Fingerprint(1, 2)
    files = tuple(
        SideFile(name, "sha256:" + f"{n:064x}", n)
        for n, name in enumerate(("config.json", "tokenizer/special/map.json", "x/w.safetensors"))
    )
    return {
        "manifest-external": Manifest(
            "anchor", layout, None, None, state, (), none, external=True, side_files=files
        ).data,
        "manifest-no-chunks": Manifest("delta", layout, None, state, state, (), none).data,
        "version-first": VersionRecord("7b", layout, None, state, "unproven", "ü" * 64).data,
    }


def make_documents() -> None:
    for name, data in documents().items():
        write(f"documents/{name}.json", data)


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


# Kind, name, the golden document, and its one fault.
FAULTS: Final[tuple[tuple[str, str, str, Callable[[Any], None]], ...]] = (
    ("layout", "unknown-field", "layout", put(1, "more")),
    ("layout", "unknown-format", "layout", put("plait-layout/2", "format")),
    ("layout", "unknown-dtype", "layout", put("BF8", "tensors", 0, 1)),
    ("layout", "unsorted", "layout", lambda d: d["tensors"].reverse()),
    ("layout", "name-twice", "layout", put("a.embed", "tensors", 1, 0)),
    ("layout", "name-of-metadata", "layout", put("__metadata__", "tensors", 0, 0)),
    ("layout", "shape-of-a-float", "layout", put([1.5], "tensors", 0, 2)),
    ("layout", "negative-shape", "layout", put([-1], "tensors", 0, 2)),
    ("layout", "half-a-byte", "layout", put([3], "tensors", 7, 2)),
    ("cut", "unknown-feature", "cut-delta", put(["x"], "requires")),
    ("cut", "no-requires", "cut-delta", lambda d: d.pop("requires")),
    ("cut", "other-layout", "cut-delta", put("sha256:" + "0" * 64, "layout")),
    ("cut", "word-twice", "cut-delta", lambda d: d["frames"].append(d["frames"][2])),
    ("cut", "other-item-size", "cut-delta", put(2, "frames", 4, 0)),
    ("cut", "item-size-of-three", "cut-delta", put(3, "frames", 4, 0)),
    ("cut", "through-an-item", "cut-delta", put([209, 2, 0, 1], "frames", 4, 1, 0)),
    ("cut", "runs-overlap", "cut-delta", put([[2, [[0, 10, 9, 12]]]], "frames")),
    ("cut", "runs-across-tensors", "cut-delta", put([[2, [[0, 10, 16, 13]]]], "frames")),
    ("cut", "run-of-none", "cut-delta", put(0, "frames", 4, 1, 0, 1)),
    ("cut", "beyond-the-layout", "cut-delta", put([307, 5, 0, 1], "frames", 0, 1, 0)),
    ("cut", "no-segments", "cut-delta", put([], "frames", 4, 1)),
    ("manifest", "sum", "manifest-delta", put("0" * 32, "to")),
    ("manifest", "upper-case", "manifest-delta", lambda d: d.update(to=d["to"].upper())),
    ("manifest", "frame-twice", "manifest-delta", put(1, "chunks", 1, "frames", 0)),
    ("manifest", "slot-order", "manifest-delta", lambda d: _same_slot_backwards(d)),
    ("manifest", "chunk-bytes", "manifest-delta", put(1, "statistics", "chunk_bytes")),
    ("manifest", "delta-from-nothing", "manifest-delta", put(None, "from")),
    ("manifest", "no-cut", "manifest-delta", put(None, "cut")),
    ("manifest", "external-with-chunks", "manifest-anchor", put(True, "external")),
    ("manifest", "side-file-above", "manifest-anchor", put("../x", "side_files", 0, "name")),
    (
        "manifest",
        "side-file-weights",
        "manifest-anchor",
        put("a.safetensors", "side_files", 0, "name"),
    ),
    ("manifest", "side-file-journal", "manifest-anchor", put(".plait", "side_files", 0, "name")),
    ("version", "short-nonce", "version", put("x" * 15, "nonce")),
    ("version", "policy-a-number", "version", put("41", "policy")),
    ("version", "unknown-proof", "version", put("sworn", "proof")),
    ("version", "metadata-a-list", "version", put([], "metadata")),
)


def refused_documents() -> Iterator[tuple[str, bytes]]:
    """Name and bytes; each is a golden document with one fault."""
    for kind, name, base, change in FAULTS:
        document = json.loads((FOLDER / f"{base}.json").read_bytes())
        change(document)
        yield f"{kind}-{name}", canonical.serialize(document)
    layout = (FOLDER / "layout.json").read_bytes()
    yield "layout-space", layout.replace(b",", b", ", 1)
    yield "layout-key-twice", layout.replace(b"{", b'{"format":"plait-layout/1",', 1)
    version = (FOLDER / "version.json").read_bytes()
    yield "version-long-number", version.replace(b"0.000001", b"1e-6")
    yield "version-integer", version.replace(b'"step":2', b'"step":9007199254740992')
    yield "version-escape", version.replace("ö".encode(), b"\\u00f6")


def _same_slot_backwards(document: Any) -> None:
    for chunk in document["chunks"]:
        chunk["slot"] = 0
    document["chunks"].reverse()


def refused_chunks() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of chunks, each with one fault in its header, directory or only frame."""
    file = (FOLDER / "chunk-delta-0.safetensors").read_bytes()
    header, directory, body = take_apart(file)
    yield "chunk-trailing-byte", file + b"\0"
    yield (
        "chunk-xxh3-upper-case",
        put_together(header, _with(directory, xxh3=directory["frames"][0]["xxh3"].upper()), body),
    )
    yield (
        "chunk-frames-backwards",
        put_together(header, directory | {"frames": directory["frames"][::-1]}, body),
    )
    yield "chunk-shape-a-float", put_together(
        {k: v | {"shape": [float(v["shape"][0])]} if k[0] == "0" else v for k, v in header.items()},
        directory, body,
    )  # fmt: skip
    yield "chunk-unknown-mode", put_together(header, _with(directory, mode="sparse"), body)
    yield "chunk-frame-beyond-any", put_together(header, _with(directory, number=1 << 40), body)
    for name, fault in {
        "skip-at-the-end": {"gap": b"\0\3\xff"},
        "gap-beyond-the-frame": {"gap": b"\0\xfe"},
        "class-behind-the-last": {"class": b"\x4e"},
        "small-of-one": {"small": b"\2"},
        "raw-that-is-small": {"raw": b"\x7f\0"},
        "raw-too-many": {"raw": b"\0\1\0\2"},
        "plane-of-other-items": {"byte": b"\1\1"},
    }.items():
        yield f"frame-{name}", two_items(TWO_ITEMS | fault)


# Item 0 by -3, item 4 by 256.
TWO_ITEMS: Final = {"gap": b"\0\3", "class": b"\x0e", "small": b"\5", "raw": b"\0\1"}


def two_items(planes: dict[str, bytes]) -> bytes:
    """A chunk with one frame that changes two of 100 2-byte items, its planes stored raw."""
    names = sorted(planes)
    body = b"".join(planes[name] for name in names)
    row = {
        "number": 0, "mode": "delta", "count": 2, "increment": "0" * 32,
        "planes": [[name, len(planes[name]), len(planes[name])] for name in names],
        "xxh3": xxhash.xxh3_64_hexdigest(body),
    }  # fmt: skip
    header, at = {}, 0
    for name in names:
        end = at + len(planes[name])
        header[f"0000000.{name}"] = {
            "dtype": "U8", "shape": [end - at], "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    return put_together(header, {"format": "plait-chunk/1", "requires": [], "frames": [row]}, body)


def _with(directory: dict[str, Any], **fields: Any) -> dict[str, Any]:
    first, *others = directory["frames"]
    return directory | {"frames": [first | fields, *others]}


def make_refused() -> None:
    for name, data in refused_documents():
        write(f"refused/{name}.json", data)
    for name, data in refused_chunks():
        write(f"refused/{name}.safetensors", data)
    write("frames/two-items.safetensors", two_items(TWO_ITEMS))


def main() -> None:
    make_dtypes()
    make_frames()
    make_documents()
    make_refused()


if __name__ == "__main__":
    main()
