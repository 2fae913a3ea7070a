"""Headers of chunks that a safetensors reader would refuse, or that could hide something."""

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from plait import codec
from plait.codec import EncodedFrame, read_chunk
from plait.codec.planes import pack_plane
from plait.errors import ChunkInvalid, LimitExceeded, PlaitError
from plait.fingerprint import ZERO
from plait.limits import FRAME_ELEMENTS_MAX, FRAMES_MAX
from tests.core.chunk_files import put_together, take_apart

FRAME = EncodedFrame(
    7,
    "delta",
    9,
    tuple(pack_plane(name, np.arange(9, dtype=np.uint8)) for name in ("byte", "gap")),
    ZERO,
)
(CHUNK,) = codec.pack_chunks([FRAME])
HEADER, DIRECTORY, PLANES = take_apart(CHUNK.data)
FIRST, SECOND = "0000007.byte", "0000007.gap"


def header_with(key: str, **fields: Any) -> bytes:
    return put_together(HEADER | {key: HEADER[key] | fields}, None, PLANES)


def raw_header(old: str, new: str) -> bytes:
    text = json.dumps(HEADER)
    assert text.count(old) == 1
    return put_together(text.replace(old, new).encode(), None, PLANES)


# Equal to what they should be, as Python compares.
ODD = {
    "a float for a size": header_with(FIRST, shape=[9.0]),
    "false for an offset": header_with(FIRST, data_offsets=[False, 9]),
    "a number in the metadata": header_with("__metadata__", other=5),
    "a list for a tensor": put_together(HEADER | {FIRST: []}, None, PLANES),
    "NaN": raw_header('{"plait"', '{"z": NaN, "plait"'),
    "Infinity": raw_header('{"plait"', '{"z": -Infinity, "plait"'),
}


@pytest.mark.parametrize("name", ODD)
def test_what_safetensors_refuses_is_no_chunk(name: str) -> None:
    assert safetensors.numpy.load(CHUNK.data)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load(ODD[name])
    with pytest.raises(ChunkInvalid):
        read_chunk(ODD[name])


def test_metadata_holds_the_directory_alone() -> None:
    with pytest.raises(ChunkInvalid, match="alone"):
        read_chunk(header_with("__metadata__", more="text"))


def test_a_header_is_nested_no_deeper_than_a_document() -> None:
    with pytest.raises(LimitExceeded, match="deeper than 64"):
        read_chunk(put_together(b"[" * 100, None, PLANES))


def directory_with(*planes: str) -> dict[str, Any]:
    (row,) = DIRECTORY["frames"]
    return DIRECTORY | {"frames": [row | {"planes": [[name, 9, 9] for name in planes]}]}


LONG = "A" * 1_000_000
QUOTED = {
    "a long key": put_together(HEADER | {LONG: {}}, None, PLANES),
    "half of a surrogate pair": put_together(HEADER | {"\ud800": {}}, None, PLANES),
    "a terminal's command": put_together(HEADER | {"\x1b[2J": {}}, None, PLANES),
    "a long plane": put_together(HEADER, directory_with(LONG), PLANES),
    "a long plane twice": put_together(HEADER, directory_with(LONG, LONG), PLANES),
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_refusal_quotes_a_little_of_a_header_and_printably(name: str) -> None:
    with pytest.raises(ChunkInvalid) as refusal:
        read_chunk(QUOTED[name])
    assert len(refusal.value.message) < 300
    assert refusal.value.message.isprintable()


def planes_named(*names: str) -> dict[str, Any]:
    return {"planes": [[name, 9, 9] for name in names]}


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"number": FRAMES_MAX}, LimitExceeded, "at most number 1048575"),
        ({"number": 1 << 40}, LimitExceeded, "at most number 1048575"),
        ({"count": FRAME_ELEMENTS_MAX + 1}, LimitExceeded, "at most number"),
        (planes_named("byte", "byte"), ChunkInvalid, "named once"),
        (planes_named("gap", "byte"), ChunkInvalid, "sorted"),
    ],
)
def test_a_directory_is_refused_before_any_frame_is_asked_for(
    fields: dict[str, Any], error: type[PlaitError], why: str
) -> None:
    (row,) = DIRECTORY["frames"]
    row = row | fields
    header: dict[str, Any] = {}
    for place, (name, _, size) in enumerate(row["planes"]):
        key = f"{row['number']:07d}.{name}"
        offsets = [place * size, (place + 1) * size]
        header[key] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
    with pytest.raises(error, match=why):
        read_chunk(put_together(header, DIRECTORY | {"frames": [row]}, PLANES))
