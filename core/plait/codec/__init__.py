"""The codec: delta algebra, frames, planes and chunk files. All of it pure."""

from plait.codec.algebra import Comparison, FrameDelta, add, apply, detect, increment_on, negate
from plait.codec.chunks import Chunk, ChunkReader, pack_chunks, read_chunk
from plait.codec.frames import (
    EncodedFrame,
    decode_delta,
    decode_deltas,
    decode_dense,
    encode_delta,
    encode_dense,
)
from plait.codec.planes import Plane
from plait.codec.sweep import detect_frames

__all__ = [
    "Chunk",
    "ChunkReader",
    "Comparison",
    "EncodedFrame",
    "FrameDelta",
    "Plane",
    "add",
    "apply",
    "decode_delta",
    "decode_deltas",
    "decode_dense",
    "detect",
    "detect_frames",
    "encode_delta",
    "encode_dense",
    "increment_on",
    "negate",
    "pack_chunks",
    "read_chunk",
]
