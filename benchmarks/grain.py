"""What a parallel grain costs, and what it saves a rank."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Section
from plait.codec import (
    Chunk,
    FrameDelta,
    decode_delta,
    encode_delta,
    pack_chunks,
)
from plait.codec.chunks import read_chunk
from plait.codec.sweep import Sweep
from plait.cut import plain_cut
from plait.grain import SlottedCut, grain_cut, slots_of
from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights

_GRAIN: Final = 8
_DENSITY: Final = 0.01
_RUNS: Final = 15
# Shaped like Qwen3-0.6B.
_HIDDEN, _QUERY, _KEY_VALUE, _FEED, _VOCABULARY, _LAYERS = 1024, 2048, 1024, 3072, 151_936, 28
_KV_HEADS: Final = 8
# Differences of a BF16 policy's step: nine in ten are one bit up or down.
_STEPS: Final = np.array([1, -1] * 9 + [2, -2, 3, -40], np.int16).view(np.uint16)


def layout() -> Layout:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (_HIDDEN,),
            name + "self_attn.q_proj.weight": (_QUERY, _HIDDEN),
            name + "self_attn.k_proj.weight": (_KEY_VALUE, _HIDDEN),
            name + "self_attn.v_proj.weight": (_KEY_VALUE, _HIDDEN),
            name + "self_attn.o_proj.weight": (_HIDDEN, _QUERY),
            name + "mlp.gate_proj.weight": (_FEED, _HIDDEN),
            name + "mlp.up_proj.weight": (_FEED, _HIDDEN),
            name + "mlp.down_proj.weight": (_HIDDEN, _FEED),
        }
    return Layout.of(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def grain_section() -> Section:
    """The same step, cut plainly and along a grain of 8."""
    model = layout()
    old, new = _step(model)
    plain = plain_cut(model, for_anchor=False)
    cuts = {
        "plain": SlottedCut(plain, (0,) * len(plain.frames)),
        f"grain {_GRAIN}": grain_cut(model, grain=_GRAIN, for_anchor=False, kv_heads=_KV_HEADS),
    }
    chunks = {name: encode_first(cut, old, new) for name, cut in cuts.items()}
    work: dict[tuple[str, str], Callable[[], object]] = {}
    for name, cut in cuts.items():
        work[name, "first"] = partial(encode_first, cut, old, new)
        work[name, "encode"] = partial(encode, cut, Sweep(cut.cut.frames, model), old, new)
        work[name, "rank"] = partial(decode, cut, _of_rank(chunks[name]))
    times = _measured(work)
    first = next(iter(cuts))
    whole = sum(chunk.size for chunk in chunks[first])
    rows = []
    for name, cut in cuts.items():
        size = sum(chunk.size for chunk in chunks[name])
        rows.append(
            [
                name,
                f"{len(cut.cut.frames)}",
                f"{len(cut.cut.data):,}",
                f"{size:,} ({size / whole - 1:+.2%})",
                *(
                    f"{1000 * times[name, kind].min():.0f} ms "
                    f"({np.median(times[name, kind] / times[first, kind]) - 1:+.1%})"
                    for kind in ("encode", "first")
                ),
                f"{sum(c.size for c in _of_rank(chunks[name])) / whole:.1%}",
                f"{np.median(times[name, 'rank'] / times[first, 'rank']):.1%}",
            ]
        )
    return Section(
        "A parallel grain",
        f"{model.total_elements:,} BF16 elements shaped like Qwen3-0.6B, "
        f"{_DENSITY:.0%} of them changed at random. Detection, planes, zstd, chunk files and "
        f"digests on one thread, processor time, least of {_RUNS} runs: of a publisher that "
        "goes on along its cut, and of a first version, for which the sweep is laid out too. "
        "Ratios are to the plain cut in the same run, the median of all. A rank is one of "
        f"{_GRAIN}, the most expensive one; its shares are of the plain cut's whole.",
        ["cut", "frames", "bytes of the cut (once)", "chunk bytes", "encode", "first encode",
         "a rank fetches", "a rank decodes in"],
        rows,
    )  # fmt: skip


def encode(cut: SlottedCut, sweep: Sweep, old: ArrayWeights, new: ArrayWeights) -> list[Chunk]:
    """As a publisher does: frames of a round together."""
    frames = cut.cut.frames

    def found_deltas() -> Iterator[tuple[int, FrameDelta]]:
        for numbers in sweep.rounds:
            yield from zip(numbers, sweep.detect(numbers, old, new), strict=True)

    return list(pack_chunks((encode_delta(n, frames[n], d) for n, d in found_deltas()), cut.slots))


def encode_first(cut: SlottedCut, old: ArrayWeights, new: ArrayWeights) -> list[Chunk]:
    return encode(cut, Sweep(cut.cut.frames, old.layout), old, new)


def decode(cut: SlottedCut, chunks: Iterable[Chunk]) -> int:
    return sum(
        decode_delta(frame, cut.cut.frames[frame.number]).count
        for chunk in chunks
        for frame in read_chunk(chunk.data, entry=chunk.entry).frames
    )


def _of_rank(chunks: list[Chunk]) -> list[Chunk]:
    """What the rank with the most bytes fetches."""
    sizes = Counter({chunk.slot: 0 for chunk in chunks})
    for chunk in chunks:
        sizes[chunk.slot] += chunk.size
    ranks = [slots_of(rank, _GRAIN, grain=_GRAIN) for rank in range(_GRAIN)]
    slots = max(ranks, key=lambda own: sum(sizes[slot] for slot in own))
    return [chunk for chunk in chunks if chunk.slot in slots]


def _step(model: Layout) -> tuple[ArrayWeights, ArrayWeights]:
    random = np.random.default_rng(1)
    before, after = {}, {}
    for tensor in model.tensors:
        bits = random.integers(0, 1 << 16, tensor.items, dtype=np.uint16)
        places = random.integers(0, tensor.items, round(tensor.items * _DENSITY))
        before[tensor.name], after[tensor.name] = bits, bits.copy()
        after[tensor.name][places] = bits[places] + random.choice(_STEPS, places.size)
    return ArrayWeights(model, before), ArrayWeights(model, after)


def _measured(
    work: dict[tuple[str, str], Callable[[], object]],
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Processor seconds of each, run by run: all in turn, those of one kind beside each other.

    So what else runs disturbs a run's figures alike, and their ratio less than either.
    """
    found: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for _ in range(_RUNS + 1):
        for key in sorted(work, key=lambda key: key[1]):
            started = time.process_time()
            work[key]()
            found[key].append(time.process_time() - started)
    return {key: np.array(seconds[1:]) for key, seconds in found.items()}
