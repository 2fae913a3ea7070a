"""Blocks of a checkpoint in Megatron-Core's layouts, against those made by copies."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout import Layout, TensorSpec
from plait_trainer.blocks import BlockSpec
from plait_trainer.converter import Block, ConvertedSource, load
from plait_trainer.dtypes import DtypeRule
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, converted
from plait_trainer.sharing import share_out
from plait_trainer.snapshot import SnapshotDetector
from tests.trainer_agent.megatron.layouts import Style, Weights, random_weights, state_of

DENSE = ModelShape(
    layers=4, hidden=12, heads=8, groups=4, head_dim=2, vocab=21, ffn=16,
    has_qkv_bias=True, has_proj_bias=True,
)  # fmt: skip
MIXTURE = ModelShape(
    layers=4, hidden=12, heads=8, groups=4, head_dim=2, vocab=21, ffn=16, experts=4, expert_ffn=8,
    shared_ffn=20, dense_layers=frozenset({1}), is_tied=True, has_expert_bias=True,
)  # fmt: skip
SHAPES = {"dense": DENSE, "mixture": MIXTURE}
STYLES = [
    Style(padded=32),
    Style(fused_norms=True, experts="te", padded=24),
    Style(experts="grouped", padded=64),
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def places(tp: int, ep: int, pp: int, etp: int | None = None) -> Iterator[ParallelPlace]:
    stage = max(tp, ep * (tp if etp is None else etp))
    for rank in range(stage * pp):
        yield ParallelPlace.of_rank(rank, stage * pp, tp=tp, ep=ep, pp=pp, etp=etp)


def assert_holds(block: Block, weights: Weights) -> None:
    expected = weights[block.name][block.region]
    assert block.sizes == tuple(expected.shape)
    assert raw(block.tensor) == raw(expected), block.name


def assert_equal_states(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor is None or raw(found[name]) == raw(tensor), name


def emptied(state: Weights) -> Weights:
    return {name: None if t is None else torch.zeros_like(t) for name, t in state.items()}


@pytest.mark.parametrize("style", STYLES, ids=["local", "te", "grouped"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1)], ids=str)
def test_every_block_is_the_checkpoints_and_loading_it_makes_the_same_tensors(
    sizes: tuple[int, int, int], shape: ModelShape, style: Style
) -> None:
    weights = random_weights(shape)
    for place in places(*sizes):
        converter = MegatronConverter(shape, place)
        state = state_of(shape, weights, place, style)
        for block in converter.blocks(state):
            assert_holds(block, weights)
        filled = emptied(state)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            # What pads the vocabulary is the training's own, and stays.
            if name in state:
                filled[name] = torch.full_like(state[name], 7.0)
        load(converter, filled, weights)
        assert_equal_states(filled, state)


GRIDS = [(tp, ep, pp) for tp in (1, 2, 4) for ep in (1, 2) for pp in (1, 2)]


@pytest.mark.parametrize("style", STYLES, ids=["local", "te", "grouped"])
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_all_processes_together_hold_every_word_once(
    sizes: tuple[int, int, int], style: Style
) -> None:
    """What several hold alike is dealt out to one of them; what overlaps otherwise is refused."""
    weights = random_weights(MIXTURE)
    held = [held_by(MIXTURE, weights, place, style) for place in places(*sizes)]
    division = share_out(held)
    expected = Layout.of(TensorSpec(n, "BF16", shape) for n, shape in MIXTURE.tensors().items())
    assert division.layout == expected
    marks = {name: torch.zeros(shape, dtype=torch.int) for name, shape in MIXTURE.tensors().items()}
    for block in (block for owned in division.owned for block in owned):
        marks[block.name][block.region] += 1
    assert all(bool((mark == 1).all()) for mark in marks.values())


def held_by(
    shape: ModelShape, weights: Weights, place: ParallelPlace, style: Style
) -> list[BlockSpec]:
    blocks = MegatronConverter(shape, place).blocks(state_of(shape, weights, place, style))
    return [
        BlockSpec(TensorSpec(block.name, "BF16", block.shape), block.offsets, block.sizes)
        for block in blocks if not block.is_copy
    ]  # fmt: skip


def test_experts_may_be_dealt_out_otherwise_than_the_rest() -> None:
    weights, style = random_weights(MIXTURE), Style(padded=32)
    for place in places(tp=2, ep=4, pp=1, etp=1):
        state = state_of(MIXTURE, weights, place, style)
        blocks = {block.name: block for block in MegatronConverter(MIXTURE, place).blocks(state)}
        for block in blocks.values():
            assert_holds(block, weights)
        assert f"model.layers.0.mlp.experts.{place.ep_rank}.up_proj.weight" in blocks


def test_chunks_of_a_virtual_pipeline_hold_their_own_layers() -> None:
    weights = random_weights(DENSE)
    found = []
    for pp_rank, vp_rank in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        place = ParallelPlace(pp_rank=pp_rank, pp_size=2, vp_rank=vp_rank, vp_size=2)
        state = state_of(DENSE, weights, place, Style())
        blocks = list(MegatronConverter(DENSE, place).blocks(state))
        for block in blocks:
            assert_holds(block, weights)
        found += [block.name for block in blocks]
    assert sorted(found) == sorted(DENSE.tensors())


def test_chunks_are_numbered_stage_by_stage_and_then_round_by_round() -> None:
    """As Megatron-Core's interleaved schedule visits them."""
    found = [
        ParallelPlace(pp_rank=pp_rank, pp_size=2, vp_rank=vp_rank, vp_size=3).layers_of(12)
        for vp_rank in range(3)
        for pp_rank in range(2)
    ]
    assert found == [range(first, first + 2) for first in range(0, 12, 2)]


