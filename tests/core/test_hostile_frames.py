"""Frames that no encoder makes: each is refused, with a typed error, and nothing crashes."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.codec import (
    EncodedFrame,
    FrameDelta,
    Plane,
    apply,
    decode_delta,
    decode_dense,
    encode_delta,
    encode_dense,
    increment_on,
)
from plait.codec.planes import unpack_plane
from plait.cut import FrameSpec, Segment
from plait.errors import (
    ChunkInvalid,
    FingerprintMismatch,
    LayoutChanged,
    LimitExceeded,
    PlaitError,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights

ITEMS = (1 << 20) + 5000
Planes = dict[str, bytes]


def frame_of(items: int, item_bytes: int) -> FrameSpec:
    return FrameSpec(item_bytes, (Segment(0, items, 0, 1),))


def delta_of(changes: dict[int, int], item_bytes: int) -> FrameDelta:
    positions = np.array(list(changes), np.uint32)
    differences = np.array(list(changes.values()), f"u{item_bytes}")
    return FrameDelta(item_bytes, positions, differences, Fingerprint(1, 2))


TWO_BYTE = {0: 1, 7: 0xFFFF, 300: 5, 301: 0x8000, ITEMS - 20: 0xFFFB, ITEMS - 2: 300, ITEMS - 1: 1}
ONE_BYTE = {0: 1, 700: 255, ITEMS - 2: 128}


def raw_planes(encoded: EncodedFrame) -> Planes:
    return {plane.name: unpack_plane(plane).tobytes() for plane in encoded.planes}


def with_planes(encoded: EncodedFrame, planes: Planes) -> EncodedFrame:
    """Stores every plane raw."""
    kept = (Plane(name, len(planes[name]), planes[name]) for name in sorted(planes) if planes[name])
    return replace(encoded, planes=tuple(kept))


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Planes], Planes]:
    return lambda planes: planes | {name: change(planes.get(name, b""))}


def put(at: int, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] = value
        return bytes(changed)

    return change


def restart_column(column: int, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        row = list(struct.unpack("<4I", data))
        row[column] = value
        return struct.pack("<4I", *row)

    return change


BROKEN_TWO_BYTE: dict[str, Callable[[Planes], Planes]] = {
    "no gaps": edit("gap", lambda data: b""),
    "a gap too few": edit("gap", lambda data: data[:-1]),
    "a gap too many": edit("gap", lambda data: data + b"\0"),
    "a skip at the end": edit("gap", lambda data: data + b"\xff"),
    "a skip instead of an element": edit("gap", put(0, 255)),
    "an element beyond the frame": edit("gap", put(-1, 1)),
    "an element beyond its restart block": edit("gap", put(2, 254)),
    "more skips than the frame has room for": edit("gap", lambda data: b"\xff" * 5000 + data),
    "no classes": edit("class", lambda data: b""),
    "a class byte too few": edit("class", lambda data: data[:-1]),
    "a class byte too many": edit("class", lambda data: data + b"\0"),
    "a class after the last element": edit("class", put(-1, 0b01_00_11_10)),
    "small instead of raw": edit("class", put(0, 0b10_10_01_00)),
    "raw instead of small": edit("class", put(0, 0b11_11_01_00)),
    "a small difference of zero": edit("small", put(0, 0)),
    "a small difference of one": edit("small", put(0, 2)),
    "a small difference too few": edit("small", lambda data: data[:-1]),
    "a small difference too many": edit("small", lambda data: data + b"\x09"),
    "half a raw difference": edit("raw", lambda data: data[:-1]),
    "no raw differences": edit("raw", lambda data: b""),
    "a raw difference of zero": edit("raw", lambda data: b"\0\0" + data[2:]),
    "a raw difference that is small": edit("raw", lambda data: b"\x7f\0" + data[2:]),
    "a raw difference too many": edit("raw", lambda data: data + b"\x34\x12"),
    "no restart point": edit("restart", lambda data: b""),
    "half a restart point": edit("restart", lambda data: data[:8]),
    "a restart point too many": edit("restart", lambda data: data * 2),
    "restart: another gap byte": edit("restart", restart_column(0, 4)),
    "restart: another element": edit("restart", restart_column(1, 3)),
    "restart: another small": edit("restart", restart_column(2, 0)),
    "restart: another raw": edit("restart", restart_column(3, 0)),
    "restart: gap beyond the end": edit("restart", restart_column(0, 2**32 - 1)),
    "restart: element beyond the end": edit("restart", restart_column(1, 2**32 - 1)),
    "restart: more elements than gaps": edit("restart", restart_column(0, 0)),
    "a plane of another item size": edit("byte", lambda data: b"\1" * 7),
}


@pytest.mark.parametrize("name", BROKEN_TWO_BYTE)
def test_a_broken_plane_of_two_byte_items_is_refused(name: str) -> None:
    frame = frame_of(ITEMS, 2)
    encoded = encode_delta(3, frame, delta_of(TWO_BYTE, 2))
    planes = raw_planes(encoded)
    assert decode_delta(with_planes(encoded, planes), frame).count == len(TWO_BYTE)
    broken = BROKEN_TWO_BYTE[name](dict(planes))
    assert broken != planes
    with pytest.raises(ChunkInvalid, match="frame 3"):
        decode_delta(with_planes(encoded, broken), frame)


BROKEN_ONE_BYTE: dict[str, Callable[[Planes], Planes]] = {
    "a difference of zero": edit("byte", put(1, 0)),
    "a difference too few": edit("byte", lambda data: data[:-1]),
    "a difference too many": edit("byte", lambda data: data + b"\1"),
    "a gap too few": edit("gap", lambda data: data[:-1]),
    "an element beyond the frame": edit("gap", put(-1, 254)),
    "a restart point of two-byte items": edit("restart", lambda data: data * 2),
    "a plane of another item size": edit("class", lambda data: b"\0"),
}


@pytest.mark.parametrize("name", BROKEN_ONE_BYTE)
def test_a_broken_plane_of_one_byte_items_is_refused(name: str) -> None:
    frame = frame_of(ITEMS, 1)
    encoded = encode_delta(3, frame, delta_of(ONE_BYTE, 1))
    planes = raw_planes(encoded)
    assert decode_delta(with_planes(encoded, planes), frame).count == len(ONE_BYTE)
    with pytest.raises(ChunkInvalid, match="frame 3"):
        decode_delta(with_planes(encoded, BROKEN_ONE_BYTE[name](dict(planes))), frame)


@pytest.mark.parametrize("count", [0, 6, 8, ITEMS + 1])
def test_another_count_is_refused(count: int) -> None:
    frame = frame_of(ITEMS, 2)
    encoded = replace(encode_delta(0, frame, delta_of(TWO_BYTE, 2)), count=count)
    with pytest.raises(ChunkInvalid):
        decode_delta(encoded, frame)


def test_a_frame_of_the_cut_that_is_smaller_refuses_the_planes() -> None:
    encoded = encode_delta(0, frame_of(ITEMS, 2), delta_of(TWO_BYTE, 2))
    with pytest.raises(ChunkInvalid):
        decode_delta(encoded, frame_of(ITEMS - 1, 2))


@pytest.mark.parametrize(("mode", "item_bytes"), [("delta", 4), ("delta", 8)])
def test_a_mode_that_its_items_don_t_have_is_refused(mode: Any, item_bytes: int) -> None:
    encoded = encode_delta(0, frame_of(ITEMS, 2), delta_of(TWO_BYTE, 2))
    with pytest.raises(ChunkInvalid, match="expected wide"):
        decode_delta(replace(encoded, mode=mode), frame_of(1000, item_bytes))


@pytest.mark.parametrize("item_bytes", [4, 8])
def test_broken_wide_planes_are_refused(item_bytes: int) -> None:
    frame = frame_of(1000, item_bytes)
    encoded = encode_delta(5, frame, delta_of({3: 9, 500: 1 << 20}, item_bytes))
    planes = raw_planes(encoded)
    short = edit("byte1", lambda data: data[:-1])
    missing = edit("byte1", lambda data: b"")
    more = edit("byte0", put(700, 1))
    for broken in (short, missing, more):
        with pytest.raises(ChunkInvalid, match="frame 5"):
            decode_delta(with_planes(encoded, broken(dict(planes))), frame)
    with pytest.raises(ChunkInvalid):
        decode_delta(encoded, frame_of(1000, 2))


def test_dense_items_are_proven_by_their_increment() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (1000,))])
    weights = ArrayWeights(layout, {"w": np.arange(1000, dtype=np.uint16)})
    frame = frame_of(1000, 2)
    encoded = encode_dense(2, frame, weights)
    planes = raw_planes(encoded)
    with pytest.raises(FingerprintMismatch, match="frame 2"):
        decode_dense(with_planes(encoded, edit("byte0", put(9, 1))(planes)), frame)
    with pytest.raises(FingerprintMismatch):
        decode_dense(replace(encoded, increment=ZERO), frame)
    for broken in (edit("byte0", lambda data: b""), edit("byte1", lambda data: data + b"\0")):
        with pytest.raises(ChunkInvalid):
            decode_dense(with_planes(encoded, broken(dict(planes))), frame)
    with pytest.raises(ChunkInvalid):
        decode_dense(replace(encoded, count=999), frame)
    with pytest.raises(ChunkInvalid):
        decode_delta(encoded, frame)


def test_a_dense_frame_is_bounded_in_bytes() -> None:
    items = (4 << 20) + 1
    layout = Layout.of([TensorSpec("w", "BF16", (items,))])
    weights = ArrayWeights(layout, {"w": np.zeros(items, np.uint16)})
    with pytest.raises(LimitExceeded, match="for_anchor"):
        encode_dense(0, frame_of(items, 2), weights)


def test_a_dense_frame_larger_than_any_is_refused_before_it_is_decoded() -> None:
    frame = frame_of((4 << 20) + 1, 2)
    planes = tuple(Plane(name, frame.items, bytes(frame.items)) for name in ("byte0", "byte1"))
    encoded = EncodedFrame(0, "dense", frame.items, planes, ZERO)
    with pytest.raises(LimitExceeded, match="dense frame of 4194305 items"):
        decode_dense(encoded, frame)


def test_a_skip_that_leads_to_no_item_is_refused_within_the_frame_too() -> None:
    """Its 255 items are there: nothing else is wrong with it."""
    for item_bytes, others in ((2, {"class": b"\0"}), (1, {"byte": b"\1"})):
        for items, gap in ((700, b"\0\xff"), ((1 << 20) + 5, b"\0\xff")):
            frame = frame_of(items, item_bytes)
            mark = struct.pack("<4I", 2, 1, 0, 0)[: 16 if item_bytes == 2 else 8]
            planes = {"gap": gap, "restart": mark if items > 1 << 20 else b"", **others}
            encoded = EncodedFrame(3, "delta", 1, (), ZERO)
            with pytest.raises(ChunkInvalid, match="gap plane doesn't lead to 1 of"):
                decode_delta(with_planes(encoded, planes), frame)


@pytest.mark.parametrize("count", [31, 32, 33, 64])
@pytest.mark.parametrize("wrong", [(-1, 0), (0, 1)])
def test_a_mark_behind_the_last_element_names_the_planes_ends(
    count: int, wrong: tuple[int, int]
) -> None:
    """Where the elements fill whole words of classes, no word holds the mark's place."""
    frame = frame_of((1 << 20) + 5, 2)
    encoded = encode_delta(0, frame, delta_of(dict.fromkeys(range(count), 5), 2))
    planes = raw_planes(encoded)
    assert planes["restart"] == struct.pack("<4I", count, count, count, 0)
    mark = struct.pack("<4I", count, count, count + wrong[0], wrong[1])
    with pytest.raises(ChunkInvalid, match="restart"):
        decode_delta(with_planes(encoded, planes | {"restart": mark}), frame)


