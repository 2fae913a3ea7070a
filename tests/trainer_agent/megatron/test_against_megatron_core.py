"""The converter against Megatron-Core's own modules: one process, and two of them over gloo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_trainer.converter import HuggingFaceConverter, load
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, current_place
from tests.trainer_agent.megatron.real_models import (
    KINDS,
    VOCAB,
    checkpoint_model,
    grid,
    inputs,
    megatron_logits,
    megatron_model,
)

# Megatron-Core says at length what it hasn't got on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with grid(tmp_path_factory.mktemp("grid")):
        yield


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    blocks = HuggingFaceConverter(model).blocks(model.state_dict())
    return {block.name: block.tensor for block in blocks}


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_gives_the_same_logits(kind: str) -> None:
    model = checkpoint_model(kind)
    trained = megatron_model(model.config)
    converter = MegatronConverter(ModelShape.of_config(model.config), current_place())
    load(converter, trained.state_dict(), checkpoint(model))
    with torch.no_grad():
        expected = model(inputs()).logits
    found = megatron_logits(trained)[..., :VOCAB]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.1
