"""A second reader of documents, written from docs/format.md alone: the standard library only.

It is for small documents of one's own: the limits of section 9, which keep a hostile sender from
exhausting a reader, are left out, except for those of names, numbers and nesting.
"""

import hashlib
import itertools
import json
import math
import re
from decimal import Decimal
from typing import Any, NamedTuple

MASK = (1 << 64) - 1
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# dtype → bits of an element; the format's text lists them by the bytes of an item.
DTYPES = (
    dict.fromkeys(
        ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8
    )
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(["U16", "I16", "F16", "BF16"], 16)
    | dict.fromkeys(["U32", "I32", "F32"], 32)
    | dict.fromkeys(["U64", "I64", "F64", "C64"], 64)
)


class Refused(Exception):
    """Bytes that a reader must refuse."""


class Tensor(NamedTuple):
    """A row of the layout: its items, and the canonical number of its first word."""

    name: str
    item_bytes: int
    items: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.items * max(self.item_bytes // 2, 1)


Frame = tuple[int, list[list[int]]]


def need(holds: object, why: str) -> None:
    if not holds:
        raise Refused(why)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def add_fingerprints(first: str, second: str, sign: int = 1) -> str:
    lanes = [
        (int(first[i:j], 16) + sign * int(second[i:j], 16)) & MASK for i, j in ((0, 16), (16, 32))
    ]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def canonical(value: Any, depth: int = 0) -> str:
    """RFC 8785: the one text that a value has."""
    if isinstance(value, dict | list):
        need(depth < 64, "nested deeper than 64 levels")
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        rows = (f"{canonical(key)}:{canonical(value[key], depth + 1)}" for key in keys)
        return "{" + ",".join(rows) + "}"
    if isinstance(value, list):
        return "[" + ",".join(canonical(item, depth + 1) for item in value) + "]"
    if isinstance(value, float):
        return _number(value)
    if type(value) is int:
        need(abs(value) < 1 << 53, "an integer beyond 2^53 - 1")
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    """As ECMAScript writes it: the shortest digits that read back as the same number."""
    need(math.isfinite(value), "a number out of range")
    if value == 0:
        return "0"
    sign, parts, exponent = Decimal(repr(value)).normalize().as_tuple()
    digits, minus = "".join(map(str, parts)), "-" * sign
    point = len(digits) + int(exponent)
    if len(digits) <= point <= 21:
        return minus + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return f"{minus}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{minus}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{minus}{digits[0]}{fraction}e{point - 1:+d}"


def parse_json(data: bytes) -> Any:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "an object names a key twice")
        return dict(pairs)

    def no_constant(text: str) -> None:
        raise Refused(f"{text} isn't JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=distinct, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(str(error)) from error


def parse(data: bytes, form: str, fields: str, what: str = "a document") -> dict[str, Any]:
    """A document of a format, in canonical form, with these fields and no feature required."""
    value = parse_json(data)
    need(isinstance(value, dict) and value.get("format") == form, f"{what} isn't {form}")
    try:
        need(canonical(value).encode() == data, "not in canonical form")
    except UnicodeEncodeError as error:
        raise Refused("half of a surrogate pair") from error
    need(value.get("requires", []) == [], "requires an unknown feature")
    return fields_of(value, f"format {fields}", form)


def fields_of(value: Any, fields: str, what: str) -> dict[str, Any]:
    need(isinstance(value, dict) and set(value) == set(fields.split()), f"fields of {what}")
    known: dict[str, Any] = value
    return known


def is_text(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def is_count(value: Any, most: int = (1 << 53) - 1) -> bool:
    return type(value) is int and 0 <= value <= most


def read_layout(data: bytes) -> list[Tensor]:
    document = parse(data, "plait-layout/1", "tensors")
    need(isinstance(document["tensors"], list), "tensors are a list")
    tensors, word = [], 0
    for row in document["tensors"]:
        need(isinstance(row, list) and len(row) == 3, "a row of the layout")
        name, dtype, shape = row
        need(isinstance(name, str) and 0 < len(name.encode()) <= 1024, "a tensor's name")
        need("\0" not in name and name != "__metadata__", "a tensor's name")
        need(isinstance(dtype, str) and dtype in DTYPES, f"dtype {dtype}")
        need(isinstance(shape, list) and len(shape) <= 16 and all(map(is_count, shape)), "a shape")
        bits = math.prod(shape) * DTYPES[dtype]
        need(bits % 8 == 0, "a packed tensor that doesn't fill whole bytes")
        item_bytes = max(DTYPES[dtype] // 8, 1)
        tensors.append(Tensor(name, item_bytes, bits // 8 // item_bytes, word))
        word = tensors[-1].end
    names = [tensor.name.encode() for tensor in tensors]
    need(names == sorted(set(names)), "tensors are sorted, their names unique")
    need(word <= 1 << 48, "more words than a fingerprint numbers")
    return tensors


def runs_of(frame: Frame) -> list[tuple[int, int]]:
    """First word and items of every run, in the order of the frame's items."""
    return [
        (first + repeat * stride, run)
        for first, run, stride, repeats in frame[1]
        for repeat in range(repeats)
    ]


def words_of(item_bytes: int, segments: list[list[int]]) -> list[int]:
    """First word of every item of a frame."""
    width = max(item_bytes // 2, 1)
    return [w + item * width for w, run in runs_of((item_bytes, segments)) for item in range(run)]


def read_cut(data: bytes, layout: bytes) -> list[Frame]:
    """The frames, once they fit the layout."""
    document = parse(data, "plait-cut/1", "requires frames layout")
    need(document["layout"] == digest_of(layout), "the cut of another layout")
    need(isinstance(document["frames"], list), "frames are a list")
    tensors = [tensor for tensor in read_layout(layout) if tensor.items]
    taken: list[tuple[int, int]] = []
    for row in document["frames"]:
        need(isinstance(row, list) and len(row) == 2 and row[0] in (1, 2, 4, 8), "a frame")
        need(type(row[0]) is int and isinstance(row[1], list) and row[1], "a frame's segments")
        for segment in row[1]:
            need(isinstance(segment, list) and len(segment) == 4, "a segment")
            need(all(map(is_count, segment)) and segment[1] and segment[3], "a segment's numbers")
            taken += _fitting(row[0], segment, tensors)
        items = sum(run * repeats for _, run, _, repeats in row[1])
        need(items <= (1 << 24 if row[0] < 3 else (8 << 20) // row[0]), "a frame is too large")
    taken.sort()
    need(all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken)), "a word twice")
    frames: list[Frame] = [(size, segments) for size, segments in document["frames"]]
    return frames


def _fitting(item_bytes: int, segment: list[int], tensors: list[Tensor]) -> list[tuple[int, int]]:
    """The intervals of words of a segment that fits the layout."""
    width = max(item_bytes // 2, 1)
    first, run, stride, repeats = segment
    need(repeats == 1 or stride >= run * width, "runs overlap")
    end = first + (repeats - 1) * stride + run * width
    need(tensors and end <= tensors[-1].end, "beyond the layout")
    held = [tensor for tensor in tensors if tensor.start < end and first < tensor.end]
    need(all(tensor.item_bytes == item_bytes for tensor in held), "another item size")
    need(repeats == 1 or len(held) == 1, "several runs cross tensors")
    need((first - held[0].start) % width == 0, "cuts through an item")
    need(repeats == 1 or stride % width == 0, "cuts through an item")
    return [(word, word + items * width) for word, items in runs_of((item_bytes, [segment]))]


def covers(frames: list[Frame], layout: bytes) -> bool:
    """Whether frames of a checked cut hold every word."""
    words = sum(run * max(frame[0] // 2, 1) for frame in frames for _, run in runs_of(frame))
    return words == max([0, *(tensor.end for tensor in read_layout(layout))])


def read_manifest(data: bytes) -> dict[str, Any]:
    fields = "chunks cut external from kind layout requires side_files statistics to"
    document = parse(data, "plait-manifest/1", fields)
    anchor, chunks, files = (document[name] for name in ("kind", "chunks", "side_files"))
    need(anchor in ("anchor", "delta") and isinstance(document["external"], bool), "its kind")
    anchor = anchor == "anchor"
    need(isinstance(chunks, list) and isinstance(files, list), "chunks and side files are lists")
    need(is_text(document["layout"], DIGEST) and is_text(document["to"], FINGERPRINT), "its ends")
    need(document["cut"] is None or is_text(document["cut"], DIGEST), "its cut")
    need(anchor == (document["from"] is None), "an anchor leads from nothing")
    need(anchor or is_text(document["from"], FINGERPRINT), "where it leads from")
    need(not document["external"] or (anchor and not chunks), "external without chunks")
    need(anchor or not files, "side files of a delta")
    need(not chunks or document["cut"] is not None, "chunks without a cut")
    reached = _check_chunks(chunks, document["from"] or "0" * 32)
    need(document["external"] or reached == document["to"], "the increments don't lead to `to`")
    counts = "changed_bytes changed_elements chunk_bytes dense_bytes total_elements"
    statistics = fields_of(document["statistics"], counts, "statistics")
    need(all(map(is_count, statistics.values())), "statistics are counts")
    need(statistics["chunk_bytes"] == sum(chunk["size"] for chunk in chunks), "chunk_bytes")
    _check_side_files(files)
    return document


def _check_chunks(chunks: list[Any], reached: str) -> str:
    """Checks the entries and adds their increments to where the manifest leads from."""
    seen: set[int] = set()
    last: dict[int, int] = {}
    for chunk in chunks:
        fields_of(chunk, "digest frames increment size slot", "a chunk's entry")
        need(is_text(chunk["digest"], DIGEST), "a chunk's digest")
        need(is_text(chunk["increment"], FINGERPRINT), "a chunk's increment")
        need(is_count(chunk["size"], 64 << 20) and is_count(chunk["slot"], 1 << 20), "a chunk")
        frames = chunk["frames"]
        need(isinstance(frames, list) and frames, "a chunk's frames")
        need(all(is_count(number, (1 << 20) - 1) for number in frames), "a frame's number")
        need(all(a < b for a, b in itertools.pairwise(frames)), "frames increase")
        need(seen.isdisjoint(frames), "a frame in two chunks")
        need(last.get(chunk["slot"], -1) < frames[0], "chunks of a slot are in order")
        seen.update(frames)
        last[chunk["slot"]] = frames[-1]
        reached = add_fingerprints(reached, chunk["increment"])
    return reached


def _check_side_files(files: list[Any]) -> None:
    names: list[str] = []
    for file in files:
        fields_of(file, "digest name size", "a side file")
        name = file["name"]
        need(is_text(file["digest"], DIGEST) and is_count(file["size"], 64 << 20), "a side file")
        need(isinstance(name, str) and 0 < len(name.encode()) <= 255, "a side file's name")
        parts = name.split("/")
        need(not {"", ".", ".."} & set(parts) and parts[0] != ".plait", "a side file's path")
        need("\\" not in name and "\0" not in name, "a side file's path")
        weights = name.endswith(".safetensors") or name == "model.safetensors.index.json"
        need(len(parts) > 1 or not weights, "a side file named as weights")
        names.append(name)
    need(len(set(names)) == len(names), "a side file twice")
    need(not any(a.startswith(b + "/") for a in names for b in names), "a file in a file")


def read_version(data: bytes) -> dict[str, Any]:
    fields = "fingerprint layout metadata nonce parent policy proof requires"
    document = parse(data, "plait-version/1", fields)
    need(is_text(document["fingerprint"], FINGERPRINT), "its fingerprint")
    need(is_text(document["layout"], DIGEST), "its layout")
    need(document["parent"] is None or is_text(document["parent"], DIGEST), "its parent")
    need(document["proof"] in ("full", "incremental", "unproven"), "its proof")
    need(is_text(document["policy"], NAME), "its policy")
    need(isinstance(document["nonce"], str) and 16 <= len(document["nonce"]) <= 64, "its nonce")
    need(isinstance(document["metadata"], dict), "its metadata")
    need(len(canonical(document["metadata"]).encode()) <= 1 << 16, "its metadata")
    return document
