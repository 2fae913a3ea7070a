"""The manifest: the canonical document that leads from one state of the weights to another.

A version is committed with one manifest and may gain more (an anchor, a squashed delta).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal

from plait import canonical
from plait.errors import DocumentInvalid, FingerprintMismatch, LimitExceeded
from plait.fields import parse_digest, parse_integer, parse_object
from plait.fingerprint import ZERO, Fingerprint
from plait.limits import (
    CHUNK_BYTES_MAX,
    CHUNKS_PER_MANIFEST_MAX,
    FRAMES_MAX,
    INTEGER_MAX,
    SIDE_FILE_BYTES_MAX,
    SIDE_FILES_MAX,
)
from plait.names import check_side_file_name

MANIFEST_FORMAT: Final = "plait-manifest/1"


Kind = Literal["delta", "anchor"]


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One chunk as a manifest names it.

    Attributes:
        digest, size: of the stored bytes.
        slot: the grain slot that its frames belong to (0 where the cut has one slot).
        frames: numbers in the cut, increasing.
        increment: sum of its frames' fingerprint increments.
    """

    digest: str
    size: int
    slot: int
    frames: tuple[int, ...]
    increment: Fingerprint

    def to_document(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "size": self.size,
            "slot": self.slot,
            "frames": list(self.frames),
            "increment": str(self.increment),
        }

    @classmethod
    def parse(cls, row: object) -> "ChunkEntry":
        known = parse_object(row, {"digest", "size", "slot", "frames", "increment"}, "chunk")
        frames = known["frames"]
        if not isinstance(frames, list) or not frames:
            raise DocumentInvalid("a chunk's 'frames' must be a non-empty list")
        numbers = tuple(parse_integer(number, "frame number", FRAMES_MAX - 1) for number in frames)
        if any(a >= b for a, b in itertools.pairwise(numbers)):
            raise DocumentInvalid(f"a chunk's frame numbers must increase: {numbers[:16]}")
        return cls(
            digest=parse_digest(known["digest"], "chunk digest"),
            size=parse_integer(known["size"], "chunk size", CHUNK_BYTES_MAX),
            slot=parse_integer(known["slot"], "chunk slot", FRAMES_MAX),
            frames=numbers,
            increment=Fingerprint.parse(known["increment"]),
        )


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that travels with an anchor (config, tokenizer), stored as one object."""

    name: str
    digest: str
    size: int

    def to_document(self) -> dict[str, Any]:
        return {"name": self.name, "digest": self.digest, "size": self.size}

    @classmethod
    def parse(cls, row: object) -> "SideFile":
        known = parse_object(row, {"name", "digest", "size"}, "side file")
        return cls(
            name=check_side_file_name(known["name"]),
            digest=parse_digest(known["digest"], "side file digest"),
            size=parse_integer(known["size"], "side file size", SIDE_FILE_BYTES_MAX),
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a manifest changes and costs. Packed bytes of a sub-byte type count as elements.

    Attributes:
        changed_elements: elements whose bits differ between base and target; all of the layout's
            in an anchor.
        changed_bytes: their bytes, uncompressed.
        total_elements, dense_bytes: of the layout.
        chunk_bytes: sum of the chunks' sizes.
    """

    changed_elements: int
    changed_bytes: int
    total_elements: int
    dense_bytes: int
    chunk_bytes: int

    def to_document(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def parse(cls, row: object) -> "Statistics":
        names = {f.name for f in fields(cls)}
        row = parse_object(row, names, "statistics")
        return cls(**{name: parse_integer(row[name], name, INTEGER_MAX) for name in names})


@dataclass(frozen=True)
class Manifest:
    """Leads from one state to another, or from nothing to one.

    Attributes:
        kind: `delta` has a base, `anchor` has none.
        layout, cut: digests; `cut` is None where there are no chunks.
        base: the state it leads from (*from*); None in an anchor.
        target: the state it leads to (*to*).
        chunks: the delta's frames that changed; every frame of an anchor.
        external: an anchor whose bytes both sides already hold: no chunks.
        side_files: anchors only.

    Raises:
        DocumentInvalid: the parts contradict each other.
        FingerprintMismatch: base + increments isn't target.
    """

    kind: Kind
    layout: str
    cut: str | None
    base: Fingerprint | None
    target: Fingerprint
    chunks: tuple[ChunkEntry, ...]
    statistics: Statistics
    external: bool = False
    side_files: tuple[SideFile, ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_shape()
        if not self.external:
            self._check_sum()

    def _check_shape(self) -> None:
        if (self.kind == "delta") == (self.base is None):
            raise DocumentInvalid("a delta has a base and an anchor has none")
        if self.external and (self.kind != "anchor" or self.chunks):
            raise DocumentInvalid("an external manifest is an anchor without chunks")
        if self.chunks and self.cut is None:
            raise DocumentInvalid("a manifest with chunks names its cut")
        if self.side_files and self.kind != "anchor":
            raise DocumentInvalid("side files travel with anchors only")
        if len(self.chunks) > CHUNKS_PER_MANIFEST_MAX or len(self.side_files) > SIDE_FILES_MAX:
            raise LimitExceeded(
                f"{len(self.chunks)} chunks and {len(self.side_files)} side files; "
                f"at most {CHUNKS_PER_MANIFEST_MAX} and {SIDE_FILES_MAX}"
            )
        _check_frames(self.chunks)
        names = [side_file.name for side_file in self.side_files]
        folders = {name[:end] for name in names for end in range(len(name)) if name[end] == "/"}
        if len(set(names)) != len(names) or not folders.isdisjoint(names):
            raise DocumentInvalid("two side files have one name, or one lies in the other")
        if self.statistics.chunk_bytes != self.chunk_bytes:
            raise DocumentInvalid(
                f"statistics say {self.statistics.chunk_bytes} bytes of chunks, "
                f"these have {self.chunk_bytes}"
            )

    def _check_sum(self) -> None:
        reached = sum((chunk.increment for chunk in self.chunks), self.base or ZERO)
        if reached != self.target:
            raise FingerprintMismatch(
                f"base and increments add up to {reached}, not to the target {self.target}: "
                "a change is lost or counted twice",
                expected=str(self.target),
                found=str(reached),
            )

    @property
    def increment(self) -> Fingerprint:
        """Target minus base."""
        return self.target - (self.base or ZERO)

    @property
    def chunk_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes."""
        return canonical.serialize(self.to_document())

    @cached_property
    def digest(self) -> str:
        return canonical.digest_of(self.data)

    def to_document(self) -> dict[str, Any]:
        return {
            "format": MANIFEST_FORMAT,
            "requires": [],
            "kind": self.kind,
            "layout": self.layout,
            "cut": self.cut,
            "from": None if self.base is None else str(self.base),
            "to": str(self.target),
            "external": self.external,
            "chunks": [chunk.to_document() for chunk in self.chunks],
            "side_files": [side_file.to_document() for side_file in self.side_files],
            "statistics": self.statistics.to_document(),
        }

    @classmethod
    def parse(cls, data: bytes | str) -> "Manifest":
        return cls.from_document(canonical.parse(data, expected_format=MANIFEST_FORMAT))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Manifest":
        """From a parsed JSON object (a commit carries it inline).

        Raises:
            DocumentInvalid, UnsupportedFormat, LimitExceeded, FingerprintMismatch.
        """
        canonical.check_header(document, expected_format=MANIFEST_FORMAT)
        row = parse_object(document, _MANIFEST_FIELDS, "manifest")
        if row["kind"] not in ("delta", "anchor") or not isinstance(row["external"], bool):
            raise DocumentInvalid(f"unknown kind of manifest: {row['kind']!r:.80}")
        if not isinstance(row["chunks"], list) or not isinstance(row["side_files"], list):
            raise DocumentInvalid("'chunks' and 'side_files' must be lists")
        canonical.check_length(row["chunks"], CHUNKS_PER_MANIFEST_MAX, "chunks")
        canonical.check_length(row["side_files"], SIDE_FILES_MAX, "side files")
        _check_frames_in_all(row["chunks"])
        return cls(
            kind=row["kind"],
            layout=parse_digest(row["layout"], "layout digest"),
            cut=None if row["cut"] is None else parse_digest(row["cut"], "cut digest"),
            base=None if row["from"] is None else Fingerprint.parse(row["from"]),
            target=Fingerprint.parse(row["to"]),
            chunks=tuple(ChunkEntry.parse(chunk) for chunk in row["chunks"]),
            statistics=Statistics.parse(row["statistics"]),
            external=row["external"],
            side_files=tuple(SideFile.parse(side_file) for side_file in row["side_files"]),
        )


_MANIFEST_FIELDS: Final = {
    "format", "requires", "kind", "layout", "cut", "from", "to",
    "external", "chunks", "side_files", "statistics",
}  # fmt: skip


def _check_frames(chunks: tuple[ChunkEntry, ...]) -> None:
    """No frame is in two chunks, and those of one slot go through its frames in order.

    So whoever goes through the frames by slot and number reads every chunk once.
    """
    numbers = [number for chunk in chunks for number in chunk.frames]
    if len(set(numbers)) != len(numbers):
        raise DocumentInvalid("a frame occurs in two chunks")
    reached: dict[int, int] = {}
    for chunk in chunks:
        if chunk.frames[0] < reached.get(chunk.slot, 0):
            raise DocumentInvalid(
                f"a chunk of slot {chunk.slot} begins with frame {chunk.frames[0]}, behind one "
                f"that reaches frame {reached[chunk.slot]}: the chunks of a slot are in order"
            )
        reached[chunk.slot] = chunk.frames[-1]


def _check_frames_in_all(rows: list[Any]) -> None:
    """Before anything is built of chunks: they hold no more frames than a cut has."""
    lists = (row.get("frames") for row in rows if isinstance(row, Mapping))
    count = sum(len(frames) for frames in lists if isinstance(frames, list))
    if count > FRAMES_MAX:
        raise LimitExceeded(f"{count} frames of all chunks; at most {FRAMES_MAX}")
