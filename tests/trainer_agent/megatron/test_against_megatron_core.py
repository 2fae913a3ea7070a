"""The converter against Megatron-Core's own modules: one process, and two of them over gloo."""

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from plait_trainer.converter import HuggingFaceConverter, State, load
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, current_place
from tests.trainer_agent.megatron.rank_program import CASES, WORLD
from tests.trainer_agent.megatron.real_models import (
    KINDS,
    VOCAB,
    checkpoint_model,
    grid,
    inputs,
    megatron_config,
    megatron_logits,
    megatron_model,
)

ROOT = Path(__file__).parents[3]

# Megatron-Core says at length what it hasn't got on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with grid(tmp_path_factory.mktemp("grid")):
        yield


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    blocks = HuggingFaceConverter(model).blocks(model.state_dict())
    return {block.name: block.tensor for block in blocks}


def assert_same_logits(found: torch.Tensor, model: Any) -> None:
    with torch.no_grad():
        expected = model(inputs()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found[..., :VOCAB], expected, rtol=1e-4, atol=1e-5)


def converter_of(model: Any) -> MegatronConverter:
    return MegatronConverter(ModelShape.of_config(model.config), current_place())


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_gives_the_same_logits(kind: str) -> None:
    model = checkpoint_model(kind)
    trained = megatron_model(model.config)
    load(converter_of(model), trained.state_dict(), checkpoint(model))
    assert_same_logits(megatron_logits(trained), model)


def test_grouped_experts_give_the_same_logits() -> None:
    """Its kernel needs CUDA: the product that it stands for, expert by expert, is put in."""

    def product(tokens: Any, weights: Any, counts: Any, trans_b: bool) -> torch.Tensor:
        assert not trans_b
        parts = tokens.split(counts.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    from megatron.core.transformer.moe import grouped_gemm_util
    from megatron.core.transformer.moe.experts import GroupedMLP

    model = checkpoint_model("mixture")
    with mock.patch.multiple(
        grouped_gemm_util, assert_grouped_gemm_is_available=mock.Mock(),
        ops=SimpleNamespace(gmm=product),
    ):  # fmt: skip
        trained = megatron_model(model.config, grouped=True)
        assert "decoder.layers.0.mlp.experts.weight1" in trained.state_dict()
        for module in trained.modules():
            if isinstance(module, GroupedMLP):
                # It insists on BF16, which would hide what the comparison is to show.
                module.config = copy.copy(module.config)
                module.config.bf16 = True
        load(converter_of(model), trained.state_dict(), checkpoint(model))
        assert_same_logits(megatron_logits(trained), model)


def test_transformer_engines_names_are_those_of_megatrons_own_map() -> None:
    """Norms fused into the linears that read them: the spec says how its names become theirs."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    renamed = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert renamed
    model = checkpoint_model("dense")
    state = {}
    for name, tensor in megatron_model(model.config).state_dict().items():
        for own, fused in renamed.items():
            name = name.replace(f".{own}", f".{fused}")
        state[name] = tensor
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in state
    load(converter_of(model), state, checkpoint(model))
    assert_holds(converter_of(model), state, checkpoint(model))


def test_a_routers_balancing_bias_stays_in_fp32() -> None:
    model = checkpoint_model("mixture")
    settings = dataclasses.replace(
        megatron_config(model.config, grouped=False),
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
    )  # fmt: skip
    with mock.patch(f"{megatron_config.__module__}.megatron_config", return_value=settings):
        state = megatron_model(model.config).state_dict()
    shape = dataclasses.replace(ModelShape.of_config(model.config), has_expert_bias=True)
    blocks = {block.name: block for block in MegatronConverter(shape).blocks(state)}
    bias = blocks["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert (bias.keeps_dtype, bias.tensor.dtype) == (True, torch.float32)


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "ep", "etp"),
    [(2, 1, 2, 4, 1), (4, 1, 1, 2, 2), (1, 1, 4, 2, 1), (2, 1, 1, 2, 4), (2, 2, 2, 2, 2)],
)
def test_places_are_those_of_megatrons_ranks(tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    world, order = 16, "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=world // (tp * cp * pp), pp=pp, cp=cp, order=order)
    rest = world // (etp * ep * pp)
    mixture = RankGenerator(tp=etp, ep=ep, dp=rest, pp=pp, cp=1, order=order)
    for rank in range(world):
        place = ParallelPlace.of_rank(rank, world, tp=tp, pp=pp, ep=ep, etp=etp)
        groups = {"tp": dense.get_ranks("tp"), "pp": dense.get_ranks("pp"),
                  "etp": mixture.get_ranks("tp"), "ep": mixture.get_ranks("ep")}  # fmt: skip
        for kind, lists in groups.items():
            (own,) = [ranks for ranks in lists if rank in ranks]
            assert place.of(kind) == (own.index(rank), len(own)), kind


def test_two_processes_give_the_same_logits_however_they_share_the_model(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.trainer_agent.megatron.rank_program", str(tmp_path)]
    ranks = [
        subprocess.Popen([*program, str(rank)], cwd=ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(WORLD)
    ]  # fmt: skip
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for case, (kind, _, ours) in CASES.items():
        writers = [WORLD - 1] if "pp" in ours else range(WORLD)
        for rank in writers:
            assert_same_logits(torch.load(tmp_path / f"{case}-{rank}.pt"), checkpoint_model(kind))


def assert_holds(converter: MegatronConverter, state: State, weights: State) -> None:
    for block in converter.blocks(state):
        expected = weights[block.name][block.region]
        assert torch.equal(block.tensor.reshape(block.sizes), expected), block.name
