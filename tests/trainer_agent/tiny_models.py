"""Tiny models, real optimizers, and what their versions must hold."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FEATURES = 16


class Tiny(nn.Module):
    """Two layers, a scalar, a persistent buffer and one that isn't."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(FEATURES, 32)
        self.down = nn.Linear(32, FEATURES)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(inputs))) * self.gain


class Run:
    """A model under training."""

    def __init__(self, seed: int = 0, learning_rate: float = 1e-2) -> None:
        self.model = Tiny(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.noise = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        inputs = torch.randn(8, FEATURES, generator=self.noise)
        loss = (self.model(inputs) - inputs.flip(-1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def expected(self) -> dict[str, torch.Tensor]:
        """The checkpoint of now: parameters cast to BF16, buffers as they are. Copies."""
        return {name: tensor.clone() for name, tensor in as_published(self.model)}

    def saved(self) -> dict[str, Any]:
        """A trainer's checkpoint, detached from the live tensors."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {"model": state, "optimizer": self.optimizer.state_dict()}


def as_published(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        yield name, tensor.to(torch.bfloat16) if name in parameters else tensor
