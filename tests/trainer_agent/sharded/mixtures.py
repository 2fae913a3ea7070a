"""A mixture of transformers, whose experts are stacked in its parameters, under FSDP2."""

import importlib
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.choice import DetectorName
from tests.trainer_agent.sharded.scenarios import Process


def mixture() -> Any:
    """A tiny Qwen3 whose four experts no three processes hold evenly, all of it random."""
    transformers: Any = importlib.import_module("transformers")  # takes seconds
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, moe_intermediate_size=12,
        num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(5)
    return transformers.Qwen3MoeForCausalLM(config)


def save(process: Process, model: nn.Module, seq: int) -> None:
    """Rank 0 writes the gathered model as transformers does."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if process.rank == 0:
        whole = mixture()
        whole.load_state_dict(state)
        whole.to(torch.bfloat16).save_pretrained(process.folder / f"saved-{seq}")


def mixture_steps(process: Process, url: str, policy: str, detector: DetectorName) -> None:
    """Publishes a mixture as it starts, and after each of two steps."""
    model = mixture()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(10).reshape(2, 5)
    with (
        RegistryClient(url) as client,
        Publisher(model, optimizer, client=client, policy=policy, detector=detector) as out,
    ):
        out.publish()
        save(process, model, 1)
        for number in range(2):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            out.publish()
            save(process, model, number + 2)
