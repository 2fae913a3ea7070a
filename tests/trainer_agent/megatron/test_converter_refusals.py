"""What a converter refuses, in words, and before anything is written."""

import re
from collections.abc import Mapping

import pytest
import torch

from plait.errors import LayoutChanged, LayoutInvalid, PlaitError, PublishError, UsageError
from plait_trainer.converter import Block, HuggingFaceConverter, load
from plait_trainer.megatron import (
    MegatronConverter,
    ModelShape,
    ParallelPlace,
    converted,
    current_place,
)
from tests.trainer_agent.megatron.layouts import Style, Weights, random_weights, state_of
from tests.trainer_agent.megatron.real_models import checkpoint_model

SIZES = {"layers": 2, "hidden": 6, "heads": 4, "groups": 2, "head_dim": 2, "vocab": 10, "ffn": 4}
DENSE = ModelShape(**SIZES)
TIED = ModelShape(**SIZES, is_tied=True)
MIXTURE = ModelShape(**SIZES, experts=2, expert_ffn=4)
FUSED = "decoder.layers.1.self_attention.linear_qkv.weight"


def state(shape: ModelShape = DENSE, style: Style = Style()) -> Weights:  # noqa: B008
    return state_of(shape, random_weights(shape), ParallelPlace(), style)


def unchanged(before: Weights, after: Weights) -> bool:
    return all(
        torch.equal(after[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in before.items() if tensor is not None
    )  # fmt: skip


CHANGES: dict[str, tuple[ModelShape, Mapping[str, torch.Tensor | None], str]] = {
    "another parameter": (
        DENSE, {"decoder.layers.0.self_attention.linear_q_up_proj.weight": torch.ones(2)},
        r"'decoder.layers.0.self_attention.linear_q_up_proj.weight' has no place in the checkpoint",
    ),
    "positions": (
        DENSE, {"embedding.position_embeddings.weight": torch.ones(2, 6)}, "no place in the check",
    ),
    "none": (DENSE, {FUSED: None}, r"no parameter holds '.*layers.1.self_attn.q_proj.weight', and"),
    "another shape": (
        DENSE, {FUSED: torch.ones(18, 6)}, r"has the shape \[18, 6\]; expected \[16, 6\]",
    ),
    "both kinds of norms": (
        DENSE, {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.ones(6)},
        r"both would be 'model.layers.0.input_layernorm.weight'",
    ),
    "one layer more": (
        DENSE, {"decoder.layers.2.input_layernorm.weight": torch.ones(6)}, "is of layer 2; exp",
    ),
    "biases": (
        DENSE, {"decoder.layers.0.self_attention.linear_qkv.bias": torch.ones(16)},
        r"holds 'model.layers.0.self_attn.q_proj.bias', which isn't there in such a model",
    ),
    "few rows": (
        DENSE, {"output_layer.weight": torch.ones(9, 6)}, "has 9 rows .* expected at least 10",
    ),
    "one expert more": (
        MIXTURE, {"decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight": torch.ones(1)},
        "is of expert 2; expected 2",
    ),
    "shared experts": (
        MIXTURE, {"decoder.layers.0.mlp.shared_experts.gate_weight": torch.ones(1, 6)},
        "which isn't there in such a model",
    ),
    "an MLP instead of experts": (
        MIXTURE, {"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(6, 4)}, "has no place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_parameters_that_such_a_model_has_not_are_refused(
    change: tuple[ModelShape, Mapping[str, torch.Tensor | None], str],
) -> None:
    shape, edits, message = change
    found = {
        name: tensor for name, tensor in {**state(shape), **edits}.items() if tensor is not None
    }
    with pytest.raises(PublishError, match=message):
        MegatronConverter(shape).blocks(found)


def test_grouped_experts_must_be_contiguous() -> None:
    found = state(MIXTURE, Style(experts="grouped"))
    name = "decoder.layers.0.mlp.experts.weight1"
    found[name] = found[name].t().contiguous().t()
    with pytest.raises(PublishError, match="has strides"):
        MegatronConverter(MIXTURE).blocks(found)


@pytest.mark.parametrize(
    ("shape", "place", "message"),
    [
        (DENSE, ParallelPlace(tp_size=4), "2 query groups are fewer than 4 tensor-parallel ranks"),
        (ModelShape(**{**SIZES, "groups": 4}), ParallelPlace(tp_size=3),
         "4 query groups can't be dealt out to 3"),
        (DENSE, ParallelPlace(pp_size=3), "2 layers can't be dealt out to 3 pipeline chunks"),
        (MIXTURE, ParallelPlace(ep_size=3), "2 experts can't be dealt out to 3 expert-parallel"),
        (DENSE, ParallelPlace(pp_size=2, layers=range(3)), "aren't among the model's 2"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_dealt_out_are_refused(
    shape: ModelShape, place: ParallelPlace, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        MegatronConverter(shape, place)


def test_features_that_cannot_be_dealt_out_are_refused() -> None:
    shape = ModelShape(**{**SIZES, "ffn": 5})
    place = ParallelPlace(tp_size=2)
    found = state_of(shape, random_weights(shape), place, Style())
    with pytest.raises(UsageError, match="5 MLP features can't be dealt out to 2"):
        MegatronConverter(shape, place).blocks(found)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_rank": 1}, "tp_rank is 1; expected 0 to 0"),
        ({"etp_rank": 2, "etp_size": 2}, "etp_rank is 2; expected 0 to 1"),
    ],
)
def test_a_rank_outside_of_its_size_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelPlace(**sizes)  # type: ignore[arg-type]


def test_a_world_that_the_sizes_do_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="6 processes aren't a multiple of pp=1 times tp=4"):
        ParallelPlace.of_rank(0, 6, tp=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "3 heads can't be dealt out to 2 query groups"),
        ({"hidden": 0}, "hidden is 0; expected at least 1"),
        ({"experts": 4}, "expert_ffn is 0"),
        ({"experts": 4, "expert_ffn": 2, "dense_layers": frozenset({2})}, "dense layer 2 isn't"),
    ],
)
def test_sizes_that_no_model_has_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelShape(**{**SIZES, **changes})


def test_a_configuration_of_another_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match="a model of type 'llama' has no Megatron layout"):
        ModelShape.of_config({"model_type": "llama"})


def test_as_many_places_as_chunks_are_needed() -> None:
    with pytest.raises(UsageError, match="2 model chunks are given with 1 places"):
        converted([dict, dict], DENSE, [ParallelPlace()])


@pytest.mark.filterwarnings("ignore")  # Megatron-Core says at length what it hasn't got on a CPU
def test_a_place_is_asked_for_in_words_where_nothing_says_it() -> None:
    with pytest.raises(UsageError, match="parallel state isn't initialised"):
        current_place()


# Loading -----------------------------------------------------------------------------------------


def edited(shape: ModelShape, **changes: torch.Tensor | None) -> Weights:
    weights: dict[str, torch.Tensor | None] = {**random_weights(shape, seed=1), **changes}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("shape", "changes", "error", "message"),
    [
        (DENSE, {NORM: None}, LayoutChanged, "the checkpoint lacks 'model.norm.weight'"),
        (DENSE, {"rotary": torch.ones(1)}, LayoutChanged, "has 'rotary', which the model doesn't"),
        (DENSE, {NORM: torch.ones(5)}, LayoutChanged, r"has the shape \[5\]; expected \[6\]"),
        (DENSE, {NORM: torch.ones(6)}, PublishError, "may be rounded to torch.bfloat16"),
        (
            DENSE, {NORM: torch.ones(6, dtype=torch.int32)}, PublishError,
            "is torch.int32 and may be rounded",
        ),
        (
            DENSE, {NORM: torch.ones(6).to(torch.float8_e4m3fn)}, PublishError,
            "is torch.float8_e4m3fn and may be rounded",
        ),
        (TIED, {"lm_head.weight": torch.ones(10, 6)}, PublishError, "their bits differ"),
    ],
    ids=["missing", "unknown", "shape", "rounded", "integers", "bytes", "tie"],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(
    shape: ModelShape,
    changes: dict[str, torch.Tensor | None],
    error: type[PlaitError],
    message: str,
) -> None:
    own = state(shape)
    before = {name: None if t is None else t.clone() for name, t in own.items()}
    with pytest.raises(error, match=message):
        load(MegatronConverter(shape), own, edited(shape, **changes))
    assert unchanged(before, own)  # type: ignore[arg-type]


def test_an_equal_copy_of_a_tie_is_taken() -> None:
    weights = random_weights(TIED, seed=1)
    own = state(TIED)
    copy = weights["model.embed_tokens.weight"].clone()
    load(MegatronConverter(TIED), own, {**weights, "lm_head.weight": copy})
    assert unchanged({"embedding.word_embeddings.weight": copy}, own)


def test_masters_take_a_narrower_checkpoint_exactly() -> None:
    finite = {name: torch.full(size, 1.5, dtype=torch.bfloat16)
              for name, size in DENSE.tensors().items()}  # fmt: skip
    own = {name: None if t is None else torch.zeros(t.shape) for name, t in state().items()}
    load(MegatronConverter(DENSE), own, finite)  # type: ignore[arg-type]
    assert all(bool((tensor == 1.5).all()) for tensor in own.values() if tensor is not None)


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0,), (2,)), ((3, 0), (2, 2)), ((-1, 0), (2, 2)), ((0, 0), (2, 1))]
)
def test_a_block_outside_of_its_tensor_is_refused(
    offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutInvalid, match="a block of 'x'"):
        Block("x", (4, 2), offsets, sizes, torch.ones(4))


def test_a_transformers_model_is_loaded_through_the_same_views() -> None:
    """Its stacked experts included; a parameter that has no such views is refused."""
    source, target = checkpoint_model("mixture", 1), checkpoint_model("mixture", 2)
    weights = {b.name: b.tensor for b in HuggingFaceConverter(source).blocks(source.state_dict())}
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
    load(HuggingFaceConverter(target), target.state_dict(), weights)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    own = source.state_dict()
    own["model.norm.weight"] = torch.ones(2 * len(own["model.norm.weight"]))[::2]
    with pytest.raises(PublishError, match=r"'model.norm.weight' has strides \[2\]"):
        list(HuggingFaceConverter(source).blocks(own))
