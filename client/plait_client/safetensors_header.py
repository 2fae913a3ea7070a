"""The header of a safetensors file, read strictly and written in one way.

The library's own readers hand out tensors; plait needs the place of each tensor's bits in the file,
for every dtype, without a copy.
"""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plait.errors import CheckpointInvalid, LayoutInvalid
from plait.layout import TensorSpec
from plait_client.disk import open_regular

_HEADER_BYTES_MAX: Final = 100_000_000  # the safetensors library's own limit
_LENGTH: Final = struct.Struct("<Q")
METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its bits begin in its file, in bytes."""

    spec: TensorSpec
    offset: int


def read_header(path: Path) -> list[StoredTensor]:
    """Every tensor of a safetensors file.

    Raises:
        CheckpointInvalid: not a regular file, truncated, tensors that overlap, leave gaps or have
            other sizes than their shapes say, a name twice.
        OSError: the file can't be read.
    """
    file = open_regular(path)
    if file is None:
        raise CheckpointInvalid(f"{path} isn't a regular file")
    with file:
        found = os.fstat(file.fileno())
        prefix = file.read(_LENGTH.size)
        size = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
        if not 2 <= size <= min(_HEADER_BYTES_MAX, found.st_size - _LENGTH.size):
            raise CheckpointInvalid(
                f"{path} isn't a whole safetensors file: {found.st_size} bytes, header of {size}",
                remedy="copy or download the file again",
            )
        header = file.read(size)
    return _tensors(path, header, data_start=_LENGTH.size + size, file_size=found.st_size)


def header_of(specs: Iterable[TensorSpec]) -> tuple[bytes, list[StoredTensor]]:
    """The bytes before the data of a new file, and where each tensor goes.

    Wide items come first, so that every tensor is aligned to its item size in the file.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.item_bytes, spec.name.encode()))
    rows: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    ends = []
    for spec in ordered:
        rows[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        ends.append(end)
        end += spec.nbytes
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = _LENGTH.size + len(text)
    stored = [StoredTensor(s, start + offset) for s, offset in zip(ordered, ends, strict=True)]
    return _LENGTH.pack(len(text)) + text, stored


def _tensors(path: Path, header: bytes, *, data_start: int, file_size: int) -> list[StoredTensor]:
    try:
        rows = json.loads(header, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{path}: header isn't JSON: {error}") from error
    if not isinstance(rows, dict):
        raise CheckpointInvalid(f"{path}: header isn't a JSON object")
    rows.pop(METADATA, None)
    placed = sorted(
        (_row(path, name, row) for name, row in rows.items()), key=lambda item: item[1:]
    )
    end = 0
    for spec, first, last in placed:
        if first != end or last - first != spec.nbytes:
            raise CheckpointInvalid(
                f"{path}: {spec.name!r} lies at bytes {first} to {last}; expected {spec.nbytes} "
                f"bytes ({spec.dtype}{list(spec.shape)}) from byte {end} on"
            )
        end = last
    if data_start + end != file_size:
        raise CheckpointInvalid(
            f"{path} has {file_size} bytes; its header describes {data_start + end}",
            remedy="copy or download the file again",
        )
    return [StoredTensor(spec, data_start + first) for spec, first, _ in placed]


def _row(path: Path, name: str, row: object) -> tuple[TensorSpec, int, int]:
    match row:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, last]} if all(
            type(number) is int for number in (first, last, *shape)
        ):
            try:
                return TensorSpec(name, dtype, tuple(shape)), first, last
            except LayoutInvalid as error:
                raise CheckpointInvalid(f"{path}: {error.message}") from error
    raise CheckpointInvalid(f"{path}: {name!r} isn't described as safetensors does: {row!r:.200}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"names occur twice: {', '.join(twice[:8])}")
    return fields
