"""The codec in torch makes the bytes that the compiled one makes, and moves the same bits."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import codec
from plait.cut import Cut, FrameSpec, Segment
from plait.errors import ChunkInvalid, LayoutChanged, UsageError
from plait.fingerprint import Fingerprint, fingerprint_at
from plait.grain import grain_cut
from plait.layout import Layout, TensorSpec
from plait.tensors import DTYPES, StateDictWeights, fingerprint_tensors, integer_view
from plait.tensors import codec as torch_codec
from plait.tensors.fingerprint import device_run, device_sum, items_on_device
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core.strategies import (
    changed_weights,
    covering_cuts,
    densities,
    layouts,
    random_weights,
    seeds,
)
from tests.core.test_grain import KV_HEADS, decoder

State = dict[str, torch.Tensor]


def state_of(weights: ArrayWeights) -> State:
    """The same bits in tensors of the layout's dtypes."""
    state = {}
    for tensor in weights.layout.tensors:
        raw = torch.from_numpy(weights.bits(tensor.name).copy().view(np.uint8))
        state[tensor.name] = raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
    return state


def of_torch(layout: Layout) -> Layout:
    """The layout's tensors that torch has a dtype for."""
    return Layout.of(tensor for tensor in layout.tensors if tensor.dtype in DTYPES)


def same(ours: torch_codec.TensorDelta, wanted: codec.FrameDelta) -> bool:
    host = ours.to_host()
    return (
        np.array_equal(host.positions, wanted.positions)
        and np.array_equal(host.differences, wanted.differences)
        and host.increment == wanted.increment
    )


def check(cut: Cut, old: ArrayWeights, new: ArrayWeights) -> None:
    """Once as on a CPU, and once as on any other device: with torch's arithmetic alone."""
    check_once(cut, old, new)
    with mock.patch.object(torch_codec, "fingerprint_items", items_on_device):
        check_once(cut, old, new)


def check_once(cut: Cut, old: ArrayWeights, new: ArrayWeights) -> None:
    before, after = state_of(old), state_of(new)
    layout = old.layout
    for number, frame in enumerate(cut.frames):
        wanted = codec.detect(frame, old, new)
        found = torch_codec.detect(frame, layout, before, after)
        assert same(found, wanted)
        assert torch_codec.encode_delta(number, frame, found) == codec.encode_delta(
            number, frame, wanted
        )
        sent = torch_codec.TensorDelta.of(wanted, "cpu")
        assert same(sent, wanted)
        assert torch_codec.increment_on(frame, layout, before, sent) == wanted.increment
        torch_codec.apply(frame, layout, before, sent)
    weights = StateDictWeights(layout, before)
    assert all(np.array_equal(weights.bits(t.name), new.bits(t.name)) for t in layout.tensors)


@settings(deadline=None, max_examples=150)
@given(st.data(), layouts(), seeds, densities)
def test_deltas_bytes_and_weights_equal_the_compiled_ones(
    data: st.DataObject, layout: Layout, seed: int, density: float
) -> None:
    layout = of_torch(layout)
    old = random_weights(layout, seed)
    check(data.draw(covering_cuts(layout)), old, changed_weights(old, seed + 1, density))


@settings(deadline=None, max_examples=10)
@given(seeds, densities, st.sampled_from(["F8_E4M3", "BF16", "F32", "C64"]))
def test_so_do_those_along_a_grain(seed: int, density: float, dtype: str) -> None:
    layout = decoder(dtype=dtype)
    old = random_weights(layout, seed)
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS).cut
    check(cut, old, changed_weights(old, seed + 1, density))


