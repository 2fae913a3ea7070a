"""The bridge to torch on fuzzed dtypes, strides and bits, against the compiled kernels."""

from typing import Any, Final
from unittest import mock

import numpy as np
import torch

from plait import codec
from plait.cut import Cut, FrameSpec
from plait.errors import UsageError
from plait.fingerprint import Fingerprint, fingerprint_at
from plait.layout import Layout, TensorSpec, words_per_item
from plait.tensors import (
    DTYPES,
    StateDictWeights,
    fingerprint_slab,
    fingerprint_tensors,
    gather_at,
    integer_view,
    layout_of_tensors,
    scatter_at,
    storage_bits,
)
from plait.tensors import codec as torch_codec
from plait.tensors import fingerprint as torch_fingerprint
from plait.tensors.scatter import gather_on_device, scatter_on_device
from plait.weights import ArrayWeights, fingerprint_weights, pieces
from tests.fuzz.drawn import fresh_cut, fresh_layout, fresh_states
from tests.fuzz.material import Source

State = dict[str, torch.Tensor]

_TORCH_DTYPES: Final = tuple(sorted(DTYPES, key=lambda name: (name != "BF16", name)))
_SLICES: Final = (1 << 20, 1, 5, 64)
# As on a CPU, and as on any other device: with torch's arithmetic alone.
_SUMS: Final = (torch_fingerprint.fingerprint_items, torch_fingerprint.items_on_device)
# Word numbers at the edges of the key's 48 bits.
_FIRST_WORDS: Final = (0, 1, 77, (1 << 31) - 3, (1 << 47) - 9)


def torch_bridge(data: bytes) -> None:
    """Detect, encode and apply in torch; scattered items and affine blocks of a storage."""
    source = Source(data)
    layout = fresh_layout(source, _TORCH_DTYPES)
    cut = fresh_cut(source, layout).cut
    old, new = fresh_states(source, layout)
    before, after = tensors_of(source, old), tensors_of(source, new)
    with (
        mock.patch.object(torch_codec, "_SLICE", source.pick(_SLICES)),
        mock.patch.object(torch_fingerprint, "_SLICE", source.pick(_SLICES)),
        mock.patch.object(torch_codec, "fingerprint_items", source.pick(_SUMS)),
    ):
        if source.chance(3):
            _odd_tensors_are_refused(source, cut, before, after)
        _same_deltas(cut, old, before, after)
        _full_passes(layout, before, new)
        _scattered(source)
        _affine_block(source)


def tensors_of(source: Source, weights: ArrayWeights) -> State:
    """The same bits in tensors, each somewhere in a storage of its own."""
    state = {}
    for tensor in weights.layout.tensors:
        bits = weights.bits(tensor.name)
        offset = source.below(4)
        whole = np.zeros(offset + bits.size + source.below(3), bits.dtype)
        whole[offset : offset + bits.size] = bits
        flat = torch.from_numpy(whole.view(np.uint8)).view(DTYPES[tensor.dtype])
        state[tensor.name] = flat[offset : offset + bits.size].reshape(tensor.shape)
    return state


def _same_deltas(cut: Cut, old: ArrayWeights, before: State, after: State) -> None:
    """`before` becomes `after` where the cut reaches, and what goes there are the same bytes."""
    layout = old.layout
    # Of integers: torch copies a BOOL of other bits than 0 and 1 as one of these.
    copies = {n: integer_view(t).clone().view(t.dtype).reshape(t.shape) for n, t in before.items()}
    theirs = StateDictWeights(layout, copies)
    other = StateDictWeights(layout, after)
    for number, frame in enumerate(cut.frames):
        wanted = codec.detect(frame, old, other)
        found = torch_codec.detect(frame, layout, before, after)
        host = found.to_host()
        assert np.array_equal(host.positions, wanted.positions)
        assert np.array_equal(host.differences, wanted.differences)
        assert host.increment == wanted.increment
        encoded = codec.encode_delta(number, frame, wanted)
        assert torch_codec.encode_delta(number, frame, found) == encoded
        sent = torch_codec.TensorDelta.of(wanted, "cpu")
        assert torch_codec.increment_on(frame, layout, before, sent) == wanted.increment
        torch_codec.apply(frame, layout, before, sent)
        codec.apply(frame, theirs, wanted)
        assert not torch_codec.detect(frame, layout, before, after).count
    ours = StateDictWeights(layout, before)
    assert all(np.array_equal(ours.bits(t.name), theirs.bits(t.name)) for t in layout.tensors)


