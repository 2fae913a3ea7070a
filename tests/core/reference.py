"""A second implementation of docs/format.md, slow and plain: what the tests compare against.

It shares no code with plait: safetensors, zstandard, numpy and Python integers only.
"""

import itertools
import json
from typing import Any

import numpy as np
import safetensors.numpy
import zstandard
from numpy.typing import NDArray

MASK = (1 << 64) - 1


def fingerprint(bits: NDArray[Any], first_word: int = 0) -> str:
    """Of consecutive items from `first_word` on, by the formulas of the format's text."""
    values = bits.astype(np.uint64) if bits.itemsize == 1 else bits.view("<u2").astype(np.uint64)
    words = np.arange(values.size, dtype=np.uint64) + np.uint64(first_word)
    key = (words << np.uint64(16)) | values

    def mixed(seed: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
        k = key + np.uint64(seed)
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            k = (k ^ (k >> np.uint64(shift))) * np.uint64(factor)
        return int(k.sum(dtype=np.uint64))

    lane0 = mixed(0x9E3779B97F4A7C15, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
    lane1 = mixed(0xC2B2AE3D27D4EB4F, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    return f"{lane0:016x}{lane1:016x}"


def add_fingerprints(first: str, second: str) -> str:
    lanes = [(int(first[i : i + 16], 16) + int(second[i : i + 16], 16)) & MASK for i in (0, 16)]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def read_chunk_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a chunk's directory."""
    length = int.from_bytes(data[:8], "little")
    directory = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["plait"])
    rows: list[dict[str, Any]] = directory["frames"]
    return rows


def read_chunk(data: bytes) -> dict[int, dict[str, Any]]:
    """Every frame's mode, count, increment and decoded planes."""
    tensors = safetensors.numpy.load(data)
    frames = {}
    for row in read_chunk_rows(data):
        planes = {}
        for name, raw_size, stored_size in row["planes"]:
            plane = tensors[f"{row['number']:07d}.{name}"].tobytes()
            assert len(plane) == stored_size
            planes[name] = plane if stored_size == raw_size else zstandard.decompress(plane)
            assert len(planes[name]) == raw_size
        frames[row["number"]] = row | {"planes": planes}
    return frames


def changes(frame: dict[str, Any], item_bytes: int, items: int) -> dict[int, int]:
    """Item number → difference of a `delta` or `wide` frame."""
    planes = {name: list(plane) for name, plane in frame["planes"].items()}
    if frame["mode"] == "wide":
        columns = [planes[f"byte{k}"] for k in range(item_bytes)]
        values = [sum(c[i] << 8 * k for k, c in enumerate(columns)) for i in range(items)]
        return {i: value for i, value in enumerate(values) if value}
    differences = planes["byte"] if item_bytes == 1 else _classes(planes, frame["count"])
    return dict(zip(_positions(planes, items, item_bytes), differences, strict=True))


def _positions(planes: dict[str, list[int]], items: int, item_bytes: int) -> list[int]:
    """Walks the gap plane; at each restart the count starts anew at a multiple of 2^20."""
    columns = 2 if item_bytes == 1 else 4
    marks = np.array(planes.get("restart", []), np.uint8).view("<u4").reshape(-1, columns)
    starts = [0, *(int(mark) for mark in marks[:, 0]), len(planes["gap"])]
    positions = []
    for block, (start, end) in enumerate(itertools.pairwise(starts)):
        position = (block << 20) - 1
        for gap in planes["gap"][start:end]:
            position += gap if gap == 255 else gap + 1
            if gap != 255:
                positions.append(position)
    assert not positions or positions[-1] < items
    return positions


def _classes(planes: dict[str, list[int]], count: int) -> list[int]:
    small = iter(planes.get("small", []))
    raw = iter(np.array(planes.get("raw", []), np.uint8).view("<u2").tolist())
    differences = []
    for i in range(count):
        match planes["class"][i // 4] >> 2 * (i % 4) & 3:
            case 0:
                differences.append(1)
            case 1:
                differences.append(0xFFFF)
            case 2:
                zigzag = next(small)
                differences.append(((zigzag >> 1) ^ -(zigzag & 1)) & 0xFFFF)
            case _:
                differences.append(next(raw))
    return differences


def dense_items(frame: dict[str, Any], item_bytes: int) -> list[int]:
    """Items of a `dense` frame."""
    planes = [frame["planes"][f"byte{k}"] for k in range(item_bytes)]
    items = [sum(p[i] << 8 * k for k, p in enumerate(planes)) for i in range(frame["count"])]
    bits = 8 * item_bytes
    return items if item_bytes == 1 else [item >> 1 | (item & 1) << bits - 1 for item in items]


def words_of(item_bytes: int, segments: list[list[int]]) -> list[int]:
    """First word of every item of a frame, from the rows of a cut document."""
    width = max(item_bytes // 2, 1)
    return [
        first + repeat * stride + item * width
        for first, run, stride, repeats in segments
        for repeat in range(repeats)
        for item in range(run)
    ]
