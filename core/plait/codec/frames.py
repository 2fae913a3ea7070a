"""Frames: the independently coded unit. Pure functions of arrays and bytes, for any thread pool.

A decoder trusts nothing but the cut's `FrameSpec`, which the caller has checked against the
layout: every size follows from it and from the frame's count, and is compared before anything of
that size is allocated.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from plait.codec import dense
from plait.codec.algebra import FrameDelta
from plait.codec.planes import Bytes, Plane, pack_plane, unpack_plane
from plait.codec.sparse import decode_sparse, encode_sparse, sizes_allowed
from plait.cut import FrameSpec, items_max
from plait.errors import ChunkInvalid, FingerprintMismatch, LimitExceeded
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run
from plait.limits import FRAME_ELEMENTS_MAX, FRAMES_MAX
from plait.weights import (
    Weights,
    fingerprint_items,
    gather,
    pieces,
    readable_bits,
)
from plait.workers import Workers

Mode = Literal["delta", "wide", "dense"]
MODES: Final[tuple[str, ...]] = get_args(Mode)

# Smaller planes are decompressed before another thread has woken up.
_SHARED_BYTES_MIN: Final = 1 << 19

_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "delta": frozenset({"gap", "class", "small", "raw", "byte", "restart"}),
    "wide": frozenset(dense.plane_names(8)),
    "dense": frozenset(dense.plane_names(8)),
}


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """One frame as a chunk stores it.

    Attributes:
        number: in the cut.
        mode: `delta`, `wide` or `dense`.
        count: changed items; all items of a `dense` frame.
        planes: sorted by name, none of them empty.
        increment: fingerprint that it adds; a claim until it is computed from live weights.

    Raises:
        ChunkInvalid, LimitExceeded: what no chunk may say of a frame.
    """

    number: int
    mode: Mode
    count: int
    planes: tuple[Plane, ...]
    increment: Fingerprint

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ChunkInvalid(f"frame {self.number} has the unknown mode {self.mode!r:.40}")
        if not 0 <= self.number < FRAMES_MAX or not 0 <= self.count <= FRAME_ELEMENTS_MAX:
            raise LimitExceeded(
                f"frame {self.number} of {self.count} elements; at most number "
                f"{FRAMES_MAX - 1} and {FRAME_ELEMENTS_MAX} elements"
            )
        names = [plane.name for plane in self.planes]
        if names != sorted(set(names)) or not _NAMES[self.mode].issuperset(names):
            raise ChunkInvalid(
                f"frame {self.number} has wrong planes for {self.mode}: {names!s:.200}"
            )

    @property
    def stored_size(self) -> int:
        return sum(plane.stored_size for plane in self.planes)

    @property
    def checksum(self) -> str:
        """xxh3-64 of the stored planes in order, 16 hex digits."""
        state = xxhash.xxh3_64()
        for plane in self.planes:
            state.update(plane.data)
        return state.hexdigest()


def encode_delta(number: int, frame: FrameSpec, delta: FrameDelta) -> EncodedFrame:
    """A delta's frame: mode `delta` for 1- and 2-byte items, `wide` for larger ones.

    Raises:
        ChunkInvalid: the delta doesn't fit the frame.
    """
    if delta.item_bytes != frame.item_bytes:
        raise ChunkInvalid(f"frame {number}: delta of {delta.item_bytes}-byte items")
    if delta.count and int(delta.positions[-1]) >= frame.items:
        raise ChunkInvalid(f"frame {number}: delta beyond its {frame.items} items")
    mode: Mode = "wide" if frame.item_bytes > 2 else "delta"
    planes: Mapping[str, NDArray[Any]] = {}
    if mode == "wide" and delta.count:
        differences = np.zeros(frame.items, delta.differences.dtype)
        differences[delta.positions] = delta.differences
        planes = _byte_planes([differences], rotate=False)
    elif delta.count:
        planes = encode_sparse(frame.items, delta.positions, delta.differences)
    return EncodedFrame(number, mode, delta.count, _pack(planes), delta.increment)


def decode_delta(
    encoded: EncodedFrame, frame: FrameSpec, *, workers: Workers | None = None
) -> FrameDelta:
    """The delta of an encoded frame. Its increment is the frame's claim: see `increment_on`.

    Args:
        workers: that share the frame's planes and restart blocks.
    Raises:
        ChunkInvalid: the planes aren't a delta of this frame.
    """
    mode = "wide" if frame.item_bytes > 2 else "delta"
    with _naming(encoded):
        if encoded.mode != mode or not 0 < encoded.count <= frame.items:
            raise ChunkInvalid(
                f"{encoded.mode} of {encoded.count} elements, expected {mode} of 1 to {frame.items}"
            )
        if mode == "wide":
            differences = _join(encoded, frame, rotated=False)
            positions = np.flatnonzero(differences).astype(np.uint32)
            if positions.size != encoded.count:
                raise ChunkInvalid(f"{positions.size} differences, expected {encoded.count}")
            differences = differences[positions]
        else:
            allowed = sizes_allowed(frame.items, encoded.count, frame.item_bytes)
            positions, differences = decode_sparse(
                frame.items,
                encoded.count,
                frame.item_bytes,
                _unpack(encoded, allowed, workers),
                workers,
            )
        return FrameDelta(frame.item_bytes, positions, differences, encoded.increment)


def decode_deltas(
    pairs: Sequence[tuple[EncodedFrame, FrameSpec]], workers: Workers
) -> list[FrameDelta]:
    """The deltas of several frames: one to a worker, or blocks where frames are few.

    Raises:
        ChunkInvalid: naming the first frame whose planes aren't its delta.
    """
    if len(pairs) < workers.size:
        return [decode_delta(encoded, frame, workers=workers) for encoded, frame in pairs]
    return workers.map(lambda pair: decode_delta(*pair), pairs)


def encode_dense(
    number: int, frame: FrameSpec, weights: Weights, *, placed: FrameSpec | None = None
) -> EncodedFrame:
    """An anchor's frame: all bits of its items; the increment is their fingerprint.

    Args:
        placed: the same items, in the same order, at the words that they are fingerprinted at,
            where the weights are of a layout of their own.
    Raises:
        LimitExceeded: the cut's frame is too large to be coded `dense`.
    """
    _check_dense(frame)
    parts, increment = _read_dense(frame, weights, placed)
    planes = _pack(_byte_planes(parts, rotate=True))
    return EncodedFrame(number, "dense", frame.items, planes, increment)


def decode_dense(encoded: EncodedFrame, frame: FrameSpec) -> NDArray[Any]:
    """The items of a `dense` frame in its order: unsigned [frame.items].

    Raises:
        ChunkInvalid: the planes aren't this frame's.
        FingerprintMismatch: the items don't have the increment that the frame claims.
    """
    _check_dense(frame)
    with _naming(encoded):
        if encoded.mode != "dense" or encoded.count != frame.items:
            raise ChunkInvalid(
                f"{encoded.mode} of {encoded.count} elements, expected dense of {frame.items}"
            )
        items = _join(encoded, frame, rotated=True)
    found = fingerprint_items(frame, items)
    if found != encoded.increment:
        raise FingerprintMismatch(
            f"frame {encoded.number}: its items add {found}, it claims {encoded.increment}",
            expected=str(encoded.increment),
            found=str(found),
        )
    return items


def _read_dense(
    frame: FrameSpec, weights: Weights, placed: FrameSpec | None
) -> tuple[list[NDArray[Any]], Fingerprint]:
    """The frame's items in contiguous parts, where they lie if they do, and their fingerprint."""
    held = pieces(frame, weights.layout)
    if placed is not None or any(piece.run < piece.items for piece in held):
        items = gather(frame, weights)
        return [items], fingerprint_items(placed or frame, items)
    parts = [piece.view(readable_bits(weights, piece.tensor)) for piece in held]
    increments = (
        fingerprint_run(part, piece.first_word) for piece, part in zip(held, parts, strict=True)
    )
    return parts, sum(increments, ZERO)


