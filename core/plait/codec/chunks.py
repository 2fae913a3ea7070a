"""Chunks: some frames in one ordinary safetensors file, named by the SHA-256 of its bytes.

Anyone's safetensors reader opens it; its directory (directory.py) lets a reader of a part verify
that part.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.numpy
import xxhash

from plait import canonical
from plait.codec.directory import (
    METADATA_KEY,
    FrameRow,
    parse_directory,
    serialize_directory,
    tensor_key,
)
from plait.codec.frames import EncodedFrame
from plait.codec.planes import Plane
from plait.errors import (
    ChunkInvalid,
    DigestMismatch,
    DocumentInvalid,
    FingerprintMismatch,
    LimitExceeded,
    NotFound,
    SizeMismatch,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.limits import CHUNK_BYTES_AIM, CHUNK_BYTES_MAX, CHUNK_HEADER_BYTES_MAX
from plait.manifest import ChunkEntry

# A frame's directory row and tensor entries take about 700 bytes: this stays below 4 MiB of header.
_FRAMES_PER_CHUNK: Final = 2048


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk file, ready to be stored.

    Attributes:
        data: the file.
        digest, size: of `data`.
        slot: grain slot of its frames.
        frames: their numbers, increasing.
        increment: sum of theirs.
    """

    data: bytes
    digest: str
    size: int
    slot: int
    frames: tuple[int, ...]
    increment: Fingerprint

    @property
    def entry(self) -> ChunkEntry:
        """As a manifest names it."""
        return ChunkEntry(self.digest, self.size, self.slot, self.frames, self.increment)


def pack_chunks(frames: Iterable[EncodedFrame], slot: int | Sequence[int] = 0) -> Iterator[Chunk]:
    """Packs frames into chunks of about CHUNK_BYTES_AIM; the same frames make the same bytes.

    Frames that change nothing are left out. One chunk of each slot is held at a time.

    Args:
        frames: of one cut, their numbers increasing.
        slot: that all of them belong to; or the slot of every frame of the cut.
    Raises:
        UsageError: the numbers don't increase, or a frame has no slot.
    """
    held: dict[int, list[EncodedFrame]] = {}
    sizes: dict[int, int] = defaultdict(int)
    last = -1
    for frame in frames:
        if frame.number <= last:
            raise UsageError(f"frame {frame.number} after frame {last}: numbers must increase")
        last = frame.number
        if not frame.count:
            continue
        own, size = _slot_of(frame, slot), frame.stored_size
        group = held.setdefault(own, [])
        if group and (sizes[own] + size > CHUNK_BYTES_AIM or len(group) == _FRAMES_PER_CHUNK):
            chunk, sizes[own] = _chunk(group, own), 0
            group.clear()  # before whoever takes the chunk does anything with it
            yield chunk
        group.append(frame)
        sizes[own] += size
    for number in sorted(held):
        yield _chunk(held[number], number)


def _slot_of(frame: EncodedFrame, slot: int | Sequence[int]) -> int:
    if isinstance(slot, int):
        return slot
    if frame.number >= len(slot):
        raise UsageError(f"frame {frame.number} has no slot: {len(slot)} frames have one")
    return slot[frame.number]


def _chunk(frames: list[EncodedFrame], slot: int) -> Chunk:
    tensors = {
        tensor_key(frame.number, plane.name): np.frombuffer(plane.data, np.uint8)
        for frame in frames
        for plane in frame.planes
    }
    data = safetensors.numpy.save(tensors, {METADATA_KEY: serialize_directory(frames)})
    numbers = tuple(frame.number for frame in frames)
    increment = sum((frame.increment for frame in frames), ZERO)
    return Chunk(data, canonical.digest_of(data), len(data), slot, numbers, increment)


class ChunkReader:
    """The frames of a chunk file whose directory has been checked.

    Attributes:
        numbers: of its frames, increasing.
        increment: sum of their claimed increments.
    """

    def __init__(self, rows: Mapping[int, FrameRow], planes: memoryview) -> None:
        self._rows = rows
        self._planes = planes
        self.numbers = tuple(rows)
        self.increment = sum((row.increment for row in rows.values()), ZERO)

    @property
    def frames(self) -> Iterator[EncodedFrame]:
        """All frames in order, each as `frame` returns it."""
        return map(self.frame, self.numbers)

    def frame(self, number: int) -> EncodedFrame:
        """One frame, its stored bytes checked against their xxh3-64. Its planes view the file.

        Raises:
            NotFound: the chunk doesn't hold it.
            DigestMismatch: its bytes are damaged.
        """
        if number not in self._rows:
            raise NotFound(f"the chunk holds no frame {number}")
        row = self._rows[number]
        stored = self._planes[row.start : row.end]
        found = xxhash.xxh3_64_hexdigest(stored)
        if found != row.checksum:
            raise DigestMismatch(
                f"bytes of frame {number} have xxh3 {found}, expected {row.checksum}",
                expected=row.checksum,
                found=found,
            )
        planes, offset = [], 0
        for name, raw_size, size in row.planes:
            planes.append(Plane(name, raw_size, stored[offset : offset + size]))
            offset += size
        return EncodedFrame(number, row.mode, row.count, tuple(planes), row.increment)


