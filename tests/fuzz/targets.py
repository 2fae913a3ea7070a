"""What is fuzzed. A target takes any bytes, and raises unless plait does one of two things with
what it makes of them: refuse it with a typed error, or give the result that is true.
"""

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import xxhash
import zstandard

from plait import canonical, codec
from plait.codec import ChunkReader, EncodedFrame, Plane
from plait.codec.planes import unpack_plane
from plait.cut import Cut, FrameSpec
from plait.errors import PlaitError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run
from plait.layout import Layout
from plait.manifest import ChunkEntry, Manifest, Statistics
from plait.squash import Direction, Squash, Step
from plait.version_record import VersionRecord
from plait.weights import fingerprint_items, gather, pieces, scatter
from plait.wire import PlanDocument
from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_client.transport import parsed
from tests.core import reference, reference_documents
from tests.core.reference_documents import Refused
from tests.fuzz.material import (
    CUTS,
    FILES,
    LAYOUT,
    MANIFESTS,
    Source,
    fresh_frame,
    mutate_bytes,
    mutate_json,
    text_of,
    weights,
)
from tests.fuzz.partitions import partitions
from tests.fuzz.sweeps import sweeps
from tests.fuzz.torch_bridge import torch_bridge

_PARSERS: Final[Mapping[str, Any]] = {
    "layout.json": Layout,
    "cut-delta.json": Cut,
    "cut-anchor.json": Cut,
    "manifest-delta.json": Manifest,
    "manifest-anchor.json": Manifest,
    "version.json": VersionRecord,
}
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - syncing a file there costs nothing
_CHUNKS: Final = {name: data for name, data in FILES.items() if name.endswith(".safetensors")}


def documents(data: bytes) -> None:
    """Documents whose parts were changed, written in canonical form again."""
    source = Source(data)
    name: str = source.pick(sorted(_PARSERS))
    _parse(name, text_of(mutate_json(source, json.loads(FILES[name]))))


def document_bytes(data: bytes) -> None:
    """Documents whose bytes were changed."""
    source = Source(data)
    name: str = source.pick(sorted(_PARSERS))
    _parse(name, source.rest() if source.chance(4) else mutate_bytes(source, FILES[name]))


def _parse(name: str, text: bytes) -> None:
    try:
        found = _PARSERS[name].parse(text)
    except PlaitError:
        return
    again = found.serialize() if hasattr(found, "serialize") else found.data
    assert again == text, f"{name}: what was read is written otherwise"
    assert found.digest == canonical.digest_of(text)
    if isinstance(found, Layout):
        _use_layout(found)
    elif isinstance(found, Cut):
        _use_cut(found)
    elif isinstance(found, Manifest) and not found.external:
        total = sum((entry.increment for entry in found.chunks), found.base or ZERO)
        assert total == found.target


def _use_layout(layout: Layout) -> None:
    assert layout.total_words == sum(tensor.words for tensor in layout.tensors)
    assert layout.starts[-1] < 1 << 48 or layout.total_words == 1 << 48


