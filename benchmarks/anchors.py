"""Anchors: what `dense` frames make of real weights in each dtype, and how fast."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import Section
from benchmarks.timing import cpu_seconds
from benchmarks.treatments import treatments_section
from plait.codec import decode_dense, encode_dense
from plait.grain import grain_cut
from plait.layout import Layout, TensorSpec
from plait.weights import UNSIGNED, ArrayWeights
from plait_client.checkpoint import CheckpointFolder
from plait_demo.model import base_model

_CACHE: Final = Path(__file__).parent.parent / ".cache" / "plait-demo"
_ITEMS: Final = 16 << 20
_GRAIN: Final = 8
_COLUMNS: Final = 2048


def anchors_sections() -> list[Section]:
    """SmolLM2's weights as they are, and converted: as plait stores them, and in other planes."""
    held = {dtype: _bits(tensor) for dtype, tensor in _tensors().items()}
    return [_speeds_section(held), treatments_section(held)]


def _tensors() -> dict[str, torch.Tensor]:
    folder = CheckpointFolder(base_model("smollm2", _CACHE))
    bits = np.concatenate([folder.bits(t.name) for t in folder.layout.tensors])[-_ITEMS:]
    bf16 = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    # As a trained master has them: bits below BF16's that nothing predicts.
    low = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, bits.size, np.int32))
    master = (bf16.float().view(torch.int32) | low).view(torch.float32)
    scale = 240 / bf16.abs().max().float()
    quantised = (master * (127 / bf16.abs().max().float())).round()
    return {
        "BF16": bf16,
        "F16": bf16.half(),
        "F32": master,
        "F8_E4M3": (master * scale).to(torch.float8_e4m3fn),
        "F8_E5M2": (master * scale).to(torch.float8_e5m2),
        "I8": quantised.to(torch.int8),
        "I32": quantised.to(torch.int32),
        "I64": torch.arange(_ITEMS // 4),
    }


def _speeds_section(held: dict[str, NDArray[Any]]) -> Section:
    rows = [_row(dtype, bits) for dtype, bits in held.items()]
    rows += [_row(dtype, held[dtype], grain=_GRAIN) for dtype in ("BF16", "F32", "F8_E4M3")]
    return Section(
        "Anchors",
        f"Dense frames of {_ITEMS:,} of SmolLM2's weights, converted; processor time of one "
        "thread, fingerprint included. Order 0: the entropy of an item's exponent, or of the whole "
        "item of one byte, with all other bits free to be anything. Along a grain of "
        f"{_GRAIN}: as matrices of {_COLUMNS:,} columns, which are dealt out.",
        ["dtype", "stored / raw", "order 0", "encode GB/s", "decode GB/s",
         "encode / memcpy", "decode / memcpy"],
        rows,
    )  # fmt: skip


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    size = UNSIGNED[tensor.element_size()]
    return tensor.view(torch.uint8).numpy().view(size)


def _row(dtype: str, bits: NDArray[Any], *, grain: int = 1) -> list[str]:
    name = "m.down_proj.weight"
    layout = Layout.of([TensorSpec(name, dtype, (bits.size // _COLUMNS, _COLUMNS))])
    weights = ArrayWeights(layout, {name: bits})
    frames = grain_cut(layout, grain=grain, for_anchor=True).cut.frames
    encoded = [encode_dense(n, frame, weights) for n, frame in enumerate(frames)]
    pairs = list(zip(encoded, frames, strict=True))
    numbered = [(n, frame, weights) for n, frame in enumerate(frames)]
    copy = np.empty_like(bits)
    memcpy = cpu_seconds(lambda: np.copyto(copy, bits))
    encoding = cpu_seconds(lambda: _one_by_one(encode_dense, numbered))
    decoding = cpu_seconds(lambda: _one_by_one(decode_dense, pairs))
    return [
        dtype if grain == 1 else f"{dtype}, grain {grain}",
        f"{sum(frame.stored_size for frame in encoded) / bits.nbytes:.3f}",
        f"{_order_0(dtype, bits):.3f}",
        f"{bits.nbytes / encoding / 1e9:.2f}",
        f"{bits.nbytes / decoding / 1e9:.2f}",
        f"{memcpy / encoding:.3f}",
        f"{memcpy / decoding:.3f}",
    ]


def _one_by_one(work: Callable[..., object], calls: Iterable[tuple[Any, ...]]) -> None:
    """Drops each result before the next, as a pipeline does."""
    for call in calls:
        work(*call)


def _order_0(dtype: str, bits: NDArray[Any]) -> float:
    width = 8 * bits.itemsize
    exponent = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8)}.get(dtype, (0, width))
    if exponent[1] > 16:
        return float("nan")
    shift, size = exponent
    values = (bits >> bits.dtype.type(shift)) & bits.dtype.type((1 << size) - 1)
    counts = np.bincount(values.astype(np.int64)).astype(float)
    share = counts[counts > 0] / bits.size
    return float((width - size - (share * np.log2(share)).sum()) / width)
