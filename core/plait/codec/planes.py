"""Planes: the byte streams of a frame, each packed by zstd, or raw where that saves nothing."""

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from plait.errors import ChunkInvalid

Bytes = NDArray[np.uint8]

# In these planes zstd's matches are noise: a small hash table and a long match leave its Huffman
# stage to do the work, which is 0.1-1 % smaller and faster than level 1 as it comes.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, chain_log=6, window_log=17, strategy=zstandard.STRATEGY_FAST
)

# Planes from this size on are compressed only if pieces of them are worth it.
_SAMPLED_BYTES_MIN: Final = 1 << 20
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096

_own: Final = threading.local()


@dataclass(frozen=True, slots=True)
class Plane:
    """One stored plane.

    Attributes:
        name: unique within its frame.
        raw_size: bytes once decompressed, at least one.
        data: as stored: a zstd frame if shorter than `raw_size`, else the plane itself.

    Raises:
        ChunkInvalid: sizes that no plane has.
    """

    name: str
    raw_size: int
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if not 0 < len(self.data) <= self.raw_size:
            raise ChunkInvalid(
                f"plane {self.name!r} stores {len(self.data)} bytes of {self.raw_size}"
            )

    @property
    def stored_size(self) -> int:
        return len(self.data)


def pack_plane(name: str, raw: NDArray[Any]) -> Plane:
    """A plane from its bytes: any contiguous array, not empty, which may become the plane."""
    view = raw.reshape(-1).view(np.uint8).data.toreadonly()
    compressor = _compressor()
    if len(view) >= _SAMPLED_BYTES_MIN and not _shrinks(view, compressor):
        return Plane(name, len(view), view)
    packed = compressor.compress(view)
    return Plane(name, len(view), packed if len(packed) < len(view) else view)


def _compressor() -> zstandard.ZstdCompressor:
    """The thread's own: none is to be shared by threads, and a new one costs what 3 kB do."""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    compressor: zstandard.ZstdCompressor = _own.compressor
    return compressor


def _shrinks(view: memoryview, compressor: zstandard.ZstdCompressor) -> bool:
    """Whether zstd makes pieces of a large plane smaller by more than 1 %.

    Mantissas don't shrink, and finding that out on all of them takes as long as compressing the
    exponents.
    """
    step = len(view) // _SAMPLES
    sample = b"".join(view[i * step : i * step + _SAMPLE_BYTES] for i in range(_SAMPLES))
    return len(compressor.compress(sample)) < 0.99 * len(sample)


def unpack_plane(plane: Plane) -> Bytes:
    """The bytes of a plane, read-only: as many as it claims, and no more are ever allocated.

    Args:
        plane: whose `raw_size` the caller has compared with what its frame allows.
    Raises:
        ChunkInvalid: it isn't one zstd frame that says this size.
    """
    raw_size = plane.raw_size
    if plane.stored_size == raw_size:
        return np.frombuffer(plane.data, np.uint8)
    try:
        # The frame's own header decides what the decompressor allocates.
        claimed = zstandard.get_frame_parameters(plane.data).content_size
        if claimed != raw_size:
            raise ChunkInvalid(
                f"zstd frame of plane {plane.name!r} claims {claimed} bytes, expected {raw_size}"
            )
        raw = zstandard.ZstdDecompressor().decompress(
            plane.data, max_output_size=raw_size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ChunkInvalid(f"plane {plane.name!r} is not one zstd frame: {error}") from error
    if len(raw) != raw_size:
        raise ChunkInvalid(f"plane {plane.name!r} holds {len(raw)} bytes, expected {raw_size}")
    return np.frombuffer(raw, np.uint8)