def _byte_planes(parts: Sequence[NDArray[Any]], *, rotate: bool) -> dict[str, NDArray[Any]]:
    names = dense.plane_names(parts[0].itemsize)
    return dict(zip(names, dense.split(parts, rotate=rotate), strict=True))


def _pack(planes: Mapping[str, NDArray[Any]]) -> tuple[Plane, ...]:
    return tuple(pack_plane(name, planes[name]) for name in sorted(planes) if planes[name].size)


def _unpack(
    encoded: EncodedFrame,
    allowed: Mapping[str, tuple[int, int]],
    workers: Workers | None = None,
) -> dict[str, Bytes]:
    """Decoded planes, absent ones empty, each of a size within its bounds."""
    stored = {plane.name: plane for plane in encoded.planes}
    if unknown := stored.keys() - allowed.keys():
        raise ChunkInvalid(f"planes that its items don't have: {', '.join(sorted(unknown))}")
    sizes = {name: stored[name].raw_size if name in stored else 0 for name in allowed}
    for name, (least, most) in allowed.items():
        if not least <= sizes[name] <= most:
            raise ChunkInvalid(
                f"plane {name!r} has {sizes[name]} bytes, expected {least} to {most}"
            )
    # The largest first: one worker takes it while others take the rest.
    present = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])

    def unpack(name: str) -> Bytes:
        return unpack_plane(stored[name])

    if workers is None or sum(sizes.values()) < _SHARED_BYTES_MIN:
        raw = list(map(unpack, present))
    else:
        raw = workers.map(unpack, present)
    # Read-only as all planes are: kernels are compiled once.
    return dict.fromkeys(sizes, np.frombuffer(b"", np.uint8)) | dict(zip(present, raw, strict=True))


def _join(encoded: EncodedFrame, frame: FrameSpec, *, rotated: bool) -> NDArray[Any]:
    names = dense.plane_names(frame.item_bytes)
    planes = _unpack(encoded, dict.fromkeys(names, (frame.items, frame.items)))
    return dense.join([planes[name] for name in names], frame.items, rotated=rotated)


def _check_dense(frame: FrameSpec) -> None:
    most = items_max(frame.item_bytes, dense=True)
    if frame.items > most:
        raise LimitExceeded(
            f"a dense frame of {frame.items} items of {frame.item_bytes} bytes; at most {most}",
            remedy="cut anchors with plain_cut(layout, for_anchor=True)",
        )


@contextmanager
def _naming(encoded: EncodedFrame) -> Iterator[None]:
    """Says in an error which frame it was."""
    try:
        yield
    except ChunkInvalid as error:
        raise ChunkInvalid(f"frame {encoded.number}: {error.message}") from error
