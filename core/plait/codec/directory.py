"""The directory of a chunk: a canonical document in the safetensors metadata, one row a frame.

Each plane is a U8 tensor `<frame number, 7 digits>.<plane>`; names sort, so a frame's planes lie
together, in the row's order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from plait import canonical
from plait.codec.frames import MODES, EncodedFrame, Mode
from plait.errors import ChunkInvalid, DocumentInvalid, LimitExceeded
from plait.fingerprint import Fingerprint
from plait.limits import FRAME_ELEMENTS_MAX, FRAMES_MAX

FORMAT: Final = "plait-chunk/1"
METADATA_KEY: Final = "plait"

_FIELDS: Final = {"number", "mode", "count", "planes", "xxh3", "increment"}


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame's row.

    Attributes:
        number, mode, count, increment: as in EncodedFrame.
        planes: name, raw size and stored size of each.
        checksum: xxh3-64 of its stored planes, 16 hex digits.
        start, end: where these lie in the data of the file.
    """

    number: int
    mode: Mode
    count: int
    planes: tuple[tuple[str, int, int], ...]
    checksum: str
    increment: Fingerprint
    start: int
    end: int


def tensor_key(number: int, plane: str) -> str:
    return f"{number:07d}.{plane}"


def serialize_directory(frames: Iterable[EncodedFrame]) -> str:
    rows = [
        {
            "number": frame.number,
            "mode": frame.mode,
            "count": frame.count,
            "planes": [[p.name, p.raw_size, p.stored_size] for p in frame.planes],
            "xxh3": frame.checksum,
            "increment": str(frame.increment),
        }
        for frame in frames
    ]
    return canonical.serialize({"format": FORMAT, "requires": [], "frames": rows}).decode()


def parse_directory(header: Mapping[str, Any]) -> list[FrameRow]:
    """The rows of a safetensors header, in order of their numbers.

    Raises:
        ChunkInvalid: the header holds no directory, or a broken one.
        LimitExceeded: a number or a count beyond limits.py.
        UnsupportedFormat: of another release.
    """
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or set(metadata) != {METADATA_KEY}:
        raise ChunkInvalid(f"a chunk's metadata holds {METADATA_KEY!r}, its directory, alone")
    text = metadata[METADATA_KEY]
    if not isinstance(text, str):
        raise ChunkInvalid(f"a chunk's directory is a string, got {type(text).__name__}")
    try:
        directory = canonical.parse(text, expected_format=FORMAT)
        frames = directory["frames"]
        if set(directory) != {"format", "requires", "frames"} or not isinstance(frames, list):
            raise DocumentInvalid("its fields are format, requires, frames")
        rows = _parse_rows(frames)
    except (DocumentInvalid, KeyError) as error:
        raise ChunkInvalid(f"directory of the chunk: {error}") from error
    if not rows:
        raise ChunkInvalid("a chunk without frames")
    return rows


def _parse_rows(frames: list[Any]) -> list[FrameRow]:
    rows: list[FrameRow] = []
    for row in frames:
        rows.append(_parse_row(row, rows[-1].end if rows else 0))
        if len(rows) > 1 and rows[-2].number >= rows[-1].number:
            raise DocumentInvalid(f"frame {rows[-1].number} after frame {rows[-2].number}")
    return rows


def _parse_row(row: object, start: int) -> FrameRow:
    if not isinstance(row, dict) or set(row) != _FIELDS:
        raise DocumentInvalid(f"a frame's row has the fields {', '.join(sorted(_FIELDS))}")
    number, mode, count, planes = row["number"], row["mode"], row["count"], row["planes"]
    if type(number) is not int or type(count) is not int or number < 0 or count < 1:
        raise DocumentInvalid(f"impossible frame {number!r:.40} of {count!r:.40} elements")
    if number >= FRAMES_MAX or count > FRAME_ELEMENTS_MAX:
        raise LimitExceeded(
            f"frame {number} of {count} elements; at most number {FRAMES_MAX - 1} and "
            f"{FRAME_ELEMENTS_MAX} elements"
        )
    if mode not in MODES:
        raise DocumentInvalid(f"frame {number} has the unknown mode {mode!r:.40}")
    if not isinstance(planes, list) or not isinstance(row["xxh3"], str):
        raise DocumentInvalid(f"frame {number}: 'planes' is a list and 'xxh3' a string")
    sizes = tuple(_parse_plane(plane, number) for plane in planes)
    names = [name for name, _, _ in sizes]
    if names != sorted(set(names)):
        raise DocumentInvalid(f"frame {number}: planes are sorted and named once: {names!s:.200}")
    end = start + sum(size for _, _, size in sizes)
    increment = Fingerprint.parse(row["increment"])
    return FrameRow(number, mode, count, sizes, row["xxh3"], increment, start, end)


def _parse_plane(plane: object, number: int) -> tuple[str, int, int]:
    match plane:
        case [str(name), raw_size, size] if type(raw_size) is int and type(size) is int:
            if 0 < size <= raw_size:
                return name, raw_size, size
    raise DocumentInvalid(f"frame {number} has an impossible plane: {str(plane)[:80]}")
