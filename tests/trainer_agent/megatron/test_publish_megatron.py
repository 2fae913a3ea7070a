"""A model that Megatron-Core trains, published: what is checked out is what transformers writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.choice import DetectorName
from plait_trainer.converter import HuggingFaceConverter, load
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, converted
from tests.trainer_agent.megatron.real_models import checkpoint_model, grid, inputs, megatron_model

# Megatron-Core says at length what it hasn't got on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with grid(tmp_path_factory.mktemp("grid")):
        yield


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = inputs()
    length = tokens.shape[1]
    future = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    logits = model(tokens, torch.arange(length).expand_as(tokens), future)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "detector"),
    [("tied", "snapshot"), ("tied", "reconstruction"), ("sparse", "reconstruction")],
)
def test_a_checkout_is_what_transformers_would_write(
    kind: str,
    detector: DetectorName,
    client: RegistryClient,
    policy: str,
    tmp_path: Path,
) -> None:
    written = checkpoint_model(kind)
    shape = ModelShape.of_config(written.config)
    trained, converter = megatron_model(written.config), MegatronConverter(shape)
    blocks = HuggingFaceConverter(written).blocks(written.state_dict())
    load(converter, trained.state_dict(), {block.name: block.tensor for block in blocks})
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    source = converted([trained], shape, [ParallelPlace()])
    with Publisher(source, optimizer, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish()
        for _ in range(3):
            step(trained, optimizer)
            latest = publisher.publish()
    total = sum(parameter.numel() for parameter in written.parameters())
    assert 0 < latest.version.changed_elements < total
    save_as_transformers_does(written, trained, converter, tmp_path / "saved")
    checkout(client, f"{policy}@4", tmp_path / "out")
    found, saved = (CheckpointFolder(tmp_path / name) for name in ("out", "saved"))
    assert found.layout == saved.layout
    for tensor in saved.layout.tensors:
        assert found.bits(tensor.name).tobytes() == saved.bits(tensor.name).tobytes(), tensor.name


def save_as_transformers_does(
    model: Any, trained: torch.nn.Module, converter: MegatronConverter, folder: Path
) -> None:
    weights = {
        block.name: block.tensor.reshape(block.sizes)
        for block in converter.blocks(trained.state_dict())
    }
    load(HuggingFaceConverter(model), model.state_dict(), weights)
    model.bfloat16().save_pretrained(folder)
