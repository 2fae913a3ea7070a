"""Grain cuts: every word once, and a rank finds all of its words in its own slots."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import codec
from plait.codec import sweep
from plait.codec.sweep import rounds
from plait.cut import plain_cut
from plait.errors import UsageError
from plait.fingerprint import ZERO
from plait.grain import (
    COLUMNS,
    DENSE_RULES,
    ROWS,
    Grain,
    SlottedCut,
    chunks_in_slots,
    filling,
    grain_cut,
    kv_heads_of,
    slots_of,
)
from plait.layout import Layout, TensorSpec
from plait.manifest import Manifest, Statistics
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core.strategies import (
    changed_weights,
    copy_of,
    densities,
    equal_bits,
    random_weights,
    seeds,
)

HIDDEN, HEAD, KV_HEADS, FEED, VOCABULARY = 16, 2, 8, 24, 130


def decoder(*, dtype: str = "BF16", experts: int = 0) -> Layout:
    """One decoder layer as Hugging Face names it; `experts` replace its feed-forward."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.scalar": (),
        "model.unknown.weight": (16, 16),
    }
    layer = "model.layers.0."
    for name, shape in {
        "self_attn.q_proj.weight": (32, HIDDEN),
        "self_attn.q_proj.bias": (32,),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 32),
        "self_attn.o_proj.bias": (HIDDEN,),
        "input_layernorm.weight": (HIDDEN,),
    }.items():
        shapes[layer + name] = shape
    for prefix in [f"mlp.experts.{number}." for number in range(experts)] or ["mlp."]:
        shapes[layer + prefix + "gate_proj.weight"] = (FEED, HIDDEN)
        shapes[layer + prefix + "up_proj.weight"] = (FEED, HIDDEN)
        shapes[layer + prefix + "down_proj.weight"] = (HIDDEN, FEED)
    return Layout.of(TensorSpec(name, dtype, shape) for name, shape in shapes.items())


def slot_map(layout: Layout, cut: SlottedCut, name: str) -> np.ndarray[Any, Any]:
    """The slot of every item of a tensor, in its shape."""
    slots = np.full(layout.total_words, -1)
    for frame, slot in zip(cut.cut.frames, cut.slots, strict=True):
        assert (slots[frame.words_of(np.arange(frame.items, dtype=np.uint32))] == -1).all()
        slots[frame.words_of(np.arange(frame.items, dtype=np.uint32))] = slot
    tensor = layout[name]
    first = layout.start_of(name)
    words = slots[first : first + tensor.words].reshape(tensor.items, -1)
    return words[:, 0].reshape(tensor.shape)


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
@pytest.mark.parametrize("grain", [1, 2, 8])
@pytest.mark.parametrize("for_anchor", [False, True])
@pytest.mark.parametrize("experts", [0, 16])
def test_a_grain_cut_covers_every_word_once(
    dtype: str, grain: int, for_anchor: bool, experts: int
) -> None:
    layout = decoder(dtype=dtype, experts=experts)
    cut = grain_cut(layout, grain=grain, for_anchor=for_anchor, kv_heads=KV_HEADS)
    assert cut.cut.covers(layout)
    assert set(cut.slots) == (set(range(grain + 1)) if grain > 1 else {0})


def test_a_grain_of_one_is_the_plain_cut() -> None:
    layout = decoder()
    assert grain_cut(layout, grain=1, for_anchor=False).cut == plain_cut(layout, for_anchor=False)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_finds_its_rows_and_columns_in_its_slots(size: int) -> None:
    layout = decoder()
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS)
    layer = "model.layers.0."
    rows = [
        layer + f"self_attn.{n}"
        for n in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight")
    ]
    rows += [layer + f"mlp.{n}_proj.weight" for n in ("gate", "up")]
    for rank in range(size):
        own = sorted(slots_of(rank, size))
        for name in rows:
            slots = slot_map(layout, cut, name)
            share = len(slots) // size
            assert np.isin(slots[rank * share : (rank + 1) * share], own).all()
            assert set(own[1:]) == set(np.unique(slots[rank * share : (rank + 1) * share]).tolist())
        for name in (layer + "self_attn.o_proj.weight", layer + "mlp.down_proj.weight"):
            slots = slot_map(layout, cut, name)
            share = slots.shape[1] // size
            assert np.isin(slots[:, rank * share : (rank + 1) * share], own).all()


