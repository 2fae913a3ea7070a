"""A frame that several workers decode, block by block, is the frame that one thread decodes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.codec import (
    EncodedFrame,
    FrameDelta,
    Plane,
    decode_delta,
    decode_deltas,
    encode_delta,
    frames,
    sparse,
)
from plait.codec.planes import unpack_plane
from plait.cut import FrameSpec, Segment
from plait.errors import ChunkInvalid
from plait.fingerprint import Fingerprint
from plait.workers import Workers

BLOCK = 1 << 20
# Blocks without changes, with one, with many; ends within and at the end of words of classes.
COUNTS = st.lists(st.sampled_from([0, 0, 1, 3, 31, 32, 33, 64, 5000]), min_size=1, max_size=7)


@pytest.fixture(scope="module", autouse=True)
def everything_is_shared() -> Iterator[None]:
    """However small: these frames would be left to one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "_SHARED_COUNT_MIN", 0)
        patch.setattr(frames, "_SHARED_BYTES_MIN", 0)
        yield


@pytest.fixture(scope="module", params=[1, 2, 3, 8])
def pool(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(request.param) as some:
        yield some


def frame_of(items: int, item_bytes: int = 2) -> FrameSpec:
    return FrameSpec(item_bytes, (Segment(0, items, 0, 1),))


def delta_of(counts: list[int], items: int, item_bytes: int, seed: int) -> FrameDelta:
    random = np.random.default_rng(seed)
    places: list[NDArray[Any]] = []
    for block, count in enumerate(counts):
        room = min(items - block * BLOCK, BLOCK)
        edges = [0, room - 1] if count > 2 else []
        inner = random.choice(room, min(count, room), replace=False)
        places.append(block * BLOCK + np.unique(np.concatenate([inner, edges])))
    positions = np.concatenate(places).astype(np.uint32)
    differences = random.choice([1, 0xFFFF, 1, 0xFFFF, 2, 0xFF80, 127, 300, 0x8000], positions.size)
    if item_bytes == 1:
        differences = random.integers(1, 256, positions.size)
    return FrameDelta(
        item_bytes, positions, differences.astype(f"u{item_bytes}"), Fingerprint(5, 6)
    )


def outcome(encoded: EncodedFrame, frame: FrameSpec, pool: Workers | None) -> object:
    try:
        delta = decode_delta(encoded, frame, workers=pool)
    except ChunkInvalid:
        return "refused"
    return delta.positions.tobytes(), delta.differences.tobytes(), delta.increment


@settings(max_examples=40)
@given(
    counts=COUNTS,
    short=st.integers(0, BLOCK - 1),
    item_bytes=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_workers_decode_what_one_thread_does(
    pool: Workers, counts: list[int], short: int, item_bytes: int, seed: int
) -> None:
    items = len(counts) * BLOCK - short
    delta = delta_of(counts, items, item_bytes, seed)
    if not delta.count:
        return
    frame = frame_of(items, item_bytes)
    encoded = encode_delta(4, frame, delta)
    expected = delta.positions.tobytes(), delta.differences.tobytes(), delta.increment
    assert outcome(encoded, frame, pool) == expected
    assert outcome(encoded, frame, None) == expected


@settings(max_examples=200)
@given(
    plane=st.sampled_from(["restart", "restart", "restart", "gap", "class", "small", "raw"]),
    at=st.integers(0, 10_000),
    value=st.one_of(st.integers(0, 40), st.integers(90, 130), st.sampled_from([2**31, 2**32 - 1])),
    relative=st.booleans(),
)
def test_hostile_planes_are_refused_by_workers_as_by_one_thread(
    pool: Workers, plane: str, at: int, value: int, relative: bool
) -> None:
    frame = frame_of(5 * BLOCK)
    encoded = encode_delta(4, frame, delta_of([40, 0, 33, 1, 40], 5 * BLOCK, 2, 1))
    planes = {p.name: unpack_plane(p).copy() for p in encoded.planes}
    numbers = planes[plane].view({"restart": "<u4", "raw": "<u2"}.get(plane, "u1"))
    place = at % numbers.size
    wanted = int(numbers[place]) + value - 20 if relative else value
    numbers[place] = wanted & ((1 << 8 * numbers.itemsize) - 1)
    stored = tuple(Plane(n, planes[n].size, planes[n].tobytes()) for n in sorted(planes))
    broken = replace(encoded, planes=stored)
    assert outcome(broken, frame, pool) == outcome(broken, frame, None)


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("step", [-1, 1, 1 << 20, -(1 << 31)])
def test_a_mark_that_isn_t_true_is_refused(pool: Workers, row: int, column: int, step: int) -> None:
    frame = frame_of(5 * BLOCK)
    encoded = encode_delta(4, frame, delta_of([40, 0, 33, 1, 40], 5 * BLOCK, 2, 1))
    planes = {p.name: unpack_plane(p).copy() for p in encoded.planes}
    marks = planes["restart"].view("<u4").reshape(-1, 4)
    marks[row, column] = (int(marks[row, column]) + step) % (1 << 32)
    stored = tuple(Plane(n, planes[n].size, planes[n].tobytes()) for n in sorted(planes))
    with pytest.raises(ChunkInvalid, match="frame 4"):
        decode_delta(replace(encoded, planes=stored), frame, workers=pool)


def test_marks_that_agree_with_each_other_but_not_with_the_planes_are_refused(
    pool: Workers,
) -> None:
    frame = frame_of(3 * BLOCK)
    encoded = encode_delta(4, frame, delta_of([100, 100, 100], 3 * BLOCK, 2, 1))
    planes = {p.name: unpack_plane(p).copy() for p in encoded.planes}
    for column in (2, 3):
        moved = planes["restart"].copy()
        moved.view("<u4").reshape(-1, 4)[:, column] += 1
        changed = planes | {"restart": moved}
        stored = tuple(Plane(n, changed[n].size, changed[n].tobytes()) for n in sorted(changed))
        with pytest.raises(ChunkInvalid, match="restart"):
            decode_delta(replace(encoded, planes=stored), frame, workers=pool)


@pytest.mark.parametrize("number", [1, 2, 9])
def test_frames_are_decoded_in_their_order(pool: Workers, number: int) -> None:
    frame = frame_of(2 * BLOCK)
    deltas = [delta_of([50 + n, 20], 2 * BLOCK, 2, n) for n in range(number)]
    pairs = [(encode_delta(n, frame, delta), frame) for n, delta in enumerate(deltas)]
    for found, delta in zip(decode_deltas(pairs, pool), deltas, strict=True):
        assert np.array_equal(found.positions, delta.positions)
        assert np.array_equal(found.differences, delta.differences)
    broken = replace(pairs[-1][0], count=7)
    with pytest.raises(ChunkInvalid, match=f"frame {number - 1}"):
        decode_deltas([*pairs[:-1], (broken, frame)], pool)