def test_planes_that_no_frame_has_are_refused() -> None:
    plane = Plane("gap", 1, b"\0")
    for planes in ((Plane("gaps", 1, b"\0"),), (plane, plane), (plane, Plane("class", 1, b"\0"))):
        with pytest.raises(ChunkInvalid, match="wrong planes"):
            EncodedFrame(0, "delta", 1, planes, ZERO)
    with pytest.raises(ChunkInvalid, match="wrong planes") as refusal:
        EncodedFrame(0, "delta", 1, (Plane("x" * 10_000, 1, b"\0"),), ZERO)
    assert len(refusal.value.message) < 300
    with pytest.raises(ChunkInvalid, match="unknown mode"):
        EncodedFrame(0, "sparse", 1, (plane,), ZERO)  # type: ignore[arg-type]
    for raw_size, data in ((0, b""), (1, b""), (1, b"ab")):
        with pytest.raises(ChunkInvalid):
            Plane("gap", raw_size, data)


RAW = bytes(5000)


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


BOMBS = {
    "it holds more than it may": zstandard.compress(bytes(100_000_000)),
    "it holds less": zstandard.compress(RAW[:-1]),
    "it doesn't say how much": without_size(RAW),
    "two zstd frames": zstandard.compress(RAW[:2500]) + zstandard.compress(RAW[2500:]),
    "bytes after its end": zstandard.compress(RAW) + b"!",
    "it breaks off": zstandard.compress(np.random.default_rng(0).bytes(2000) + RAW[2000:])[:-9],
    "a skippable frame": struct.pack("<II", 0x184D2A50, 16) + bytes(16),
    "noise": np.random.default_rng(0).bytes(900),
    "one byte": b"\x28",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_plane_that_isn_t_one_zstd_frame_of_its_size_is_refused(name: str) -> None:
    data = BOMBS[name]
    assert len(data) < len(RAW)
    with pytest.raises(ChunkInvalid, match="gap"):
        unpack_plane(Plane("gap", len(RAW), data))


def test_a_zstd_frame_that_lies_about_its_size_is_refused() -> None:
    honest = zstandard.compress(bytes(300))
    size = zstandard.frame_header_size(honest)
    lying = bytearray(honest)
    # A content size of two bytes is stored minus 256, at the header's end.
    lying[size - 2 : size] = struct.pack("<H", 5000 - 256)
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 5000
    with pytest.raises(ChunkInvalid):
        unpack_plane(Plane("gap", 5000, bytes(lying)))


@given(
    gaps=st.lists(st.sampled_from([0, 1, 90, 254, 255]), min_size=1, max_size=8),
    classes=st.binary(max_size=2),
    small=st.lists(st.sampled_from([0, 2, 3, 4, 255]), max_size=3),
    raw=st.lists(st.sampled_from([0, 1, 127, 128, 0x8000, 0xFF7F, 0xFF80]), max_size=3),
    count=st.integers(1, 8),
    items=st.integers(8, 700),
)
@settings(max_examples=400)
def test_what_is_decoded_at_all_is_what_the_encoder_writes(
    gaps: list[int], classes: bytes, small: list[int], raw: list[int], count: int, items: int
) -> None:
    """Every delta has exactly one encoding, so whatever else arrives is refused."""
    planes = {
        "gap": bytes(gaps),
        "class": classes,
        "small": bytes(small),
        "raw": np.array(raw, "<u2").tobytes(),
    }
    frame = frame_of(items, 2)
    encoded = with_planes(EncodedFrame(0, "delta", count, (), ZERO), planes)
    try:
        delta = decode_delta(encoded, frame)
    except ChunkInvalid:
        return
    assert delta.count == count
    assert delta.positions[-1] < items
    again = raw_planes(encode_delta(0, frame, delta))
    assert again == {name: plane for name, plane in planes.items() if plane}


def deltas_of(positions: NDArray[Any], differences: NDArray[Any]) -> FrameDelta:
    return FrameDelta(2, positions, differences, ZERO)


def test_a_delta_can_t_exist_with_bad_positions_or_differences() -> None:
    """Duplicate, unsorted, unequal in length, of a wrong type, zero: refused where it is made."""
    at = np.array([1, 5], np.uint32)
    by = np.array([1, 2], np.uint16)
    assert deltas_of(at, by).count == 2
    with pytest.raises(ChunkInvalid, match="3-byte items"):
        FrameDelta(3, at, by, ZERO)
    for positions, differences in (
        (at[::-1], by),
        (np.array([5, 5], np.uint32), by),
        (at[:1], by),
        (at, by[:1]),
        (at.astype(np.int64), by),
        (at.astype(np.int32), by),
        (at, by.astype(np.int16)),
        (at, by.astype(np.uint32)),
        (at, np.array([1, 0], np.uint16)),
        (at.reshape(1, 2), by.reshape(1, 2)),
    ):
        with pytest.raises(ChunkInvalid):
            deltas_of(positions, differences)


def test_nothing_is_written_when_a_delta_doesn_t_fit() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (10,)), TensorSpec("b", "BF16", (10,))])
    frame = frame_of(20, 2)
    owned = {"a": np.zeros(10, np.uint16), "b": np.zeros(10, np.uint16)}
    frozen = owned["b"].copy()
    frozen.flags.writeable = False
    cases: list[tuple[FrameDelta, ArrayWeights, type[PlaitError]]] = [
        (delta_of({1: 1, 20: 1}, 2), ArrayWeights(layout, owned), ChunkInvalid),
        (delta_of({1: 1, 2**32 - 1: 1}, 2), ArrayWeights(layout, owned), ChunkInvalid),
        (delta_of({1: 1, 4: 1}, 1), ArrayWeights(layout, owned), ChunkInvalid),
        (delta_of({1: 1, 15: 1}, 2), ArrayWeights(layout, owned | {"b": frozen}), UsageError),
    ]
    for delta, weights, error in cases:
        with pytest.raises(error):
            apply(frame, weights, delta)
        assert not any(array.any() for array in owned.values())
    for delta, weights, _ in cases[:3]:
        with pytest.raises(ChunkInvalid):
            increment_on(frame, weights, delta)
        with pytest.raises(ChunkInvalid):
            encode_delta(0, frame, delta)


def test_weights_that_lie_about_their_bits_are_refused() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (10,))])

    class Lying:
        def __init__(self, array: NDArray[Any]) -> None:
            self.layout = layout
            self.array = array

        def bits(self, name: str) -> NDArray[Any]:
            return self.array

    wrong: list[NDArray[Any]] = [
        np.zeros(9, np.uint16),
        np.zeros(10, np.int16),
        np.zeros(10, np.uint32),
        np.zeros((10, 1), np.uint16),
        np.zeros(20, np.uint16)[::2],
    ]
    for array in wrong:
        with pytest.raises(LayoutChanged):
            apply(frame_of(10, 2), Lying(array), delta_of({1: 1}, 2))
