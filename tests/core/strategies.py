"""Random layouts, cuts and weights, with the bit patterns that break codecs."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.cut import Cut, FrameSpec, Segment
from plait.layout import DTYPE_BITS, Layout, TensorSpec, words_per_item
from plait.weights import UNSIGNED, ArrayWeights
from tests.core import reference

# Of each item size: zero, -0.0, infinities, quiet and signalling NaNs with payloads, subnormals.
SPECIAL: Mapping[int, tuple[int, ...]] = {
    1: (0x00, 0x80, 0x7F, 0xFF, 0x7C, 0x01, 0x81),
    2: (0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0x7FFF, 0xFFC0, 0x7F81, 0x0001, 0x8001, 0xFFFF),
    4: (0, 1 << 31, 0x7F800000, 0x7FC00001, 0x7F800001, 0x00000001, 0xFFFFFFFF),
    8: (0, 1 << 63, 0x7FF0000000000000, 0x7FF0000000000001, 0xFFF8000000000001, 1, (1 << 64) - 1),
}

_SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(0, 12), st.integers(0, 24)),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rows = draw(
        st.dictionaries(
            st.text("abz._é", min_size=1, max_size=6),
            st.tuples(st.sampled_from(sorted(DTYPE_BITS)), _SHAPES),
            max_size=6,
        )
    )
    return Layout.of(
        TensorSpec(name, dtype, shape)
        for name, (dtype, shape) in rows.items()
        if np.prod(shape, dtype=int) * DTYPE_BITS[dtype] % 8 == 0
    )


@st.composite
def covering_cuts(draw: st.DrawFn, layout: Layout) -> Cut:
    """Every word once: tensors cut flat, by rows or by columns, dealt out to frames at random."""
    segments: dict[int, list[Segment]] = {1: [], 2: [], 4: [], 8: []}
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if tensor.items:
            parts = _parts(draw, tensor, start)
            segments[tensor.item_bytes] += parts
    frames = []
    for item_bytes, parts in segments.items():
        parts = draw(st.permutations(parts))
        while parts:
            taken = draw(st.integers(1, len(parts)))
            frames.append(FrameSpec(item_bytes, tuple(parts[:taken])))
            parts = parts[taken:]
    return Cut(layout.digest, tuple(draw(st.permutations(frames))))


def _parts(draw: st.DrawFn, tensor: TensorSpec, start: int) -> list[Segment]:
    width = words_per_item(tensor.item_bytes)
    packed = len(tensor.shape) == 2 and tensor.items == tensor.shape[0] * tensor.shape[1]
    if packed and draw(st.booleans()):
        rows, columns = tensor.shape
        bounds = _bounds(draw, columns)
        return [
            Segment(start + first * width, end - first, columns * width, rows)
            for first, end in itertools.pairwise(bounds)
        ]
    return [
        Segment(start + first * width, end - first, 0, 1)
        for first, end in itertools.pairwise(_bounds(draw, tensor.items))
    ]


def _bounds(draw: st.DrawFn, items: int) -> list[int]:
    inner = draw(st.sets(st.integers(1, items - 1), max_size=3)) if items > 1 else set()
    return [0, *sorted(inner), items]


def random_weights(layout: Layout, seed: int) -> ArrayWeights:
    """Random bits, one item in four special."""
    random = np.random.default_rng(seed)
    return ArrayWeights(layout, {t.name: _random_items(random, t) for t in layout.tensors})


def _random_items(random: np.random.Generator, tensor: TensorSpec) -> NDArray[Any]:
    unsigned = UNSIGNED[tensor.item_bytes]
    items = random.integers(0, 256, tensor.nbytes, dtype=np.uint8).view(unsigned)
    special = np.array(SPECIAL[tensor.item_bytes], unsigned)
    return np.where(random.random(items.size) < 0.25, random.choice(special, items.size), items)


def changed_weights(weights: ArrayWeights, seed: int, density: float) -> ArrayWeights:
    """A copy in which about `density` of the items changed: mostly by one, some to anything."""
    random = np.random.default_rng(seed)
    arrays = {}
    for tensor in weights.layout.tensors:
        items = weights.bits(tensor.name).copy()
        changed = random.random(items.size) < density
        steps = random.choice([1, -1, 2, -90, 127, -128, 128], items.size).astype(np.int64)
        other = _random_items(random, tensor)
        moved = np.where(random.random(items.size) < 0.2, other, items + steps.astype(items.dtype))
        arrays[tensor.name] = np.where(changed, moved, items)
    return ArrayWeights(weights.layout, arrays)


def copy_of(weights: ArrayWeights) -> ArrayWeights:
    layout = weights.layout
    return ArrayWeights(layout, {t.name: weights.bits(t.name).copy() for t in layout.tensors})


def equal_bits(first: ArrayWeights, second: ArrayWeights) -> bool:
    names = [tensor.name for tensor in first.layout.tensors]
    return all(np.array_equal(first.bits(name), second.bits(name)) for name in names)


def words_of_state(weights: ArrayWeights) -> NDArray[np.uint16]:
    """All canonical words, uint16 [words of the layout], as the independent reader holds them."""
    layout = weights.layout
    tensors = {t.name: weights.bits(t.name).tobytes() for t in layout.tensors}
    return reference.state_of(layout.serialize(), tensors)


seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from([0.0, 0.02, 0.3, 1.0])
