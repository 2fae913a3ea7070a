"""The redo journal of a checkout: what a move will write, on disk before it writes anything.

Absolute bits, so that replaying it twice is as good as once. Its name appears only when it is whole
and durable; from then on the move will be finished, by this run or by the next.

    b"plait-redo/1\\n"
    u64 length, header (JSON): the version that the move leads to
    records: u64 item bytes, u64 count, u64 lane 0, u64 lane 1, i64 words[count], bits[count]
    u64 0, and the xxh3-128 of everything before
"""

import io
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from plait.codec.algebra import FrameDelta
from plait.cut import FrameSpec
from plait.errors import BaseMismatch, CorruptionError, FingerprintMismatch
from plait.fingerprint import ZERO, Fingerprint, fingerprint_at
from plait.weights import UNSIGNED, Weights
from plait_client.disk import open_regular, sync_folder
from plait_client.failpoints import failpoint
from plait_client.words import Words, read_items, write_items

TEMPORARY: Final = "journal.tmp"  # name of a journal that isn't whole yet
_MAGIC: Final = b"plait-redo/1\n"
_LENGTH: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct("<QQQQ")
_HASH_BYTES: Final = 16
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """New bits of one frame.

    Attributes:
        words: int64 [count], first words of the items.
        bits: unsigned [count].
        proof: fingerprint of these bits at these words.
    """

    words: Words
    bits: NDArray[Any]
    proof: Fingerprint


def redo_records(
    weights: Weights, frames: Iterable[tuple[FrameSpec, FrameDelta]]
) -> Iterator[tuple[Record, Fingerprint]]:
    """What deltas will make of these weights, and by how much the fingerprint grows.

    Raises:
        BaseMismatch: touched words aren't the ones that a delta was made from.
    """
    for frame, delta in frames:
        words = frame.words_of(delta.positions)
        old = read_items(weights, words, frame.item_bytes)
        new = old + delta.differences
        proof = fingerprint_at(words, new)
        increment = proof - fingerprint_at(words, old)
        if increment != delta.increment:
            raise BaseMismatch(
                f"weights near word {int(words[0])} aren't the base of this delta: they add "
                f"{increment}, expected {delta.increment}",
                remedy="the files were changed by someone else; check out with --rebuild",
            )
        yield Record(words, new, proof), increment


def write_journal(
    path: Path,
    header: dict[str, Any],
    records: Iterable[tuple[Record, Fingerprint]],
    *,
    expected: Fingerprint,
) -> None:
    """Write a journal under a temporary name, and rename it when it is whole and durable.

    Args:
        expected: what all increments must add up to.

    Raises:
        FingerprintMismatch: they add up to something else; nothing is left behind.
        BaseMismatch: from `records`.
        OSError: the disk refuses.
    """
    temporary = path.with_name(TEMPORARY)
    total = ZERO
    with temporary.open("wb") as file:
        sink = _Hashing(file)
        text = json.dumps(header).encode()
        sink.write(_MAGIC + _LENGTH.pack(len(text)) + text)
        for record, increment in records:
            lanes = (record.proof.lane0, record.proof.lane1)
            sink.write(_RECORD.pack(record.bits.itemsize, record.words.size, *lanes))
            sink.write(np.ascontiguousarray(record.words, "<i8").data)
            sink.write(np.ascontiguousarray(record.bits).data)
            total += increment
            failpoint("journal.record")
        if total != expected:
            raise FingerprintMismatch(
                f"the plan's deltas add {total} to these weights, expected {expected}",
                expected=str(expected),
                found=str(total),
            )
        sink.write(_LENGTH.pack(0))
        file.write(sink.hash.digest())
        file.flush()
        os.fsync(file.fileno())
    failpoint("journal.synced")
    temporary.replace(path)
    sync_folder(path.parent)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a journal whose every byte is the one that was written.

    Raises:
        CorruptionError: it isn't; a whole journal never changes, so its disk is to blame.
    """
    _check(path)
    with path.open("rb") as file:
        file.seek(len(_MAGIC))
        (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = json.loads(file.read(size))
    assert isinstance(header, dict)
    return header


def replay(path: Path, weights: Weights) -> None:
    """Write every record's bits, then read all of them back and prove them. The journal is checked.

    Raises:
        FingerprintMismatch: a touched word doesn't read as it was written.
    """
    for record in _records(path):
        write_items(weights, record.words, record.bits)
        failpoint("journal.scattered")
    for record in _records(path):
        live = read_items(weights, record.words, record.bits.itemsize)
        found = fingerprint_at(record.words, live)
        if found != record.proof:
            raise FingerprintMismatch(
                f"words near {int(record.words[0])} read back as {found}, expected {record.proof}",
                expected=str(record.proof),
                found=str(found),
            )


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        file.seek(len(_MAGIC))
        (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
        file.seek(size, io.SEEK_CUR)
        while item_bytes := _LENGTH.unpack(file.read(_LENGTH.size))[0]:
            count, lane0, lane1 = struct.unpack("<QQQ", file.read(_RECORD.size - _LENGTH.size))
            words = np.frombuffer(file.read(8 * count), "<i8").astype(np.int64, copy=False)
            bits = np.frombuffer(file.read(item_bytes * count), UNSIGNED[item_bytes])
            yield Record(words, bits, Fingerprint(lane0, lane1))


def _check(path: Path) -> None:
    digest = xxhash.xxh3_128()
    file = open_regular(path)
    if file is None:
        raise CorruptionError(f"{path} isn't a regular file", remedy="check out with --rebuild")
    with file:
        left = os.fstat(file.fileno()).st_size - _HASH_BYTES
        intact = left > len(_MAGIC) and file.read(len(_MAGIC)) == _MAGIC
        file.seek(0)
        while intact and left > 0:
            data = file.read(min(left, _READ_BYTES))
            digest.update(data)
            left -= len(data)
        if not intact or file.read() != digest.digest():
            raise CorruptionError(
                f"the redo journal {path} is damaged", remedy="check out with --rebuild"
            )


class _Hashing:
    """A file that remembers the hash of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.hash.update(data)