@pytest.mark.parametrize("dtype", ["U8", "BF16"])
@pytest.mark.parametrize("slice_items", [1 << 10, 1 << 22])
@pytest.mark.parametrize("shape", [(3 << 20,), (3 << 10, 1 << 10)])
def test_restarts_long_gaps_and_slices(
    dtype: str, slice_items: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if slice_items < 1 << 20:
        monkeypatch.setattr(torch_codec, "_SLICE", slice_items * 1000)
    layout = Layout.of([TensorSpec("x", dtype, (*shape,))])
    items = layout["x"].items
    old = ArrayWeights(layout, {"x": np.zeros(items, f"<u{layout['x'].item_bytes}")})
    new = ArrayWeights(layout, {"x": np.zeros(items, f"<u{layout['x'].item_bytes}")})
    for place, step in ((0, 1), (254, 1), (510, 255), (1 << 20, 7), ((3 << 20) - 1, 129)):
        new.bits("x")[place] = step
    new.bits("x")[(1 << 20) + 5000 : (1 << 20) + 9000] = np.arange(4000) % 251 + 1
    segments: tuple[Segment, ...] = (Segment(0, items, 0, 1),)
    if len(shape) == 2:
        rows, columns = shape
        segments = tuple(Segment(s * 512, 512, columns, rows) for s in range(2))
    check(Cut(layout.digest, (FrameSpec(layout["x"].item_bytes, segments),)), old, new)


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_the_fingerprint_of_torchs_integers_equals_the_compiled_one(
    data: st.DataObject, size: int
) -> None:
    values = data.draw(st.lists(st.integers(0, 256**size - 1), max_size=50))
    limit = (1 << 48) - 4
    words = data.draw(st.lists(st.integers(0, limit), min_size=len(values), max_size=len(values)))
    places, bits = np.array(words, np.int64), np.array(values, f"<u{size}")
    signed = bits.view("u1" if size == 1 else f"<i{size}")
    found = device_sum(torch.from_numpy(places), torch.from_numpy(signed))
    assert found == fingerprint_at(places, bits)


def test_what_does_not_fit_is_refused_before_the_first_write() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (4,))])
    frame = FrameSpec(2, (Segment(0, 8, 0, 1),))
    state = {name: torch.zeros(4, dtype=torch.bfloat16) for name in "ab"}
    ones = np.array([1, 1], np.uint16)
    delta = codec.FrameDelta(2, np.array([0, 5], np.uint32), ones, Fingerprint())
    sent = torch_codec.TensorDelta.of(delta, "cpu")
    for broken in (
        {"a": state["a"]},
        state | {"b": torch.zeros(4)},
        state | {"b": torch.zeros(5, dtype=torch.bfloat16)},
    ):
        with pytest.raises(LayoutChanged, match="'b'"):
            torch_codec.apply(frame, layout, broken, sent)
    with pytest.raises(UsageError, match="contiguous"):
        torch_codec.apply(
            frame, layout, state | {"b": torch.zeros(8, dtype=torch.bfloat16)[::2]}, sent
        )
    beyond = codec.FrameDelta(2, np.array([0, 8], np.uint32), ones, Fingerprint())
    with pytest.raises(ChunkInvalid, match="item 8"):
        torch_codec.apply(frame, layout, state, torch_codec.TensorDelta.of(beyond, "cpu"))
    narrow = codec.FrameDelta(1, np.array([0], np.uint32), np.array([1], np.uint8), Fingerprint())
    with pytest.raises(ChunkInvalid, match="1-byte"):
        torch_codec.encode_delta(0, frame, torch_codec.TensorDelta.of(narrow, "cpu"))
    assert not any(tensor.any() for tensor in state.values())


def test_tensors_that_are_missing_or_on_two_devices_are_refused() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (4,))])
    frame = FrameSpec(2, (Segment(0, 4, 0, 1),))
    here = {"a": torch.ones(4, dtype=torch.bfloat16)}
    there = {"a": torch.ones(4, dtype=torch.bfloat16, device="meta")}
    for old, new in (({}, {}), (here, {}), ({}, here)):
        with pytest.raises(LayoutChanged, match="'a'"):
            torch_codec.detect(frame, layout, old, new)
    for old, new in ((here, there), (there, here)):
        with pytest.raises(UsageError, match="'a' is on"):
            torch_codec.detect(frame, layout, old, new)
    one = codec.FrameDelta(2, np.array([1], np.uint32), np.array([1], np.uint16), Fingerprint())
    delta = torch_codec.TensorDelta.of(one, "cpu")
    for call in (torch_codec.apply, torch_codec.increment_on):
        with pytest.raises(UsageError, match="'a' is on meta, expected on cpu"):
            call(frame, layout, there, delta)


def test_items_beyond_two_to_the_31st_are_found_and_written(tmp_path: Path) -> None:
    items = (1 << 31) + (1 << 20)
    layout = Layout.of([TensorSpec("a", "U8", (items,))])
    states = []
    for name in ("old", "new"):
        file = tmp_path / name
        with file.open("wb") as sparse:
            sparse.truncate(items)
        states.append({"a": torch.from_file(str(file), shared=True, size=items, dtype=torch.uint8)})
    old, new = states
    start, run = items - (1 << 19), 1 << 10
    frame = FrameSpec(1, (Segment(start, run, 4 * run, 100), Segment(7, 9, 0, 1)))
    places = [start, start + run - 1, start + 4 * run * 99 + 5, 8]
    new["a"][places] = torch.tensor([1, 255, 7, 9], dtype=torch.uint8)
    delta = torch_codec.detect(frame, layout, old, new)
    words = np.array(places, np.int64)
    assert frame.words_of(delta.positions.numpy().astype(np.uint32)).tolist() == places
    wanted = fingerprint_at(words, np.array([1, 255, 7, 9], np.uint8))
    assert delta.increment == wanted - fingerprint_at(words, np.zeros(4, np.uint8))
    encoded = torch_codec.encode_delta(0, frame, delta)
    assert codec.decode_delta(encoded, frame).positions.tolist() == delta.positions.tolist()
    assert torch_codec.increment_on(frame, layout, old, delta) == delta.increment
    torch_codec.apply(frame, layout, old, delta)
    assert old["a"][places].tolist() == [1, 255, 7, 9]


@settings(deadline=None)
@given(layouts(), seeds)
def test_a_full_pass_in_torch_is_the_fingerprint_of_the_weights(layout: Layout, seed: int) -> None:
    layout = of_torch(layout)
    weights = random_weights(layout, seed)
    state = state_of(weights)
    assert fingerprint_tensors(layout, state) == fingerprint_weights(weights)
    parts = [
        device_run(integer_view(state[tensor.name]), start)
        for tensor, start in zip(layout.tensors, layout.starts, strict=False)
    ]
    assert sum(parts, Fingerprint()) == fingerprint_weights(weights)
    if layout.tensors:
        with pytest.raises(LayoutChanged, match="hold no"):
            fingerprint_tensors(layout, {})