@pytest.mark.parametrize("size", [2, 8])
def test_a_vocabulary_is_divided_as_engines_pad_it(size: int) -> None:
    layout = decoder()
    slots = slot_map(layout, grain_cut(layout, for_anchor=False), "model.embed_tokens.weight")
    share = 192 // size  # 130 rows, filled up to a multiple of 64
    for rank in range(size):
        held = slots[rank * share : (rank + 1) * share]
        assert np.isin(held, sorted(slots_of(rank, size))).all()


@pytest.mark.parametrize("kv_heads", [None, 2, 4, 12])
def test_key_value_heads_that_the_grain_does_not_divide_are_common(kv_heads: int | None) -> None:
    layout = decoder()
    cut = grain_cut(layout, for_anchor=False, kv_heads=kv_heads)
    for name in ("k_proj", "v_proj"):
        assert not slot_map(layout, cut, f"model.layers.0.self_attn.{name}.weight").any()


def test_what_has_no_known_side_is_common() -> None:
    layout = decoder()
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS)
    layer = "model.layers.0."
    for name in (
        "model.norm.weight", "model.scalar", "model.unknown.weight",
        layer + "self_attn.o_proj.bias", layer + "input_layernorm.weight",
    ):  # fmt: skip
        assert not slot_map(layout, cut, name).any()


def test_experts_lie_whole_in_the_slot_of_their_number() -> None:
    layout = decoder(experts=16)
    cut = grain_cut(layout, for_anchor=False)
    for number in range(16):
        name = f"model.layers.0.mlp.experts.{number}.down_proj.weight"
        assert (slot_map(layout, cut, name) == 1 + number // 2).all()
    odd = decoder(experts=12)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert not slot_map(odd, grain_cut(odd, for_anchor=False), name).any()
    shared = grain_cut(layout, for_anchor=False, rules=DENSE_RULES)
    columns = slot_map(layout, shared, "model.layers.0.mlp.experts.3.down_proj.weight")
    assert (columns == 1 + np.arange(FEED) // 3).all()


def test_stacked_parts_are_divided_each_by_itself() -> None:
    layout = Layout.of([TensorSpec("x.gate_up_proj.weight", "BF16", (32, 3))])
    slots = slot_map(layout, grain_cut(layout, for_anchor=False), "x.gate_up_proj.weight")
    assert (slots[:, 0] == 1 + np.tile(np.repeat(np.arange(8), 2), 2)).all()


def test_the_callers_rules_decide() -> None:
    layout = Layout.of([TensorSpec("a", "BF16", (8, 6)), TensorSpec("b", "BF16", (6, 8))])
    rules = [("a", ROWS), ("b", COLUMNS)]
    cut = Grain(4, rules=rules).cut(layout, for_anchor=False)
    assert (slot_map(layout, cut, "a")[:, 0] == 1 + np.arange(8) // 2).all()
    assert (slot_map(layout, cut, "b")[0] == 1 + np.arange(8) // 2).all()


def test_full_frames_begin_together_in_every_slot() -> None:
    names = ("a.q_proj.weight", "a.down_proj.weight", "b.q_proj.weight", "b.down_proj.weight")
    layout = Layout.of(TensorSpec(name, "BF16", (8192, 8192)) for name in names)
    cut = grain_cut(layout, grain=2, for_anchor=False)
    assert cut.cut.covers(layout)
    assert cut.slots == (1, 2) * (len(cut.slots) // 2)
    assert next(rounds(cut.cut.frames)) == range(2)
    assert sum(len(numbers) for numbers in rounds(cut.cut.frames)) == len(cut.cut.frames)
    anchor = grain_cut(layout, grain=2, for_anchor=True)
    assert anchor.cut.covers(layout)
    assert max(frame.nbytes for frame in anchor.cut.frames) <= 8 << 20


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (1, 3), (2, 3), (5, 16), (11, 16), (0, 1)])
def test_slots_of_any_size_hold_the_rank(rank: int, size: int) -> None:
    items = np.arange(48 * 8)  # both 3, 8 and 16 divide it
    mine = np.isin(1 + items * 8 // items.size, sorted(slots_of(rank, size)))
    share = items.size // size
    assert mine[rank * share : (rank + 1) * share].all()


def test_impossible_grains_and_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="grain of 0"):
        grain_cut(decoder(), grain=0, for_anchor=False)
    with pytest.raises(UsageError, match="rank 8 of 8"):
        slots_of(8, 8)


def test_a_config_names_its_key_value_heads() -> None:
    assert kv_heads_of({"num_key_value_heads": 8, "num_attention_heads": 16}) == 8
    assert kv_heads_of({"num_attention_heads": 16}) == 16
    assert kv_heads_of({"text_config": {"num_key_value_heads": 4}}) == 4
    assert kv_heads_of({}) is None
    for none in (0, -1, True, 8.0, None):
        assert kv_heads_of({"num_attention_heads": none}) is None


def encoded(cut: SlottedCut, old: ArrayWeights, new: ArrayWeights) -> list[codec.Chunk]:
    deltas = codec.detect_frames(cut.cut.frames, old, new)
    frames = zip(cut.cut.frames, deltas, strict=True)
    return list(
        codec.pack_chunks(
            (codec.encode_delta(n, frame, delta) for n, (frame, delta) in enumerate(frames)),
            cut.slots,
        )
    )


@settings(deadline=None)
@given(seeds, densities, st.sampled_from(["U8", "BF16", "F32", "I64"]))
def test_a_sweep_finds_what_each_frame_alone_finds(seed: int, density: float, dtype: str) -> None:
    layout = decoder(dtype=dtype, experts=seed % 2 * 8)
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, density)
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS)
    found = codec.detect_frames(cut.cut.frames, old, new)
    for frame, delta in zip(cut.cut.frames, found, strict=True):
        alone = codec.detect(frame, old, new)
        assert np.array_equal(delta.positions, alone.positions)
        assert np.array_equal(delta.differences, alone.differences)
        assert delta.increment == alone.increment


@settings(deadline=None)
@given(seeds, densities)
def test_slots_lead_to_the_new_weights_and_each_is_a_chunk_stream_of_its_own(
    seed: int, density: float
) -> None:
    layout = decoder()
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, density)
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS)
    chunks = encoded(cut, old, new)
    assert all({cut.slots[n] for n in chunk.frames} == {chunk.slot} for chunk in chunks)
    increment = sum((chunk.increment for chunk in chunks), ZERO)
    assert fingerprint_weights(old) + increment == fingerprint_weights(new)
    manifest = Manifest(
        kind="delta", layout=layout.digest, cut=cut.cut.digest if chunks else None,
        base=fingerprint_weights(old), target=fingerprint_weights(new),
        chunks=tuple(chunk.entry for chunk in chunks),
        statistics=Statistics(0, 0, 0, 0, sum(chunk.size for chunk in chunks)),
    )  # fmt: skip
    held = copy_of(old)
    by_digest = {chunk.digest: chunk for chunk in chunks}
    for slot in range(9):
        for entry in chunks_in_slots(manifest, {slot}):
            for frame in codec.read_chunk(by_digest[entry.digest].data, entry=entry).frames:
                spec = cut.cut.frames[frame.number]
                codec.apply(spec, held, codec.decode_delta(frame, spec))
    assert equal_bits(held, new)


