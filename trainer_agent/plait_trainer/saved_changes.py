"""Uncommitted changes in a trainer's checkpoint: chunks as the registry's, and a document about
them, as bytes in tensors.

A tuple of tensors, since `torch.save` writes them as they are (`bytes` would take half as much
again), and `torch.distributed.checkpoint` writes a tuple as one object, of whatever size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from plait import canonical
from plait.codec.chunks import pack_chunks, read_chunk
from plait.codec.frames import decode_delta
from plait.errors import ChunkInvalid, DigestMismatch, DocumentInvalid, SizeMismatch
from plait.fields import parse_digest, parse_integer, parse_object
from plait.fingerprint import Fingerprint
from plait.limits import CHUNK_BYTES_MAX, FRAMES_MAX, INTEGER_MAX
from plait_trainer.deltas import Deltas, encode_changes
from plait_trainer.share import Share
from plait_trainer.steps import Step, Uncommitted

FORMAT: Final = "plait-trainer-changes/1"

_AS: Final = "save and load the state with torch.save or torch.distributed.checkpoint"

# The document, and then the chunks that it names, in its order.
Packed = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class SavedChanges:
    """Uncommitted changes as a checkpoint holds them: every byte is checked, none decoded.

    Attributes:
        cut: digest of the cut whose frames they change.
        frames: first and number of those that the process published.
        start, end: as in `Uncommitted`.
        steps: number of each, and its chunks.
    """

    cut: str
    frames: tuple[int, int]
    start: int
    end: Fingerprint
    steps: tuple[tuple[int, tuple[memoryview, ...]], ...]

    @classmethod
    def read(cls, packed: object, digest: object) -> "SavedChanges":
        """What `pack` has made.

        Args:
            digest: of the document.
        Raises:
            DocumentInvalid, UnsupportedFormat, LimitExceeded: not a document about changes.
            SizeMismatch, DigestMismatch: bytes are missing or others.
        """
        parts = _bytes_of(packed)
        _check(parts[0], digest=parse_digest(digest, "the changes' digest"))
        document = canonical.parse(bytes(parts[0]), expected_format=FORMAT)
        fields = parse_object(document, _FIELDS, "document about changes")
        first, count = (
            parse_integer(fields[name], name, FRAMES_MAX) for name in ("first_frame", "frames")
        )
        start = parse_integer(fields["start"], "a state's number", INTEGER_MAX)
        steps = list(_steps(fields["steps"], parts[1:], start))
        cut = parse_digest(fields["cut"], "a cut")
        return cls(cut, (first, count), start, Fingerprint.parse(fields["end"]), tuple(steps))

    def is_of(self, share: Share) -> bool:
        """Whether they are changes of just this share."""
        return (self.cut, self.frames) == (share.cut.cut.digest, _frames_of(share))

    def unpack(self, share: Share) -> Uncommitted:
        """
        Raises:
            ChunkInvalid, DigestMismatch: the chunks aren't deltas of the share's frames.
        """
        steps = (Step(number, _unpack(chunks, share)) for number, chunks in self.steps)
        return Uncommitted(self.start, tuple(steps), self.end)


def pack(share: Share, changes: Uncommitted) -> tuple[Packed, str]:
    """Changes of a share as a checkpoint's tensors, and the digest of their document."""
    tensors, steps = [], []
    for step in changes.steps:
        rows = []
        for chunk in pack_chunks(encode_changes(share.cut.cut, step.deltas)):
            tensors.append(_tensor_of(chunk.data))
            rows.append([chunk.digest, chunk.size])
        steps.append({"number": step.number, "chunks": rows})
    first, count = _frames_of(share)
    document = canonical.serialize(
        {
            "format": FORMAT, "requires": [], "cut": share.cut.cut.digest, "first_frame": first,
            "frames": count, "start": changes.start, "end": str(changes.end), "steps": steps,
        }
    )  # fmt: skip
    return (_tensor_of(document), *tensors), canonical.digest_of(document)


_FIELDS: Final = {
    "format", "requires", "cut", "first_frame", "frames", "start", "end", "steps",
}  # fmt: skip


def _frames_of(share: Share) -> tuple[int, int]:
    return (share.numbers[0] if share.numbers else 0, len(share.numbers))


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(packed: object) -> list[memoryview]:
    if not isinstance(packed, tuple) or not packed:
        raise DocumentInvalid(
            f"changes are held in a tuple, got {type(packed).__name__}", remedy=_AS
        )
    for part in packed:
        if not isinstance(part, torch.Tensor) or part.dtype != torch.uint8 or part.ndim != 1:
            raise DocumentInvalid(
                f"changes lie in uint8 tensors, got {type(part).__name__}", remedy=_AS
            )
    return [memoryview(part.detach().cpu().contiguous().numpy()) for part in packed]


def _check(data: memoryview, *, digest: str, size: int | None = None) -> None:
    if size is not None and len(data) != size:
        raise SizeMismatch(
            f"changes {digest} in the checkpoint have {len(data)} bytes, expected {size}",
            expected=size, found=len(data),
        )  # fmt: skip
    found = canonical.digest_of(data)
    if found != digest:
        raise DigestMismatch(
            f"changes in the checkpoint have the digest {found}, expected {digest}",
            remedy="the checkpoint is damaged: load an older one",
            expected=digest, found=found,
        )  # fmt: skip


def _steps(
    rows: object, parts: Sequence[memoryview], last: int
) -> Iterator[tuple[int, tuple[memoryview, ...]]]:
    if not isinstance(rows, list) or not rows:
        raise DocumentInvalid("a document about changes lists at least one step")
    taken = 0
    for row in rows:
        step = parse_object(row, {"number", "chunks"}, "step")
        number = parse_integer(step["number"], "a state's number", INTEGER_MAX)
        if number <= last or not isinstance(step["chunks"], list):
            raise DocumentInvalid(f"step {number} after state {last}: numbers must increase")
        last, chunks = number, parts[taken : taken + len(step["chunks"])]
        taken += len(chunks)
        if len(chunks) < len(step["chunks"]):
            raise SizeMismatch(f"the checkpoint holds {len(parts)} chunks of changes, and not all")
        for chunk, named in zip(chunks, step["chunks"], strict=True):
            if not isinstance(named, list) or len(named) != 2:
                raise DocumentInvalid("a chunk of changes is named by its digest and size")
            size = parse_integer(named[1], "a chunk's size", CHUNK_BYTES_MAX)
            _check(chunk, digest=parse_digest(named[0], "a chunk"), size=size)
        yield number, tuple(chunks)
    if taken != len(parts):
        raise SizeMismatch(f"the checkpoint holds {len(parts)} chunks of changes, expected {taken}")


def _unpack(chunks: Sequence[memoryview], share: Share) -> Deltas:
    deltas: dict[int, Any] = {}
    first, count = _frames_of(share)
    for chunk in chunks:
        for encoded in read_chunk(chunk).frames:
            if not first <= encoded.number < first + count or encoded.number in deltas:
                raise ChunkInvalid(f"changes of frame {encoded.number}, which isn't of the share")
            frame = share.cut.cut.frames[encoded.number]
            deltas[encoded.number] = decode_delta(encoded, frame)
    return deltas