def read_chunk(data: bytes | memoryview, *, entry: ChunkEntry | None = None) -> ChunkReader:
    """Opens a chunk file.

    Args:
        data: the whole file; the frames' planes are views of it.
        entry: what the manifest says of it: then size, digest, frames and increment are compared.
    Raises:
        ChunkInvalid, UnsupportedFormat, LimitExceeded: not a chunk file that this release reads.
        SizeMismatch, DigestMismatch: not the file that the entry names.
        FingerprintMismatch: its increments don't add up to the entry's.
    """
    view = memoryview(data)
    if len(view) > CHUNK_BYTES_MAX:
        raise LimitExceeded(f"chunk of {len(view)} bytes; at most {CHUNK_BYTES_MAX}")
    if entry is not None:
        _check_bytes(view, entry)
    header, planes = _open(view)
    rows = parse_directory(header)
    _check_tensors(header, rows, len(planes))
    reader = ChunkReader({row.number: row for row in rows}, planes)
    if entry is not None:
        _check_entry(reader, entry)
    return reader


def _check_bytes(view: memoryview, entry: ChunkEntry) -> None:
    if len(view) != entry.size:
        raise SizeMismatch(
            f"chunk {entry.digest} has {len(view)} bytes, expected {entry.size}",
            expected=entry.size,
            found=len(view),
        )
    found = canonical.digest_of(view)
    if found != entry.digest:
        raise DigestMismatch(
            f"chunk has digest {found}, expected {entry.digest}",
            expected=entry.digest,
            found=found,
        )


def _check_entry(reader: ChunkReader, entry: ChunkEntry) -> None:
    if reader.numbers != entry.frames:
        raise ChunkInvalid(
            f"chunk {entry.digest} holds the frames {reader.numbers[:16]}, "
            f"its manifest says {entry.frames[:16]}"
        )
    if reader.increment != entry.increment:
        raise FingerprintMismatch(
            f"increments of chunk {entry.digest} add up to {reader.increment}, "
            f"its manifest says {entry.increment}",
            expected=str(entry.increment),
            found=str(reader.increment),
        )


def _open(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The safetensors header and the bytes after it."""
    length = int.from_bytes(view[:8], "little")
    if length > CHUNK_HEADER_BYTES_MAX:
        raise LimitExceeded(f"chunk header of {length} bytes; at most {CHUNK_HEADER_BYTES_MAX}")
    if len(view) < 8 + length:
        raise ChunkInvalid(f"chunk of {len(view)} bytes ends within its header")
    try:
        header = canonical.read(bytes(view[8 : 8 + length]))
    except DocumentInvalid as error:
        raise ChunkInvalid(f"chunk header: {error}") from error
    if not isinstance(header, dict):
        raise ChunkInvalid("chunk header is not a JSON object")
    return header, view[8 + length :]


def _check_tensors(header: Mapping[str, Any], rows: list[FrameRow], size: int) -> None:
    """The header's tensors are the directory's planes, one behind the other, and nothing else."""
    expected: dict[str, Any] = {}
    end = 0
    for row in rows:
        for name, _, stored in row.planes:
            offsets = [end, end + stored]
            expected[tensor_key(row.number, name)] = {
                "dtype": "U8",
                "shape": [stored],
                "data_offsets": offsets,
            }
            end += stored
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    # As text: to Python, 5.0 and 5 are equal, and so are False and 0.
    if _as_text(tensors) != _as_text(expected):
        odd = sorted(
            key
            for key in tensors | expected
            if key not in expected or _as_text(tensors.get(key)) != _as_text(expected[key])
        )
        raise ChunkInvalid(f"tensors and directory of the chunk disagree: {odd[:4]!r:.200}")
    if end != size:
        raise ChunkInvalid(f"chunk holds {size} bytes of planes, its directory {end}")


def _as_text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