def test_runs_of_every_length_and_place_are_searched_to_their_ends() -> None:
    random = np.random.default_rng(3)
    for columns in (1, 3, 63, 64, 65, 127, 128, 129, 200, 321):
        name = "x.down_proj.weight"
        layout = Layout.of([TensorSpec(name, "BF16", (23, columns * 2))])
        old = ArrayWeights(layout, {name: random.integers(0, 3, 46 * columns, dtype=np.uint16)})
        new = ArrayWeights(layout, {name: random.integers(0, 3, 46 * columns, dtype=np.uint16)})
        for frame in grain_cut(layout, grain=2, for_anchor=False).cut.frames:
            delta = codec.detect(frame, old, new)
            words = frame.words_of(np.arange(frame.items, dtype=np.uint32))
            before, after = (weights.bits(name)[words] for weights in (old, new))
            assert np.array_equal(delta.positions, np.flatnonzero(before != after))
            assert np.array_equal(delta.differences, (after - before)[before != after])


@pytest.mark.parametrize("block", [97, 1000])
@pytest.mark.parametrize("for_anchor", [False, True])
def test_a_sweep_in_small_blocks_that_cut_rows_apart_finds_the_same(
    block: int, for_anchor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_BLOCK", block)
    # Frames of a few rows: blocks of columns lie beside and below each other.
    monkeypatch.setattr(filling, "items_max", lambda *_, **__: 70)
    layout = decoder()
    old = random_weights(layout, block)
    new = changed_weights(old, block + 1, 0.3)
    cut = grain_cut(layout, for_anchor=for_anchor, kv_heads=KV_HEADS).cut
    assert cut.covers(layout)
    for frame, delta in zip(cut.frames, codec.detect_frames(cut.frames, old, new), strict=True):
        alone = codec.detect(frame, old, new)
        assert np.array_equal(delta.positions, alone.positions)
        assert np.array_equal(delta.differences, alone.differences)
        assert delta.increment == alone.increment
