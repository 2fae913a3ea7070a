"""Chunk files: packed, opened, and refused for every field that may be wrong."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import codec
from plait.codec import Chunk, EncodedFrame, Plane, pack_chunks, read_chunk
from plait.cut import FrameSpec, Segment
from plait.errors import (
    ChunkInvalid,
    DigestMismatch,
    FingerprintMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
    PlaitError,
    SizeMismatch,
    UnsupportedFormat,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec
from plait.limits import CHUNK_BYTES_AIM, CHUNK_BYTES_MAX, CHUNK_HEADER_BYTES_MAX
from plait.manifest import ChunkEntry
from tests.core.chunk_files import put_together, take_apart
from tests.core.strategies import changed_weights, random_weights

FRAMES = (FrameSpec(2, (Segment(0, 400, 0, 1),)), FrameSpec(2, (Segment(400, 500, 0, 1),)))


def one_chunk() -> Chunk:
    layout = Layout.of([TensorSpec("w", "BF16", (900,))])
    old = random_weights(layout, 1)
    new = changed_weights(old, 2, 0.3)
    frames = enumerate(FRAMES)
    (chunk,) = pack_chunks(
        codec.encode_delta(n, frame, codec.detect(frame, old, new)) for n, frame in frames
    )
    return chunk


CHUNK = one_chunk()


def frame_of_size(number: int, size: int) -> EncodedFrame:
    plane = Plane("gap", size, np.random.default_rng(number).bytes(size))
    return EncodedFrame(number, "delta", 1, (plane,), Fingerprint(number, 1))


def test_frames_are_packed_up_to_the_aim_and_never_split() -> None:
    sizes = [CHUNK_BYTES_AIM // 2, CHUNK_BYTES_AIM // 2, 10, 2 * CHUNK_BYTES_AIM, 10]
    frames = [frame_of_size(n, size) for n, size in enumerate(sizes)]
    chunks = list(pack_chunks(frames, slot=3))
    assert [chunk.frames for chunk in chunks] == [(0, 1), (2,), (3,), (4,)]
    assert all(chunk.slot == 3 and chunk.size == len(chunk.data) for chunk in chunks)
    assert sum((chunk.increment for chunk in chunks), ZERO) == Fingerprint(10, 5)
    read = [frame for chunk in chunks for frame in read_chunk(chunk.data, entry=chunk.entry).frames]
    assert read == frames


def test_many_small_frames_keep_the_header_within_its_limit() -> None:
    frames = [frame_of_size(n, 1) for n in range(2500)]
    chunks = list(pack_chunks(frames))
    assert len(chunks) == 2
    for chunk in chunks:
        assert int.from_bytes(chunk.data[:8], "little") < CHUNK_HEADER_BYTES_MAX
        assert tuple(frame.number for frame in read_chunk(chunk.data).frames) == chunk.frames


def test_frames_of_several_slots_fill_a_chunk_of_each() -> None:
    third = CHUNK_BYTES_AIM // 3
    frames = [frame_of_size(number, third) for number in range(9)]
    chunks = list(pack_chunks(frames, slot=[0, 1, 0, 1, 0, 0, 0, 0, 0]))
    assert [(chunk.slot, chunk.frames) for chunk in chunks] == [
        (0, (0, 2, 4)), (0, (5, 6, 7)), (0, (8,)), (1, (1, 3)),
    ]  # fmt: skip


def test_packing_asks_each_frame_for_its_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def stored_size(frame: EncodedFrame) -> int:
        asked.append(frame.number)
        return sum(plane.stored_size for plane in frame.planes)

    monkeypatch.setattr(EncodedFrame, "stored_size", property(stored_size))
    assert len(list(pack_chunks(frame_of_size(number, 1) for number in range(50)))) == 1
    assert asked == list(range(50))


def test_nothing_changed_makes_no_chunk() -> None:
    assert list(pack_chunks([])) == []
    assert list(pack_chunks([EncodedFrame(0, "delta", 0, (), ZERO)])) == []


def test_frames_out_of_order_are_the_callers_mistake() -> None:
    for numbers in ((1, 0), (2, 2)):
        with pytest.raises(UsageError, match="increase"):
            list(pack_chunks(frame_of_size(n, 5) for n in numbers))


def test_any_safetensors_reader_opens_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(CHUNK.data)
    with safetensors.safe_open(path, framework="np") as file:
        directory = json.loads(file.metadata()["plait"])
        assert [row["number"] for row in directory["frames"]] == [0, 1]
        assert set(file.keys()) == {
            f"{row['number']:07d}.{name}"
            for row in directory["frames"]
            for name, *_ in row["planes"]
        }


def test_one_frame_is_read_and_verified_alone() -> None:
    broken = bytearray(CHUNK.data)
    broken[-1] ^= 1
    reader = read_chunk(memoryview(broken).toreadonly())
    assert reader.frame(0) == read_chunk(CHUNK.data).frame(0)
    with pytest.raises(DigestMismatch, match="frame 1"):
        reader.frame(1)
    with pytest.raises(NotFound):
        reader.frame(2)


def entry_with(**fields: Any) -> ChunkEntry:
    return replace(CHUNK.entry, **fields)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (entry_with(size=CHUNK.size + 1), SizeMismatch),
        (entry_with(digest="sha256:" + "0" * 64), DigestMismatch),
        (entry_with(frames=(0,)), ChunkInvalid),
        (entry_with(frames=(0, 1, 2)), ChunkInvalid),
        (entry_with(increment=ZERO), FingerprintMismatch),
    ],
)
def test_a_chunk_other_than_the_manifest_says_is_refused(
    entry: ChunkEntry, error: type[PlaitError]
) -> None:
    with pytest.raises(error):
        read_chunk(CHUNK.data, entry=entry)


def test_a_truncated_or_changed_file_is_refused_by_its_entry() -> None:
    with pytest.raises(SizeMismatch):
        read_chunk(CHUNK.data[:-1], entry=CHUNK.entry)
    for at in (0, 30, len(CHUNK.data) // 2, -1):
        changed = bytearray(CHUNK.data)
        changed[at] ^= 4
        with pytest.raises(DigestMismatch):
            read_chunk(bytes(changed), entry=CHUNK.entry)


# Each changes the header or the directory in place.
Break = Callable[[Any, Any], None]


def in_row(field: str, value: object) -> Break:
    return lambda header, directory: directory["frames"][0].update({field: value})


def in_plane(column: int, value: object) -> Break:
    def change(header: Any, directory: Any) -> None:
        directory["frames"][0]["planes"][0][column] = value

    return change


def in_tensor(field: str, value: object) -> Break:
    def change(header: Any, directory: Any) -> None:
        header[min(key for key in header if key[0] == "0")][field] = value

    return change


def in_directory(field: str, value: object) -> Break:
    return lambda header, directory: directory.update({field: value})


def reorder(header: Any, directory: Any) -> None:
    directory["frames"].reverse()


def forget_tensor(header: Any, directory: Any) -> None:
    del header[max(key for key in header if key[0] == "0")]


BROKEN: dict[str, tuple[Break, type[PlaitError]]] = {
    "negative number": (in_row("number", -1), ChunkInvalid),
    "number beyond the limit": (in_row("number", 1 << 20), FormatError),
    "number of another frame": (in_row("number", 1), ChunkInvalid),
    "number is a float": (in_row("number", 0.5), ChunkInvalid),
    "number is true": (in_row("number", True), ChunkInvalid),
    "count of zero": (in_row("count", 0), ChunkInvalid),
    "count beyond the limit": (in_row("count", (1 << 24) + 1), LimitExceeded),
    "count is a string": (in_row("count", "7"), ChunkInvalid),
    "unknown mode": (in_row("mode", "same"), ChunkInvalid),
    "mode is a list": (in_row("mode", ["delta"]), ChunkInvalid),
    "checksum is a number": (in_row("xxh3", 5), ChunkInvalid),
    "another checksum": (in_row("xxh3", "0" * 16), DigestMismatch),
    "increment too short": (in_row("increment", "00"), ChunkInvalid),
    "increment is null": (in_row("increment", None), ChunkInvalid),
    "no planes": (in_row("planes", []), ChunkInvalid),
    "planes are an object": (in_row("planes", {}), ChunkInvalid),
    "unknown field": (in_row("extra", 1), ChunkInvalid),
    "unknown plane": (in_plane(0, "clasp"), ChunkInvalid),
    "plane name with a path": (in_plane(0, "../class"), ChunkInvalid),
    "plane name is a number": (in_plane(0, 1), ChunkInvalid),
    "raw size below stored size": (in_plane(1, 1), ChunkInvalid),
    "raw size of a float": (in_plane(1, 1000.5), ChunkInvalid),
    "raw size beyond every limit": (in_plane(1, (1 << 53) - 1), ChunkInvalid),
    "stored size of zero": (in_plane(2, 0), ChunkInvalid),
    "negative stored size": (in_plane(2, -5), ChunkInvalid),
    "another stored size": (in_plane(2, 5), ChunkInvalid),
    "frames out of order": (reorder, ChunkInvalid),
    "no frames": (in_directory("frames", []), ChunkInvalid),
    "frames are an object": (in_directory("frames", {}), ChunkInvalid),
    "frame is a list": (in_directory("frames", [[0]]), ChunkInvalid),
    "unknown field of the directory": (in_directory("more", 1), ChunkInvalid),
    "another format": (in_directory("format", "plait-chunk/2"), UnsupportedFormat),
    "an unknown feature": (in_directory("requires", ["classes"]), UnsupportedFormat),
    "requires is a string": (in_directory("requires", "x"), ChunkInvalid),
    "tensor of another dtype": (in_tensor("dtype", "I8"), ChunkInvalid),
    "tensor of another shape": (in_tensor("shape", [1]), ChunkInvalid),
    "tensor somewhere else": (in_tensor("data_offsets", [1, 2]), ChunkInvalid),
    "tensor with more fields": (in_tensor("more", 1), ChunkInvalid),
    "a tensor missing": (forget_tensor, ChunkInvalid),
    "a tensor too many": (lambda h, d: h.update({"other": {}}), ChunkInvalid),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_or_directory_is_refused(name: str) -> None:
    change, error = BROKEN[name]
    header, directory, planes = copy.deepcopy(take_apart(CHUNK.data))
    change(header, directory)
    with pytest.raises(error):
        read_whole(put_together(header, directory, planes))


def read_whole(data: bytes) -> list[tuple[list[int], list[int]]]:
    deltas = []
    for frame in read_chunk(data).frames:
        if frame.number >= len(FRAMES):
            raise ChunkInvalid(f"the cut has no frame {frame.number}")
        delta = codec.decode_delta(frame, FRAMES[frame.number])
        deltas.append((delta.positions.tolist(), delta.differences.tolist()))
    return deltas


HEADER, DIRECTORY, PLANES = take_apart(CHUNK.data)
TEXT = HEADER["__metadata__"]["plait"]
BROKEN_FILES: dict[str, tuple[bytes, type[PlaitError]]] = {
    "empty": (b"", ChunkInvalid),
    "seven bytes": (CHUNK.data[:7], ChunkInvalid),
    "ends within the header": (CHUNK.data[:40], ChunkInvalid),
    "ends within the planes": (CHUNK.data[:-1], ChunkInvalid),
    "bytes after the planes": (CHUNK.data + b"\0", ChunkInvalid),
    "a header larger than any": (b"\xff" * 8 + CHUNK.data[8:], LimitExceeded),
    "a header that isn't JSON": (put_together(b"{", None, PLANES), ChunkInvalid),
    "a header that isn't UTF-8": (put_together(b'{"\xff":1}', None, PLANES), ChunkInvalid),
    "a header of nested lists": (put_together(b"[" * 100_000, None, PLANES), LimitExceeded),
    "a header of one long number": (put_together(b"1" * 9000, None, PLANES), ChunkInvalid),
    "a header that is a list": (put_together([], None, PLANES), ChunkInvalid),
    "a key twice": (
        put_together(json.dumps(HEADER)[:-1].encode() + b',"__metadata__":{}}', None, PLANES),
        ChunkInvalid,
    ),
    "no metadata": (put_together({}, None, PLANES), ChunkInvalid),
    "metadata is a list": (put_together({"__metadata__": []}, None, PLANES), ChunkInvalid),
    "metadata of others": (put_together({"__metadata__": {"a": "b"}}, None, b""), ChunkInvalid),
    "a directory that isn't text": (
        put_together({"__metadata__": {"plait": 1}}, None, b""),
        ChunkInvalid,
    ),
    "a directory not in canonical form": (put_together(HEADER, " " + TEXT, PLANES), ChunkInvalid),
    "a directory that isn't JSON": (put_together(HEADER, TEXT[:-1], PLANES), ChunkInvalid),
    "a directory with a lone surrogate": (put_together(HEADER, "\ud800", PLANES), ChunkInvalid),
    "a directory without frames": (
        put_together(HEADER, {"format": "plait-chunk/1", "requires": []}, PLANES),
        ChunkInvalid,
    ),
    "larger than any chunk": (bytes(CHUNK_BYTES_MAX + 1), LimitExceeded),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_file_that_isn_t_a_chunk_is_refused(name: str) -> None:
    data, error = BROKEN_FILES[name]
    with pytest.raises(error):
        read_whole(data)


def laid_out(rows: list[dict[str, Any]]) -> bytes:
    """A file of these rows, whose planes are zeros, with tensors and checksums that fit."""
    header: dict[str, Any] = {}
    end = 0
    for row in rows:
        size = 0
        for name, _, stored in row["planes"]:
            place = {"dtype": "U8", "shape": [stored], "data_offsets": [end, end + stored]}
            header[f"{row['number']:07d}.{name}"] = place
            end, size = end + stored, size + stored
        row["xxh3"] = xxhash.xxh3_64_hexdigest(bytes(size))
    directory = {"format": "plait-chunk/1", "requires": [], "frames": rows}
    return put_together(header, directory, bytes(end))


def zero_row(number: int, *planes: str) -> dict[str, Any]:
    known = {"mode": "delta", "count": 1, "increment": "0" * 32}
    return known | {"number": number, "planes": [[name, 1, 1] for name in planes]}


def test_frames_are_named_once_and_in_order_whatever_the_tensors() -> None:
    good = laid_out([zero_row(0, "class", "gap"), zero_row(1, "class", "gap")])
    assert len(list(read_chunk(good).frames)) == 2
    for rows in (
        [zero_row(1, "class", "gap"), zero_row(0, "class", "gap")],
        [zero_row(0, "class"), zero_row(0, "gap")],
    ):
        with pytest.raises(ChunkInvalid, match="frame 0 after frame"):
            read_chunk(laid_out(rows))


def test_a_key_of_the_header_is_named_once_though_the_last_one_be_right() -> None:
    raw = json.dumps(HEADER)
    assert list(read_chunk(put_together(raw.encode(), None, PLANES)).frames)
    twice = '{"__metadata__":{"plait":"x"},' + raw[1:]
    with pytest.raises(ChunkInvalid, match="twice"):
        read_chunk(put_together(twice.encode(), None, PLANES))


def test_a_plane_isn_t_stored_in_more_bytes_than_it_has() -> None:
    row = zero_row(0, "class", "gap")
    row["planes"][1] = ["gap", 1, 2]
    with pytest.raises(ChunkInvalid, match="impossible plane"):
        read_chunk(laid_out([row]))


@given(st.data())
@settings(max_examples=300)
def test_a_damaged_file_is_refused_or_decodes_to_the_same(data: st.DataObject) -> None:
    """Without a manifest's digest too; only a claimed increment can change unseen."""
    damaged = bytearray(CHUNK.data)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(damaged)] * 3 + [len(damaged) - 1, 200, 8]))
    try:
        decoded = read_whole(bytes(damaged[:end]))
    except PlaitError:
        return
    assert decoded == read_whole(CHUNK.data)
