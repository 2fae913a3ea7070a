"""Shares of a model are the model: what ranks find and hash adds up to what one process finds."""

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.codec.algebra import FrameDelta, apply, increment_on
from plait.codec.frames import decode_dense
from plait.errors import LayoutInvalid, PublishError
from plait.fingerprint import ZERO
from plait.layout import Layout, TensorSpec
from plait.tensors import DTYPES
from plait.weights import UNSIGNED, ArrayWeights, fingerprint_weights, scatter
from plait_trainer import SnapshotDetector
from plait_trainer.blocks import BlockSpec, PlacedBlock
from plait_trainer.deltas import encode_whole
from plait_trainer.live import LiveTensor, ShardView
from plait_trainer.share import Share, fingerprint_share, local_weights
from plait_trainer.sharing import share_out

_ITEM_DTYPES = ("U8", "BF16", "F32", "I64")


def split(side: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) as `torch.chunk` splits a side: uneven, and perhaps empty at the end."""
    step = -(-side // parts) or 1
    return [
        (min(part * step, side), max(min(step, side - part * step), 0)) for part in range(parts)
    ]


@st.composite
def held_tensors(draw: st.DrawFn) -> list[list[BlockSpec]]:
    """Some tensors, each sharded over a mesh in one or two of its dimensions, or replicated."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2), (5,)]))
    held: list[list[BlockSpec]] = [[] for _ in range(prod(mesh))]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        whole = TensorSpec(f"t{number}", draw(st.sampled_from(_ITEM_DTYPES)), shape)
        axes = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
        for rank, coordinates in enumerate(itertools.product(*map(range, mesh))):
            offsets, sizes = [0] * len(shape), list(shape)
            for axis, coordinate, parts in zip(axes, coordinates, mesh, strict=True):
                if axis is not None:
                    at, sizes[axis] = split(sizes[axis], parts)[coordinate]
                    offsets[axis] += at
            held[rank].append(BlockSpec(whole, tuple(offsets), tuple(sizes)))
    return held


