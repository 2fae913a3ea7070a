"""A tiny transformer, and the ways in which processes hold it together."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HIDDEN, VOCABULARY = 12, 20, 31


class Layer(nn.Module):
    """Attention without heads, and a gated MLP: shapes that no number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        scores = self.q_proj(normed) @ self.k_proj(normed).transpose(-1, -2)
        hidden = hidden + scores.softmax(-1) @ self.v_proj(normed)
        mixed: torch.Tensor = self.down_proj(torch.relu(self.up_proj(hidden)))
        return hidden + mixed


class TinyTransformer(nn.Module):
    """Two layers, a tied head, a bias smaller than the number of ranks, and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain.sum()
        for layer in self.layers:
            hidden = layer(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def sharded(model: TinyTransformer) -> nn.Module:
    """FSDP2: every layer, and what is around them, by rows over all processes."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hybrid(model: TinyTransformer) -> nn.Module:
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _by_columns_and_rows(model: TinyTransformer, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        parallelize_module(
            layer, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        )


def tensor_parallel(model: TinyTransformer) -> nn.Module:
    """MLPs by their hidden units; everything else is replicated."""
    _by_columns_and_rows(model, init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def both(model: TinyTransformer) -> nn.Module:
    """FSDP2 over two, tensor parallel over two: some tensors sharded twice along one side."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _by_columns_and_rows(model, mesh["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def replicated(model: TinyTransformer) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def alone(model: TinyTransformer) -> nn.Module:
    return model


KINDS = {
    "fsdp": sharded, "hsdp": hybrid, "tp": tensor_parallel, "both": both, "ddp": replicated,
    "alone": alone,
}  # fmt: skip


def gathered(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The whole model, without its tied head: parameters in `dtype`, buffers as they are.

    Collective.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    whole = {}
    for name, tensor in inner.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name != "head.weight":
            whole[name] = full.to(dtype, copy=True) if name in parameters else full.clone()
    return whole