def _use_cut(cut: Cut) -> None:
    try:
        covers = cut.covers(LAYOUT)
    except PlaitError:
        return
    rows = cut.to_document()["frames"]
    words = [
        word for size, segments in rows for word in reference_documents.words_of(size, segments)
    ]
    spans = [
        max(size // 2, 1) for size, segments in rows for s in segments for _ in range(s[1] * s[3])
    ]
    held = {word + k for word, span in zip(words, spans, strict=True) for k in range(span)}
    assert len(held) == sum(spans), "a word occurs twice"
    assert covers == (len(held) == LAYOUT.total_words)
    state = weights("old")
    for frame, (size, segments) in zip(cut.frames, rows, strict=True):
        everywhere = np.arange(frame.items, dtype=np.uint32)
        assert frame.words_of(everywhere).tolist() == reference_documents.words_of(size, segments)
        assert sum(piece.items for piece in pieces(frame, LAYOUT)) == frame.items
        gather(frame, state)


def frames(data: bytes) -> None:
    """Frames of changed planes, counts and sizes, stored raw or through zstd."""
    source = Source(data)
    if source.chance(4):
        frame = source.pick(CUTS["anchor"].frames)
        encoded = codec.encode_dense(source.below(9), frame, weights("old"))
    else:
        frame, positions, differences = fresh_frame(source)
        delta = codec.FrameDelta(frame.item_bytes, positions, differences, Fingerprint(3, 4))
        encoded = codec.encode_delta(source.below(9), frame, delta)
    try:
        changed = _changed_frame(source, encoded)
        if changed.mode == "dense":
            _check_dense(changed, frame)
        else:
            _check_delta(changed, frame)
    except PlaitError:
        return


def _changed_frame(source: Source, encoded: EncodedFrame) -> EncodedFrame:
    planes = {p.name: unpack_plane(p).tobytes() for p in encoded.planes}
    names = sorted({*planes, "restart", "raw", "small", "gap", "byte0"})
    for _ in range(source.below(3)):
        name = source.pick(names)
        planes[name] = mutate_bytes(source, planes.get(name, b""), planes.get("gap", b""))
    if source.chance(5) and "restart" in planes and len(planes["restart"]) >= 4:
        at = 4 * source.below(len(planes["restart"]) // 4)
        changed = bytearray(planes["restart"])
        changed[at : at + 4] = struct.pack("<I", source.number() & 0xFFFFFFFF)
        planes["restart"] = bytes(changed)
    count = encoded.count + source.byte() - 128 if source.chance(4) else encoded.count
    mode = source.pick(("delta", "wide", "dense")) if source.chance(6) else encoded.mode
    kept = tuple(_stored(source, name, planes[name]) for name in sorted(planes) if planes[name])
    return EncodedFrame(encoded.number, mode, count, kept, encoded.increment)


def _stored(source: Source, name: str, raw: bytes) -> Plane:
    packed = raw
    if source.chance(3):
        packed = zstandard.ZstdCompressor(write_content_size=not source.chance(8)).compress(raw)
        packed = mutate_bytes(source, packed, raw) if source.chance(4) else packed
    if not 0 < len(packed) < len(raw):
        packed = raw
    return Plane(name, len(raw) + (source.byte() - 128 if source.chance(8) else 0), packed)


def _check_delta(encoded: EncodedFrame, frame: FrameSpec) -> None:
    """Decodes; then the reference must find the same, and encoding it again the same planes."""
    delta = codec.decode_delta(encoded, frame)
    raw = {p.name: unpack_plane(p).tobytes() for p in encoded.planes}
    row = {"mode": encoded.mode, "count": encoded.count, "planes": raw}
    truth = reference.changes(row, frame.item_bytes, frame.items)
    found = dict(zip(delta.positions.tolist(), delta.differences.tolist(), strict=True))
    assert found == truth, "decoded otherwise than the format says"
    again = codec.encode_delta(encoded.number, frame, delta)
    assert {p.name: unpack_plane(p).tobytes() for p in again.planes} == raw
    assert delta.increment == encoded.increment


def _check_dense(encoded: EncodedFrame, frame: FrameSpec) -> None:
    items = codec.decode_dense(encoded, frame)
    raw = {p.name: unpack_plane(p).tobytes() for p in encoded.planes}
    row = {"count": encoded.count, "planes": raw}
    assert items.tolist() == reference.dense_items(row, frame.item_bytes)
    assert fingerprint_items(frame, items) == encoded.increment


def planes(data: bytes) -> None:
    """A plane's stored bytes, with any claim about its size."""
    source = Source(data)
    raw = bytes(source.below(256)) + source.take(source.byte())
    stored = zstandard.ZstdCompressor(write_content_size=not source.chance(4)).compress(raw)
    stored = source.rest() if source.chance(4) else mutate_bytes(source, stored, raw)
    claimed = len(raw) if not source.chance(4) else source.number()
    try:
        plane = Plane("gap", claimed, stored)
        found = unpack_plane(plane).tobytes()
    except PlaitError:
        return
    assert len(found) == claimed
    if len(stored) == claimed:
        assert found == stored
    else:
        assert found == zstandard.ZstdDecompressor().decompressobj().decompress(stored)


def chunks(data: bytes) -> None:
    """Chunk files with a changed directory and planes, and with checksums that fit again."""
    source = Source(data)
    name: str = source.pick(sorted(_CHUNKS))
    file = _changed_chunk(source, _CHUNKS[name])
    kind = "anchor" if "anchor" in name else "delta"
    _read(source, file, kind)


def chunk_bytes(data: bytes) -> None:
    """Chunk files whose bytes were changed."""
    source = Source(data)
    name: str = source.pick(sorted(_CHUNKS))
    file = mutate_bytes(source, _CHUNKS[name], source.pick(sorted(_CHUNKS.values())))
    _read(source, file if not source.chance(8) else source.rest(), "delta")


def _changed_chunk(source: Source, file: bytes) -> bytes:
    length = int.from_bytes(file[:8], "little")
    header, body = json.loads(file[8 : 8 + length]), file[8 + length :]
    directory = json.loads(header["__metadata__"]["plait"])
    body = mutate_bytes(source, body) if source.chance(2) else body
    directory = mutate_json(source, directory) if source.chance(2) else directory
    if not source.chance(6):
        _fix_sums(directory, body)
    text = text_of(directory).decode()
    if not source.chance(6):
        header = _header_of(directory) or header
    header["__metadata__"] = {"plait": text}
    header = mutate_json(source, header) if source.chance(6) else header
    encoded = json.dumps(header).encode()
    length = len(encoded) if not source.chance(8) else source.number() & 0xFFFFFFFFFFFFFFFF
    return length.to_bytes(8, "little") + encoded + body


def _fix_sums(directory: Any, body: bytes) -> None:
    """The xxh3 of every frame, as far as its row still makes sense."""
    at = 0
    try:
        for row in directory["frames"]:
            end = at + sum(size for _, _, size in row["planes"])
            row["xxh3"] = xxhash.xxh3_64_hexdigest(body[at:end])
            at = end
    except (TypeError, KeyError, ValueError):
        return


def _header_of(directory: Any) -> dict[str, Any] | None:
    """The tensors that the directory names, one behind the other."""
    tensors: dict[str, Any] = {}
    at = 0
    try:
        for row in directory["frames"]:
            for name, _, size in row["planes"]:
                tensors[f"{row['number']:07d}.{name}"] = {
                    "dtype": "U8", "shape": [size], "data_offsets": [at, at + size],
                }  # fmt: skip
                at += size
    except (TypeError, KeyError, ValueError):
        return None
    return tensors


def _read(source: Source, file: bytes, kind: str) -> None:
    try:
        reader = codec.read_chunk(file)
    except PlaitError:
        return
    try:
        truth = reference.read_chunk_rows(file)
    except Refused:
        assert _refused_frame(reader), "opened and read, though the format forbids it"
        return
    assert [row["number"] for row in truth] == list(reader.numbers)
    entry = ChunkEntry(
        canonical.digest_of(file), len(file), 0, reader.numbers, reader.increment
    )  # fmt: skip
    assert codec.read_chunk(file, entry=entry).numbers == reader.numbers
    for number in reader.numbers:
        _use_frame(reader, number, CUTS[kind])


def _refused_frame(reader: ChunkReader) -> bool:
    try:
        list(reader.frames)
    except PlaitError:
        return True
    return False


def _use_frame(reader: ChunkReader, number: int, cut: Cut) -> None:
    if number >= len(cut.frames):
        return
    frame = cut.frames[number]
    live = weights("old")
    try:
        encoded = reader.frame(number)
        if encoded.mode == "dense":
            _check_dense(encoded, frame)
            scatter(frame, live, codec.decode_dense(encoded, frame))
            return
        _check_delta(encoded, frame)
    except PlaitError:
        return
    delta = codec.decode_delta(encoded, frame)
    _apply(frame, delta)


def _apply(frame: FrameSpec, delta: codec.FrameDelta) -> None:
    """There and back, against the bits that the differences say."""
    old, live = weights("old"), weights("old")
    before = gather(frame, old)
    expected = before.copy()
    expected[delta.positions] += delta.differences
    increment = codec.increment_on(frame, live, delta)
    assert increment == fingerprint_items(frame, expected) - fingerprint_items(frame, before)
    codec.apply(frame, live, delta)
    assert (gather(frame, live) == expected).all()
    codec.apply(frame, live, codec.negate(delta))
    for tensor in LAYOUT.tensors:
        assert (live.bits(tensor.name) == old.bits(tensor.name)).all(), "wrote beside the frame"
    fingerprint_run(expected, 0)


def squashes(data: bytes) -> None:
    """Fresh deltas of one frame, added up through chunks and a manifest: forward, some back."""
    source = Source(data)
    frame, positions, differences = fresh_frame(source)
    cut = Cut("sha256:" + "0" * 64, (frame,))
    expected = np.zeros(frame.items, differences.dtype)
    steps: list[Step] = []
    reached, readers = Fingerprint(1, 2), dict[str, ChunkReader]()
    for number in range(1 + source.below(4)):
        kept = positions[source.below(2) :: 1 + source.below(3)]
        change = differences[: kept.size]
        if not kept.size:
            continue
        increment = Fingerprint(number, source.byte())
        back = source.chance(3)
        delta = codec.FrameDelta(frame.item_bytes, kept, change, increment)
        expected[kept] += -change if back else change
        (chunk,) = codec.pack_chunks([codec.encode_delta(0, frame, delta)])
        after = reached - increment if back else reached + increment
        ends = (after, reached) if back else (reached, after)
        sizes = Statistics(0, 0, 0, 0, chunk.size)
        manifest = Manifest("delta", cut.layout_digest, cut.digest, *ends, (chunk.entry,), sizes)
        readers[chunk.digest] = codec.read_chunk(chunk.data, entry=chunk.entry)
        direction: Direction = "reverse" if back else "forward"
        steps.append(Step(manifest, cut, lambda entry: readers[entry.digest], direction))
        reached = after
    if not steps:
        return
    total = Squash(steps)
    held = np.zeros_like(expected)
    for chunk in total.chunks():
        sum_of = codec.decode_delta(codec.read_chunk(chunk.data, entry=chunk.entry).frame(0), frame)
        held[sum_of.positions] = sum_of.differences
    assert (held == expected).all()
    if not expected.any() and reached != Fingerprint(1, 2):
        return  # made-up increments of steps that cancel: the manifest is rightly refused
    assert total.manifest().target == reached


class _Shelf:
    """A registry of golden documents and chunks: what a fetch asks of it."""

    def __init__(self, source: Source) -> None:
        self.held = {canonical.digest_of(data): data for data in FILES.values()}
        self.held[canonical.digest_of(b"{}")] = b"{}"
        if source.chance(2):
            digest = source.pick(sorted(self.held))
            self.held[digest] = mutate_bytes(source, self.held[digest])

    def answer(self, request: httpx.Request) -> httpx.Response:
        digest = request.url.path.rsplit("/", 1)[-1]
        if digest not in self.held:
            return httpx.Response(404, json={})
        return httpx.Response(200, content=self.held[digest])


def plan_document(kind: str) -> dict[str, Any]:
    """A plan of one step, as the registry would write it."""
    manifest = MANIFESTS[kind]
    chunks = [{"digest": e.digest, "size": e.size, "key": "k"} for e in manifest.chunks]
    step = {
        "kind": "anchor" if kind == "anchor" else "forward",
        "manifest_digest": manifest.digest, "layout_digest": manifest.layout,
        "cut_digest": manifest.cut, "base": None if manifest.base is None else str(manifest.base),
        "target": str(manifest.target), "to_seq": 2, "chunks": chunks, "side_files": [],
        "bytes": manifest.chunk_bytes,
    }  # fmt: skip
    return {
        "policy": "golden", "seq": 2, "version_digest": "sha256:" + "1" * 64,
        "layout_digest": manifest.layout, "fingerprint": str(manifest.target), "channel": None,
        "generation": None, "epoch": "e", "steps": [step], "total_bytes": 9,
    }  # fmt: skip


def plans(data: bytes) -> None:
    """A registry's answers: a changed plan, and a document or chunk that isn't what it was."""
    source = Source(data)
    kind: str = source.pick(("delta", "anchor"))
    document = mutate_json(source, plan_document(kind))
    try:
        text = json.dumps(document).encode()
    except (TypeError, ValueError):
        return
    text = mutate_bytes(source, text) if source.chance(4) else text
    _SHELVES[:] = [_Shelf(source)]
    response = httpx.Response(200, content=text, request=httpx.Request("GET", "http://registry"))
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        fetcher = Fetcher(_registry(), ChunkCache(Path(folder)), workers=1)
        try:
            for step in parsed(PlanDocument, response).steps:
                fetched = fetcher.fetch_step(step)
                for entry in fetched.manifest.chunks:
                    assert fetched.open(entry).numbers == entry.frames
                    assert canonical.digest_of(_CHUNK_OF[entry.digest]) == entry.digest
        except PlaitError:
            return


_SHELVES: Final[list[_Shelf]] = []


@cache
def _registry() -> RegistryClient:
    """One for all inputs: it takes longer to make than to ask."""
    transport = httpx.MockTransport(lambda request: _SHELVES[0].answer(request))
    return RegistryClient("http://registry", transport=transport)


_CHUNK_OF: Final = {canonical.digest_of(data): data for data in _CHUNKS.values()}

TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "chunk_bytes": chunk_bytes,
    "chunks": chunks,
    "document_bytes": document_bytes,
    "documents": documents,
    "frames": frames,
    "partitions": partitions,
    "planes": planes,
    "plans": plans,
    "squashes": squashes,
    "sweeps": sweeps,
    "torch_bridge": torch_bridge,
}