def random_bits(layout: Layout, seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    return {
        spec.name: random.integers(0, 256, spec.nbytes, np.uint8).view(UNSIGNED[spec.item_bytes])
        for spec in layout.tensors
    }


def changed(bits: dict[str, NDArray[Any]], seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    return {
        name: array + (random.random(array.shape) < 0.3).astype(array.dtype)
        for name, array in bits.items()
    }


def as_live(share: Share, bits: dict[str, NDArray[Any]]) -> dict[str, LiveTensor]:
    """The share's blocks, cut from whole tensors."""
    live: dict[str, LiveTensor] = {}
    for spec in share.local.tensors:
        whole = share.layout[spec.name]
        block = share.blocks.get(spec.name) or BlockSpec.all_of(whole)
        dtype = DTYPES[spec.dtype]
        signed = torch.from_numpy(bits[spec.name].view(f"i{spec.item_bytes}"))
        tensor = signed.view(dtype).reshape(whole.shape)[block.region]
        live[spec.name] = ShardView(
            spec.name, tensor, dtype, whole.shape, block.offsets, block.sizes
        )
    return live


@settings(deadline=None, max_examples=150)
@given(held=held_tensors(), seed=st.integers(0, 2**16))
def test_what_the_ranks_find_adds_up_to_what_one_process_finds(
    held: list[list[BlockSpec]], seed: int
) -> None:
    shares = [share_out(held, rank=rank).deltas for rank in range(len(held))]
    layout = shares[0].layout
    assert len({share.cut.cut.digest for share in shares}) == 1
    assert shares[0].cut.cut.covers(layout)
    assert sorted(n for share in shares for n in share.numbers) == list(
        range(len(shares[0].cut.cut.frames))
    )
    before = random_bits(layout, seed)
    after = changed(before, seed + 1)
    old, new = ArrayWeights(layout, before), ArrayWeights(layout, after)
    deltas: dict[int, FrameDelta] = {}
    first, last = ZERO, ZERO
    for share in shares:
        detector = SnapshotDetector()
        part = detector.attach(as_live(share, before), share)
        assert part == fingerprint_share(share, local_weights(share, old))
        first += part
        capture = detector.capture(as_live(share, after))
        assert not capture.deltas.keys() & deltas.keys()
        deltas.update(capture.deltas)
        last += capture.fingerprint
        detector.keep(capture)
        assert detector.capture(as_live(share, after)).deltas == {}
    assert (first, last) == (fingerprint_weights(old), fingerprint_weights(new))
    built = ArrayWeights(layout, {name: array.copy() for name, array in before.items()})
    for number, delta in deltas.items():
        frame = shares[0].cut.cut.frames[number]
        assert increment_on(frame, built, delta) == delta.increment
        apply(frame, built, delta)
    for name, array in after.items():
        assert np.array_equal(built.bits(name), array)


@settings(deadline=None, max_examples=60)
@given(held=held_tensors(), seed=st.integers(0, 2**16))
def test_the_ranks_anchors_are_the_model(held: list[list[BlockSpec]], seed: int) -> None:
    shares = [share_out(held, rank=rank).anchors for rank in range(len(held))]
    layout = shares[0].layout
    bits = random_bits(layout, seed)
    whole = ArrayWeights(layout, bits)
    built = ArrayWeights(layout, {name: np.zeros_like(array) for name, array in bits.items()})
    total = ZERO
    for share in shares:
        for encoded in encode_whole(share, local_weights(share, whole)):
            frame = share.cut.cut.frames[encoded.number]
            scatter(frame, built, decode_dense(encoded, frame))  # proves the increment
            total += encoded.increment
    assert total == fingerprint_weights(whole)
    for name, array in bits.items():
        assert np.array_equal(built.bits(name), array)


@settings(deadline=None, max_examples=100)
@given(held=held_tensors(), data=st.data())
def test_a_blocks_words_are_those_of_its_rectangle(
    held: list[list[BlockSpec]], data: st.DataObject
) -> None:
    for block in itertools.chain.from_iterable(held):
        if not block.items:
            continue
        width = max(block.whole.item_bytes // 2, 1)
        numbers = np.arange(block.whole.items, dtype=np.int64).reshape(block.whole.shape)
        expected = 11 + numbers[block.region].reshape(-1) * width
        place = PlacedBlock(block, 11)
        assert np.array_equal(place.words_of(np.arange(block.items)), expected)
        start = data.draw(st.integers(0, block.items))
        stop = data.draw(st.integers(start, block.items))
        segments = [segment.words(width) for segment in place.segments(start, stop)]
        assert np.array_equal(np.concatenate([[], *segments]), expected[start:stop])


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def test_what_several_hold_is_published_by_one_and_the_load_is_balanced() -> None:
    wholes = [spec("a", 4, 8), spec("b", 4, 8), spec("c", 2, 8), spec("d", 2, 8)]
    held = [[BlockSpec.all_of(whole) for whole in wholes] for _ in range(3)]
    owned = share_out(held).owned
    assert sorted(block.name for blocks in owned for block in blocks) == ["a", "b", "c", "d"]
    assert [sum(block.items for block in blocks) for blocks in owned] == [32, 32, 32]


def test_what_several_hold_goes_to_whoever_has_less_of_their_own() -> None:
    mine, ours = BlockSpec.all_of(spec("mine", 4, 8)), BlockSpec.all_of(spec("ours", 2, 8))
    assert share_out([[mine, ours], [ours]]).owned == ((mine,), (ours,))
    assert share_out([[ours], [mine, ours]]).owned == ((ours,), (mine,))


@pytest.mark.parametrize(
    ("offsets", "sizes", "count"),
    [
        ((0, 2, 0), (4, 3, 8), 1),  # rows of each outer index
        ((0, 0, 2), (4, 6, 3), 1),  # columns of all rows
        ((1, 2, 2), (2, 3, 3), 2),  # both: a segment for each outer index
    ],
)
def test_blocks_cost_as_few_segments_as_they_can(
    offsets: tuple[int, ...], sizes: tuple[int, ...], count: int
) -> None:
    block = BlockSpec(spec("x", 4, 6, 8), offsets, sizes)
    assert len(list(PlacedBlock(block, 0).segments(0, block.items))) == count


def test_a_part_that_nobody_holds_is_named() -> None:
    held = [[BlockSpec(spec("x", 4, 3), (0, 0), (2, 3))], [BlockSpec.all_of(spec("y", 2))]]
    with pytest.raises(PublishError, match=r"'x' \(6 of 12 elements\)"):
        share_out(held)


def test_one_process_with_a_shard_is_told_that_it_isnt_alone() -> None:
    with pytest.raises(PublishError, match="every process that holds a part"):
        share_out([[BlockSpec(spec("x", 4, 3), (0, 0), (2, 3))]])


@pytest.mark.parametrize(("offset", "size"), [(1, 3), (1, 2)])
def test_parts_that_overlap_are_refused(offset: int, size: int) -> None:
    """With as many elements as the tensor has, too: then one of them is missing."""
    whole = spec("x", 4, 3)
    held = [[BlockSpec(whole, (0, 0), (2, 3))], [BlockSpec(whole, (offset, 0), (size, 3))]]
    with pytest.raises(PublishError, match="ranks 0 and 1 hold parts of 'x' that overlap"):
        share_out(held).deltas  # noqa: B018


def test_tensors_that_differ_between_the_ranks_are_refused() -> None:
    held = [[BlockSpec.all_of(spec("x", 4))], [BlockSpec.all_of(spec("x", 4, dtype="F32"))]]
    with pytest.raises(PublishError, match=r"'x' is BF16\[4\] on rank 0 and F32\[4\] on rank 1"):
        share_out(held)


def test_a_block_lies_inside_of_its_tensor() -> None:
    with pytest.raises(LayoutInvalid, match="isn't inside"):
        BlockSpec(spec("x", 4), (2,), (3,))
    with pytest.raises(LayoutInvalid, match="packed elements"):
        BlockSpec(spec("x", 4, dtype="F4"), (2,), (2,))
