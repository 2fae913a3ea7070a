"""Small torch states, their changes, and deltas between them as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from plait.codec.algebra import detect
from plait.codec.chunks import Chunk, pack_chunks
from plait.codec.frames import EncodedFrame, encode_delta
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.fingerprint import Fingerprint
from plait.layout import Layout, words_per_item
from plait.manifest import Manifest, Statistics
from plait.tensors import StateDictWeights, bits_of, layout_of_tensors
from plait.weights import fingerprint_weights
from plait_rollout.engine import Direction, Move, MoveStep

State = dict[str, torch.Tensor]


def fresh_state(seed: int = 0) -> State:
    """BF16 matrices, an F32 vector, an F16 scalar, an empty tensor and an int8 one."""
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(64, 16, generator=random).bfloat16(),
        "layers.0.up.weight": torch.randn(32, 16, generator=random).bfloat16(),
        "layers.0.down.weight": torch.randn(16, 32, generator=random).bfloat16(),
        "norm.weight": torch.randn(16, generator=random),
        "scale": torch.randn((), generator=random).half(),
        "nothing": torch.empty(0, 4).bfloat16(),
        "table": torch.randint(-128, 127, (33,), generator=random, dtype=torch.int8),
    }


def layout_of(state: State) -> Layout:
    return layout_of_tensors(state)


def copy_of(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def changed(state: State, seed: int, density: float = 0.05) -> State:
    """A copy in which some items of each tensor have other bits, NaNs and -0.0 among them."""
    random = np.random.default_rng(seed)
    after = copy_of(state)
    for tensor in after.values():
        bits = bits_of(tensor)
        if bits.size:
            chosen = random.random(bits.size) < density
            chosen[random.integers(bits.size)] = True
            step = random.integers(1, 4, bits.size).astype(bits.dtype)
            bits[chosen] += step[chosen]
    flat = bits_of(after["embed.weight"])
    flat[seed % flat.size] = 0x7FC1 if flat[seed % flat.size] != 0x7FC1 else 0x8000
    return after


def same_bits(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(bits_of(a[name]), bits_of(b[name])) for name in a
    )


def fingerprint_of(state: State) -> Fingerprint:
    return fingerprint_weights(StateDictWeights(layout_of(state), state), threads=1)


def fine_cut(layout: Layout, items: int) -> Cut:
    """Frames of at most so many items each, so that small states have many."""
    frames = []
    for frame in plain_cut(layout, for_anchor=False).frames:
        width = words_per_item(frame.item_bytes)
        for segment in frame.segments:
            for start in range(0, segment.run, items):
                run = min(items, segment.run - start)
                first = segment.first_word + start * width
                frames.append(FrameSpec(frame.item_bytes, (Segment(first, run, 0, 1),)))
    return Cut(layout.digest, tuple(frames))


def encoded_delta(cut: Cut, old: State, new: State) -> list[EncodedFrame]:
    layout = layout_of(old)
    before, after = StateDictWeights(layout, old), StateDictWeights(layout, new)
    found = [(number, detect(frame, before, after)) for number, frame in enumerate(cut.frames)]
    return [encode_delta(number, cut.frames[number], d) for number, d in found if d.count]


def manifest_of(cut: Cut | None, chunks: Sequence[Chunk], old: State, new: State) -> Manifest:
    layout = layout_of(old)
    tensors = [(t, bits_of(old[t.name]) != bits_of(new[t.name])) for t in layout.tensors]
    return Manifest(
        kind="delta",
        layout=layout.digest,
        cut=cut.digest if cut is not None and chunks else None,
        base=fingerprint_of(old),
        target=fingerprint_of(new),
        chunks=tuple(chunk.entry for chunk in chunks),
        statistics=Statistics(
            changed_elements=sum(int(np.count_nonzero(odd)) for _, odd in tensors),
            changed_bytes=sum(int(np.count_nonzero(odd)) * t.item_bytes for t, odd in tensors),
            total_elements=layout.total_elements,
            dense_bytes=layout.dense_bytes,
            chunk_bytes=sum(chunk.size for chunk in chunks),
        ),
    )


def one_chunk_a_frame(frames: Sequence[EncodedFrame]) -> list[Chunk]:
    return [chunk for frame in frames for chunk in pack_chunks([frame])]


@dataclass
class Deltas:
    """Makes steps between states, with their chunks in a folder."""

    folder: Path
    cut: Cut
    split: bool = False

    def step(self, old: State, new: State, direction: Direction = "forward") -> MoveStep:
        frames = encoded_delta(self.cut, old, new)
        chunks = one_chunk_a_frame(frames) if self.split else list(pack_chunks(frames))
        paths = []
        for chunk in chunks:
            path = self.folder / chunk.digest.removeprefix("sha256:")
            path.write_bytes(chunk.data)
            paths.append(path)
        return MoveStep(manifest_of(self.cut, chunks, old, new), direction, tuple(paths))

    def move(self, *steps: MoveStep, stamp: str = "p@2#2") -> Move:
        return Move(
            layout=Layout.of(self._layout.tensors),
            cut=self.cut,
            base=steps[0].base,
            target=steps[-1].target,
            steps=steps,
            stamp=stamp,
        )

    def __post_init__(self) -> None:
        self._layout = layout_of(fresh_state())
