"""The bridge to torch: bits are views, and every device's arithmetic is the kernels' own."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from plait.errors import LayoutChanged, LayoutInvalid, UsageError
from plait.fingerprint import fingerprint_at, fingerprint_run
from plait.layout import DTYPE_BITS, TensorSpec
from plait.tensors import (
    DTYPES,
    StateDictWeights,
    bits_of,
    dtype_name,
    fingerprint_items,
    fingerprint_slab,
    gather_at,
    integer_view,
    layout_of_tensors,
    scatter_at,
    storage_bits,
)
from plait.tensors.fingerprint import device_sum, items_on_device
from plait.tensors.scatter import gather_on_device, scatter_on_device
from plait.weights import fingerprint_weights

SIZES = (1, 2, 4, 8)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_items(item_bytes: int, count: int) -> torch.Tensor:
    generator = np.random.default_rng(item_bytes * 1000 + count)
    raw = torch.from_numpy(generator.integers(0, 256, count * item_bytes, dtype=np.uint8))
    return raw.view(INTEGERS[item_bytes])


def test_every_layout_dtype_that_torch_has_keeps_its_size() -> None:
    for name, dtype in DTYPES.items():
        assert torch.empty(1, dtype=dtype).element_size() * 8 == max(DTYPE_BITS[name], 8)
        assert dtype_name(dtype) == name
    assert DTYPE_BITS.keys() - DTYPES.keys() == {"F4", "F6_E2M3", "F6_E3M2"}
    for other in (torch.complex128, torch.float4_e2m1fn_x2):
        with pytest.raises(LayoutInvalid):
            dtype_name(other)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_bits_are_a_view_of_the_tensor(dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype != torch.bool else torch.ones(256, dtype=torch.bool)
    bits = bits_of(tensor)
    assert bits.dtype == np.dtype(f"<u{tensor.element_size()}")
    assert bits.size == tensor.numel()
    bits[3] = 1
    assert bits_of(tensor)[3] == 1
    assert integer_view(tensor).data_ptr() == tensor.data_ptr()


def test_nan_payloads_and_negative_zeros_pass_as_bits() -> None:
    patterns = np.array([0x7FC1, 0x7FFF, 0xFFC0, 0x8000, 0x7F81, 0x0001], np.uint16)
    tensor = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    assert bits_of(tensor).tolist() == patterns.tolist()
    scatter_at(storage_bits(tensor), np.array([0, 5]), patterns[[1, 2]])
    assert bits_of(tensor).tolist() == [0x7FFF, 0x7FFF, 0xFFC0, 0x8000, 0x7F81, 0xFFC0]


def test_a_tensor_without_a_flat_view_is_refused() -> None:
    with pytest.raises(UsageError, match="contiguous"):
        integer_view(torch.zeros(4, 6).t())
    with pytest.raises(UsageError, match="meta"):
        bits_of(torch.empty(3, device="meta"))


@pytest.mark.parametrize("view", [integer_view, storage_bits, bits_of])
def test_a_tensor_whose_memory_waits_for_a_sign_is_refused(view: Callable[..., object]) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    lazy = [values.conj(), torch._neg_view(values), torch._neg_view(torch.tensor([1.0, 2.0]))]
    for tensor in lazy:
        with pytest.raises(UsageError, match=r"resolve_conj\(\)"):
            view(tensor)
        view(tensor.resolve_conj().resolve_neg())


def test_storage_bits_reach_beyond_a_view() -> None:
    whole = torch.arange(12, dtype=torch.int16)
    part = whole[4:8]
    assert storage_bits(part).tolist() == whole.tolist()


@pytest.mark.parametrize("item_bytes", SIZES)
def test_torch_sums_the_same_fingerprint_as_the_kernels(item_bytes: int) -> None:
    items = random_items(item_bytes, 1000)
    words = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 48, 1000))
    bits = items.numpy().view(f"<u{item_bytes}")
    expected = fingerprint_at(words.numpy(), bits)
    assert device_sum(words, items) == expected
    assert fingerprint_items(words, items) == expected
    with mock.patch("plait.tensors.fingerprint._SLICE", 300):
        assert items_on_device(words, items) == expected


@pytest.mark.parametrize("item_bytes", SIZES)
def test_a_slab_has_the_fingerprint_of_its_items(item_bytes: int) -> None:
    width = max(item_bytes // 2, 1)
    flat = random_items(item_bytes, 3 * 5000)
    bits = flat.numpy().view(f"<u{item_bytes}")
    run = fingerprint_run(bits, 77)
    assert fingerprint_slab(flat, 0, (15000,), (1,), 77, (width,)) == run
    rows = fingerprint_slab(flat, 0, (3, 5000), (5000, 1), 77, (5000 * width, width))
    assert rows == run
    columns = fingerprint_slab(flat, 0, (5000, 3), (1, 5000), 77, (width, 5000 * width))
    assert columns == run
    part = bits.reshape(3, 5000)[1:, 10:20]
    at = np.add.outer(np.arange(1, 3) * 5000, np.arange(10, 20)).reshape(-1)
    slab = fingerprint_slab(flat, 5010, (2, 10), (5000, 1), 7, (100 * width, width))
    words = np.add.outer(np.arange(2) * 100 * width, np.arange(10) * width).reshape(-1) + 7
    assert slab == fingerprint_at(words.astype(np.int64), np.ascontiguousarray(part.reshape(-1)))
    assert bits[at].tolist() == part.reshape(-1).tolist()


@pytest.mark.parametrize("item_bytes", SIZES)
def test_gather_and_scatter_move_bits(item_bytes: int) -> None:
    flat = random_items(item_bytes, 100)
    bits = flat.numpy().view(f"<u{item_bytes}")
    positions = np.array([3, 99, 0], np.int64)
    old = gather_at(flat, positions)
    assert old.tolist() == bits[positions].tolist()
    scatter_at(flat, positions, ~old)
    assert bits[positions].tolist() == (~old).tolist()


@pytest.mark.parametrize("item_bytes", SIZES)
def test_torchs_indexing_moves_the_bits_that_the_kernels_move(item_bytes: int) -> None:
    flat = random_items(item_bytes, 1000)
    positions = np.random.default_rng(3).permutation(1000)[:700]
    items = random_items(item_bytes, 700).numpy().view(f"<u{item_bytes}")
    wanted = flat.clone()
    scatter_at(wanted, positions, items)
    with mock.patch("plait.tensors.scatter._SLICE", 300):
        scatter_on_device(flat, positions, items)
        assert torch.equal(flat, wanted)
        found = gather_on_device(flat, positions[::-1])
    assert found.dtype == items.dtype
    assert found.tolist() == gather_at(flat, positions[::-1]).tolist() == items[::-1].tolist()


@pytest.mark.parametrize("positions", [[-1], [100], [0, 1 << 40]])
def test_positions_outside_are_refused_before_a_write(positions: list[int]) -> None:
    flat = random_items(2, 100)
    before = flat.clone()
    wrong = np.array(positions, np.int64)
    with pytest.raises(UsageError, match="positions"):
        gather_at(flat, wrong)
    with pytest.raises(UsageError, match="positions"):
        scatter_at(flat, wrong, np.zeros(len(positions), np.uint16))
    with pytest.raises(UsageError, match="can't be written"):
        scatter_at(flat, np.array([0, 1]), np.zeros(1, np.uint16))
    for dtype in (np.float16, np.int16, np.uint32):
        with pytest.raises(UsageError, match="can't be written"):
            scatter_at(flat, np.array([0]), np.ones(1, dtype))
    assert torch.equal(flat, before)


def test_a_state_dict_is_weights() -> None:
    tensors = {"b": torch.randn(3, 4).bfloat16(), "a": torch.randn(2), "s": torch.tensor(1.5)}
    layout = layout_of_tensors(tensors)
    assert layout["b"] == TensorSpec("b", "BF16", (3, 4))
    assert layout["s"].shape == ()
    weights = StateDictWeights(layout, {**tensors, "more": torch.zeros(1)})
    before = fingerprint_weights(weights)
    weights.bits("b")[0] ^= 1
    assert fingerprint_weights(weights) != before
    with pytest.raises(LayoutChanged, match="'a' is missing"):
        StateDictWeights(layout, {"b": tensors["b"], "s": tensors["s"]})
    with pytest.raises(LayoutChanged, match="'b' is F32"):
        StateDictWeights(layout, {**tensors, "b": tensors["b"].float()})