def test_uneven_stages_are_given_by_their_layers() -> None:
    weights = random_weights(DENSE)
    for rank, layers in enumerate((range(3), range(3, 4))):
        place = ParallelPlace(pp_rank=rank, pp_size=2, layers=layers)
        state = state_of(DENSE, weights, place, Style())
        for block in MegatronConverter(DENSE, place).blocks(state):
            assert_holds(block, weights)


def test_a_tied_output_layer_of_another_stage_is_loaded_and_not_published() -> None:
    weights = random_weights(MIXTURE)
    place = ParallelPlace(pp_rank=1, pp_size=2)
    state = state_of(MIXTURE, weights, place, Style(padded=32))
    (copy,) = [b for b in MegatronConverter(MIXTURE, place).blocks(state) if b.is_copy]
    assert copy.name == "model.embed_tokens.weight"
    assert copy.tensor.data_ptr() == state["output_layer.weight"].data_ptr()
    published = {
        tensor.spec.name for tensor in converted([lambda: state], MIXTURE, [place]).tensors()
    }
    assert "model.norm.weight" in published
    assert not published & {"model.embed_tokens.weight", "lm_head.weight"}


@st.composite
def shapes_and_sizes(draw: st.DrawFn) -> tuple[ModelShape, tuple[int, int, int], Style]:
    tp, ep, pp = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 3)]))
    groups = tp * draw(st.integers(1, 3))
    few = st.integers(1, 4)
    experts = ep * draw(st.integers(0, 2))
    shape = ModelShape(
        layers=pp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 9)),
        groups=groups,
        heads=groups * draw(few),
        head_dim=draw(few),
        vocab=draw(st.integers(1, 40)),
        ffn=tp * draw(few),
        experts=experts,
        expert_ffn=tp * draw(few) if experts else 0,
        shared_ffn=tp * draw(st.integers(0, 2)) if experts else 0,
        is_tied=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_expert_bias=draw(st.booleans()),
    )
    rows = -(-shape.vocab // tp) * tp + tp * draw(st.integers(0, 30))
    kind = draw(st.sampled_from(["sequential", "grouped", "te"]))
    return shape, (tp, ep, pp), Style(draw(st.booleans()), kind, rows)


@given(shapes_and_sizes(), st.integers(0, 1 << 30))
@settings(max_examples=150, deadline=None)
def test_any_model_comes_back_bit_for_bit(
    case: tuple[ModelShape, tuple[int, int, int], Style], seed: int
) -> None:
    shape, sizes, style = case
    weights = random_weights(shape, seed)
    copied = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for place in places(*sizes):
        state = state_of(shape, weights, place, style)
        filled = {name: t if t is None else t.clone() for name, t in state.items()}
        load(MegatronConverter(shape, place), filled, weights)
        assert_equal_states(filled, state)
        for block in MegatronConverter(shape, place).blocks(state):
            copied[block.name][block.region] = block.tensor.reshape(block.sizes)
    assert_equal_states(copied, weights)


@pytest.mark.parametrize("size", [1, 2])
def test_a_changed_element_is_found_at_its_canonical_word(size: int) -> None:
    weights = random_weights(DENSE)
    grid = list(places(size, 1, 1))
    place = grid[-1]
    state = state_of(DENSE, weights, place, Style(padded=32))
    source = ConvertedSource([(state, MegatronConverter(DENSE, place))], DtypeRule(None))
    held = [held_by(DENSE, weights, other, Style(padded=32)) for other in grid]
    share = share_out(held, rank=size - 1).deltas
    detector = SnapshotDetector()
    live = {tensor.spec.name: tensor for tensor in source.tensors()}
    detector.attach(live, share)

    # A group here is two query heads, a key head and a value head, of two rows each; this place's
    # second group is the model's group `group`.
    fused = state["decoder.layers.2.self_attention.linear_qkv.weight"].view(torch.int16)
    group = 1 if size == 1 else 3
    expected = {
        ("q_proj", group * 4, 3), ("q_proj", group * 4 + 3, 0),
        ("k_proj", group * 2, 7), ("v_proj", group * 2 + 1, 11),
    }  # fmt: skip
    for row, column in [(0, 3), (3, 0), (4, 7), (7, 11)]:
        fused[8 + row, column] ^= 1

    found = {
        element
        for number, delta in detector.capture(live).deltas.items()
        for word in share.cut.cut.frames[number].words_of(delta.positions).tolist()
        for element in elements_at(share.layout, word)
    }
    assert found == {
        (f"model.layers.2.self_attn.{name}.weight", row, column) for name, row, column in expected
    }


def elements_at(layout: Layout, word: int) -> Iterator[tuple[str, int, int]]:
    """(tensor, row, column) of a word of a 16-bit layout."""
    for spec in layout.tensors:
        item = word - layout.start_of(spec.name)
        if 0 <= item < spec.items:
            yield (spec.name, *divmod(item, spec.shape[-1]))


def test_a_process_publishes_all_of_its_chunks_each_in_its_own_dtype() -> None:
    weights = random_weights(MIXTURE)
    chunks, grid = [], [ParallelPlace(vp_rank=rank, vp_size=2) for rank in range(2)]
    for place in grid:
        state = {
            name: tensor.float() if "expert_bias" in name else tensor
            for name, tensor in state_of(MIXTURE, weights, place, Style()).items()
            if tensor is not None
        }
        chunks.append(lambda state=state: state)
    found = {tensor.spec for tensor in converted(chunks, MIXTURE, grid).tensors()}
    assert found == {
        TensorSpec(name, "F32" if "correction_bias" in name else "BF16", shape)
        for name, shape in MIXTURE.tensors().items()
    }
