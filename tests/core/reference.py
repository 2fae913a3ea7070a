"""A second reader of chunks, written from docs/format.md alone, slow and plain.

It shares no code with plait: numpy, zstandard and the standard library only. Its state of the
weights is the array of all canonical words, uint16 [words of the layout]. It reads chunks whole, so
it compares digests and has no need of the frames' XXH3.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tests.core.reference_documents import (
    FINGERPRINT,
    Frame,
    Refused,
    covers,
    digest_of,
    fields_of,
    is_count,
    is_text,
    need,
    parse,
    parse_json,
    read_cut,
    read_layout,
    words_of,
)
from tests.core.reference_documents import add_fingerprints as add_fingerprints

ZERO = "0" * 32
XXH3 = re.compile(r"[0-9a-f]{16}")
Words = NDArray[np.uint16]


def fingerprint(bits: NDArray[Any], first_word: int = 0) -> str:
    """Of consecutive items from `first_word` on, by the formulas of the format's text."""
    values = bits.astype(np.uint64) if bits.itemsize == 1 else bits.view("<u2").astype(np.uint64)
    return mixed_words(np.arange(values.size, dtype=np.uint64) + np.uint64(first_word), values)


def mixed_words(words: NDArray[np.uint64], values: NDArray[np.uint64]) -> str:
    """Fingerprint of these words, each with its number."""
    key = (words << np.uint64(16)) | values

    def mixed(seed: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
        k = key + np.uint64(seed)
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            k = (k ^ (k >> np.uint64(shift))) * np.uint64(factor)
        return int(k.sum(dtype=np.uint64))

    lane0 = mixed(0x9E3779B97F4A7C15, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
    lane1 = mixed(0xC2B2AE3D27D4EB4F, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    return f"{lane0:016x}{lane1:016x}"


def state_of(layout: bytes, tensors: Mapping[str, bytes]) -> Words:
    """The words of a checkpoint's tensors."""
    parts = [np.zeros(0, np.uint16)]
    for tensor in read_layout(layout):
        data = tensors[tensor.name]
        assert len(data) == tensor.items * tensor.item_bytes
        parts.append(np.frombuffer(data, "u1" if tensor.item_bytes == 1 else "<u2"))
    return np.concatenate(parts).astype(np.uint16)


def apply_manifest(
    state: Words,
    manifest: dict[str, Any],
    layout: bytes,
    cut: bytes | None,
    chunks: Mapping[str, bytes],
    *,
    back: bool = False,
) -> Words:
    """The state behind a manifest; `back`: the one before a delta. Nothing is written in place.

    Args:
        state: that a delta is added to; whatever it is, an anchor replaces it.
        manifest: as `read_manifest` gives it.
        chunks: files by digest.
    """
    need(manifest["layout"] == digest_of(layout), "weights of another layout")
    anchor = manifest["kind"] == "anchor"
    need(not manifest["external"] and not (anchor and back), "nothing to add")
    ends = (manifest["to"], manifest["from"]) if back else (manifest["from"], manifest["to"])
    need(anchor or fingerprint(state) == ends[0], "the delta of other weights")
    frames: list[Frame] = []
    if manifest["cut"] is not None:
        need(cut is not None and digest_of(cut) == manifest["cut"], "another cut")
        frames = read_cut(cut or b"", layout)
    numbers = sorted(number for entry in manifest["chunks"] for number in entry["frames"])
    need(not anchor or numbers == list(range(len(frames))), "an anchor holds all its frames")
    need(not anchor or covers(frames, layout), "an anchor holds every word")
    after = state.copy()
    for entry in manifest["chunks"]:
        for number, frame in read_chunk(chunks[entry["digest"]], entry).items():
            need(number < len(frames), "a frame that the cut doesn't have")
            need((frame["mode"] == "dense") == anchor, f"{frame['mode']} in a {manifest['kind']}")
            _apply_frame(after, frame, frames[number], back=back)
    need(fingerprint(after) == ends[1], "the state isn't the one that the manifest names")
    return after


def _apply_frame(state: Words, frame: dict[str, Any], spec: Frame, *, back: bool) -> None:
    item_bytes, segments = spec
    words = words_of(item_bytes, segments)
    if frame["mode"] == "dense":
        changed = dict(enumerate(dense_items(frame, item_bytes, len(words))))
    else:
        sign = -1 if back else 1
        differences = changes(frame, item_bytes, len(words))
        changed = {
            i: (item_at(state, words[i], item_bytes) + sign * difference) % (1 << 8 * item_bytes)
            for i, difference in differences.items()
        }
    width = max(item_bytes // 2, 1)
    places = np.array([words[i] + k for i in changed for k in range(width)], np.uint64)
    values = np.array([v >> 16 * k & 0xFFFF for v in changed.values() for k in range(width)])
    found, old = mixed_words(places, values.astype(np.uint64)), ZERO
    if frame["mode"] != "dense":
        old = mixed_words(places, state[places].astype(np.uint64))
    found = add_fingerprints(found, old, -1)
    found = add_fingerprints(ZERO, found, -1) if back else found
    need(found == frame["increment"], f"frame {frame['number']} was made from other bits")
    state[places] = values


def item_at(state: Words, word: int, item_bytes: int) -> int:
    return sum(int(state[word + k]) << 16 * k for k in range(max(item_bytes // 2, 1)))


def read_chunk_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a chunk's directory."""
    return _open(data)[0]


def _open(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    length = int.from_bytes(data[:8], "little")
    need(8 + length <= len(data), "ends within its header")
    header = parse_json(data[8 : 8 + length])
    need(isinstance(header, dict), "the header is an object")
    metadata = header.pop("__metadata__", None)
    need(isinstance(metadata, dict) and isinstance(metadata.get("plait"), str), "no directory")
    try:
        directory = parse(metadata["plait"].encode(), "plait-chunk/1", "frames requires")
    except UnicodeEncodeError as error:
        raise Refused("half of a surrogate pair") from error
    rows = directory["frames"]
    need(isinstance(rows, list) and rows, "at least one frame")
    expected, end = {}, 0
    for row in rows:
        _check_row(row)
        for name, _, size in row["planes"]:
            place = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            expected[f"{row['number']:07d}.{name}"] = place
            end += size
    numbers = [row["number"] for row in rows]
    need(all(a < b for a, b in itertools.pairwise(numbers)), "frames increase")
    # As text, in which 5 isn't 5.0 and 0 isn't false.
    texts = [json.dumps(tensors, sort_keys=True) for tensors in (header, expected)]
    need(texts[0] == texts[1], "tensors and directory disagree")
    need(8 + length + end == len(data), "the data ends elsewhere")
    return rows, data[8 + length :]


def _check_row(row: Any) -> None:
    fields_of(row, "count increment mode number planes xxh3", "a frame's row")
    need(is_count(row["number"], (1 << 20) - 1), "a frame's number")
    need(is_count(row["count"], 1 << 24) and row["count"], "a frame's count")
    need(row["mode"] in ("delta", "wide", "dense"), f"mode {row['mode']}")
    need(is_text(row["increment"], FINGERPRINT) and is_text(row["xxh3"], XXH3), "a frame's row")
    need(isinstance(row["planes"], list), "a frame's planes")
    for plane in row["planes"]:
        need(isinstance(plane, list) and len(plane) == 3 and isinstance(plane[0], str), "a plane")
        need(is_count(plane[1]) and is_count(plane[2]) and 0 < plane[2] <= plane[1], "a plane")
    names = [name for name, *_ in row["planes"]]
    need(names == sorted(set(names)), "planes are ordered by name")


def read_chunk(data: bytes, entry: Mapping[str, Any] | None = None) -> dict[int, dict[str, Any]]:
    """Every frame's row, with its decoded planes.

    Args:
        entry: the manifest's, compared if it is given.
    """
    if entry is not None:
        need((len(data), digest_of(data)) == (entry["size"], entry["digest"]), "another chunk")
    rows, body = _open(data)
    frames, at = {}, 0
    for row in rows:
        planes = {}
        for name, raw_size, size in row["planes"]:
            planes[name] = _plane(body[at : at + size], raw_size)
            at += size
        frames[row["number"]] = row | {"planes": planes}
    if entry is not None:
        total = ZERO
        for row in rows:
            total = add_fingerprints(total, row["increment"])
        need(list(frames) == entry["frames"] and total == entry["increment"], "not as its entry")
    return frames


def _plane(stored: bytes, raw_size: int) -> bytes:
    if len(stored) == raw_size:
        return stored
    try:
        need(zstandard.get_frame_parameters(stored).content_size == raw_size, "a plane's size")
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        raw = decompressor.decompress(stored)
    except zstandard.ZstdError as error:
        raise Refused(f"not a zstd frame: {error}") from error
    need(len(raw) == raw_size and decompressor.eof and not decompressor.unused_data, "a plane")
    return raw


def changes(frame: dict[str, Any], item_bytes: int, items: int) -> dict[int, int]:
    """Item number → difference of a `delta` or `wide` frame."""
    need(frame["mode"] == ("wide" if item_bytes > 2 else "delta"), "a mode of other items")
    need(0 < frame["count"] <= items, "count")
    planes = {name: list(plane) for name, plane in frame["planes"].items()}
    if frame["mode"] == "wide":
        values = _joined(frame, item_bytes, items)
        found = {i: value for i, value in enumerate(values) if value}
        need(len(found) == frame["count"], "another count")
        return found
    names = {"gap", "restart"} | ({"byte"} if item_bytes == 1 else {"class", "small", "raw"})
    need(planes.keys() <= names, "planes of other items")
    columns = 2 if item_bytes == 1 else 4
    restart = planes.get("restart", [])
    need(len(restart) == 4 * columns * (-(-items // (1 << 20)) - 1), "restart points")
    marks = np.array(restart, np.uint8).view("<u4").reshape(-1, columns).tolist()
    positions = _positions(planes.get("gap", []), marks, frame["count"], items)
    if item_bytes == 1:
        differences = planes.get("byte", [])
        need(len(differences) == frame["count"] and all(differences), "a difference of 0")
    else:
        differences = _classes(planes, marks, frame["count"])
    return dict(zip(positions, differences, strict=True))


def _positions(
    gaps: Sequence[int], marks: Sequence[Sequence[int]], count: int, items: int
) -> list[int]:
    """Walks the gap plane; at each restart the count starts anew at a multiple of 2^20."""
    starts = [0, *(mark[0] for mark in marks), len(gaps)]
    elements = [*(mark[1] for mark in marks), count]
    positions: list[int] = []
    for block, (start, end) in enumerate(itertools.pairwise(starts)):
        need(start <= end <= len(gaps), "a restart point goes back, or beyond")
        following = block << 20
        for gap in gaps[start:end]:
            if gap == 255:
                following += 255
            else:
                positions.append(following + gap)
                following = positions[-1] + 1
        need(start == end or gaps[end - 1] != 255, "a skip that leads to no item")
        need(following <= min((block + 1) << 20, items), "beyond its block, or the frame")
        need(len(positions) == elements[block], "a restart point names another element")
    return positions


def _classes(planes: dict[str, list[int]], marks: Sequence[Sequence[int]], count: int) -> list[int]:
    classes, small, raw_bytes = (planes.get(name, []) for name in ("class", "small", "raw"))
    need(len(classes) == -(-count // 4) and len(raw_bytes) % 2 == 0, "sizes of classes and raw")
    raw = np.array(raw_bytes, np.uint8).view("<u2").tolist()
    need(min(small, default=3) >= 3, "a small difference of another class")
    need(all(128 <= value < 0xFF80 for value in raw), "a raw difference of another class")
    names = [byte >> 2 * k & 3 for byte in classes for k in range(4)]
    need(not any(names[count:]), "a class behind the last item")
    for _, element, smalls, raws in marks:
        found = (names[:element].count(2), names[:element].count(3))
        need(found == (smalls, raws), "a restart point names other differences")
    need((names.count(2), names.count(3)) == (len(small), len(raw)), "classes and differences")
    smalls_left, raws_left = iter(small), iter(raw)
    differences = []
    for name in names[:count]:
        if name == 2:
            zigzag = next(smalls_left)
            differences.append(((zigzag >> 1) ^ -(zigzag & 1)) & 0xFFFF)
        else:
            differences.append(next(raws_left) if name == 3 else (1, 0xFFFF)[name])
    return differences


def dense_items(frame: dict[str, Any], item_bytes: int, count: int | None = None) -> list[int]:
    """Items of a `dense` frame."""
    need(count is None or frame["count"] == count, "another count")
    need(frame["count"] * item_bytes <= 8 << 20, "a dense frame of more than 8 MiB")
    items = _joined(frame, item_bytes, frame["count"])
    bits = 8 * item_bytes
    return items if item_bytes == 1 else [item >> 1 | (item & 1) << bits - 1 for item in items]


def _joined(frame: dict[str, Any], item_bytes: int, items: int) -> list[int]:
    planes = frame["planes"]
    need(set(planes) == {f"byte{k}" for k in range(item_bytes)}, "planes of other items")
    need(all(len(plane) == items for plane in planes.values()), "a plane for every item")
    columns = [planes[f"byte{k}"] for k in range(item_bytes)]
    return [sum(c[i] << 8 * k for k, c in enumerate(columns)) for i in range(items)]