def _odd_tensors_are_refused(source: Source, cut: Cut, before: State, after: State) -> None:
    """A strided or lazy tensor has other bits in memory than it seems: refused, nothing written."""
    layout_names = sorted(name for name, t in before.items() if t.numel())
    if not layout_names:
        return
    name: str = source.pick(layout_names)
    odd = _odd(source, before[name])
    if odd is None:
        return
    held = {n: integer_view(t).clone() for n, t in before.items()}
    layout = layout_of_tensors(before)
    for frame in cut.frames:
        if all(piece.tensor.name != name for piece in pieces(frame, layout)):
            continue
        delta = _everything(frame)
        for call in (
            lambda: torch_codec.detect(frame, layout, before | {name: odd}, after),  # noqa: B023
            lambda: torch_codec.detect(frame, layout, after, before | {name: odd}),  # noqa: B023
            lambda: torch_codec.apply(frame, layout, before | {name: odd}, delta),  # noqa: B023
        ):
            try:
                call()
            except UsageError:
                continue
            raise AssertionError(f"{name}: {odd.shape} of strides {odd.stride()} was taken")
    assert all(torch.equal(held[n], integer_view(t)) for n, t in before.items()), "was written to"


def _everything(frame: FrameSpec) -> torch_codec.TensorDelta:
    size = frame.item_bytes
    ones = np.ones(frame.items, f"<u{size}")
    positions = np.arange(frame.items, dtype=np.uint32)
    return torch_codec.TensorDelta.of(codec.FrameDelta(size, positions, ones, Fingerprint()), "cpu")


def _odd(source: Source, tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the same shape and dtype whose items don't lie one behind the other."""
    lazy = source.chance(2)
    if lazy and tensor.is_complex():
        return tensor.conj()
    if lazy and tensor.is_floating_point() and tensor.element_size() > 1:
        return torch._neg_view(tensor)
    spread = torch.zeros(tensor.numel() * 2 * tensor.element_size(), dtype=torch.uint8)
    strides: list[int] = []
    step = 2
    for side in reversed(tensor.shape):
        strides.insert(0, step)
        step *= side
    odd = spread.view(tensor.dtype).as_strided(tensor.shape, strides)
    return None if odd.is_contiguous() else odd


def _full_passes(layout: Layout, held: State, new: ArrayWeights) -> None:
    """Both ways to sum a state, which is that of the kernels."""
    weights = StateDictWeights(layout, held)
    total = fingerprint_weights(weights)
    assert fingerprint_tensors(layout, held) == total
    parts = [
        torch_fingerprint.device_run(integer_view(held[tensor.name]), start)
        for tensor, start in zip(layout.tensors, layout.starts, strict=False)
    ]
    assert sum(parts, Fingerprint()) == total
    if all(np.array_equal(weights.bits(t.name), new.bits(t.name)) for t in layout.tensors):
        assert total == fingerprint_weights(new)


def _storage(source: Source) -> tuple[torch.Tensor, Any]:
    """A flat view of a storage, and its items in numpy."""
    tensor = TensorSpec("x", source.pick(_TORCH_DTYPES), (1 + source.below(300),))
    random = np.random.default_rng(source.byte())
    raw = random.integers(0, 256, tensor.nbytes, dtype=np.uint8)
    flat = storage_bits(torch.from_numpy(raw.copy()).view(DTYPES[tensor.dtype]))
    return flat, raw.view(f"<u{tensor.item_bytes}").copy()


def _scattered(source: Source) -> None:
    flat, items = _storage(source)
    places = [source.below(items.size + 2) - 1 for _ in range(source.below(12))]
    positions = np.array(sorted(set(places), reverse=source.chance(2)), np.int64)
    if positions.size and not 0 <= positions.min() <= positions.max() < items.size:
        for call in (
            lambda: gather_at(flat, positions),
            lambda: scatter_at(flat, positions, np.zeros(positions.size, items.dtype)),
        ):
            try:
                call()
            except UsageError:
                continue
            raise AssertionError(f"positions {positions} of {items.size} were taken")
        positions = positions[(positions >= 0) & (positions < items.size)]
    for gather in (gather_at, gather_on_device):
        assert np.array_equal(gather(flat, positions), items[positions])
    values = np.arange(positions.size).astype(items.dtype)
    items[positions] = values
    for scatter in (scatter_at, scatter_on_device):
        copy = flat.clone()
        scatter(copy, positions, values)
        assert np.array_equal(copy.numpy().view(items.dtype), items) or positions.size == 0


def _affine_block(source: Source) -> None:
    """A block of up to three sides, of any strides that stay within the storage."""
    flat, items = _storage(source)
    start = source.below(items.size)
    sizes: list[int] = []
    strides: list[int] = []
    room = items.size - 1 - start
    for _ in range(1 + source.below(3)):
        stride = source.pick((1, 0, 2, 3, 8))
        most = room // stride + 1 if stride else 4
        size = 1 + source.below(most)
        sizes.append(size)
        strides.append(stride)
        room -= (size - 1) * stride
        if np.prod(sizes) > 1000:
            break
    width = words_per_item(flat.element_size())
    word_strides = [source.pick((stride * width, width, 0, 1000)) for stride in strides]
    first: int = source.pick(_FIRST_WORDS)
    with mock.patch.object(torch_fingerprint, "_LONG_RUN", source.pick((1 << 12, 1, 4))):
        found = fingerprint_slab(flat, start, sizes, strides, first, word_strides)
    index = np.indices(sizes).reshape(len(sizes), -1)
    at = start + np.array(strides) @ index
    words = first + np.array(word_strides) @ index
    assert found == fingerprint_at(words.astype(np.int64), items[at])
