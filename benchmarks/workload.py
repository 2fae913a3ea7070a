"""Weights that change as a policy's do: FP32 masters, structured gradients, AdamW, BF16 rounding.

Gradients are low-rank with persistent directions and row and column scales; the embedding gets
them in the rows of a Zipf draw only. The learning rate is tuned until a step has about the wanted
density.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights

# Qwen3-0.6B's matrices, in 3 of its 28 layers, and an eighth of its vocabulary.
_HIDDEN: Final = 1024
_QUERY: Final = 2048
_KEY_VALUE: Final = 1024
_INTERMEDIATE: Final = 3072
_VOCABULARY: Final = 18_992
_LAYERS: Final = 3
_BURN_IN: Final = 12
_NOISE_RANK: Final = 32
_PERSISTENT_RANK: Final = 6
_FIRST_RATE: Final = 1e-6
_TUNING_STEPS: Final = 5
_TOLERANCE: Final = 0.05

State = dict[str, Tensor]


def shapes() -> dict[str, tuple[int, int]]:
    """About 67 million elements: 133 MB of BF16, more than any cache holds."""
    found = {"embed": (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        found |= {
            f"{layer}.q": (_QUERY, _HIDDEN),
            f"{layer}.k": (_KEY_VALUE, _HIDDEN),
            f"{layer}.v": (_KEY_VALUE, _HIDDEN),
            f"{layer}.o": (_HIDDEN, _QUERY),
            f"{layer}.gate": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.up": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.down": (_HIDDEN, _INTERMEDIATE),
        }
    return found


@dataclass(frozen=True)
class Step:
    """One optimizer step, as bits.

    Attributes:
        old, new: BF16 weights before and after.
        density: changed elements over all.
        byte_density: changed bytes over all: what a byte-wise differ would see.
    """

    old: ArrayWeights
    new: ArrayWeights
    learning_rate: float
    density: float
    byte_density: float


class Workload:
    """A model in training. Seeded: each run of the benchmarks sees the same weights."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(1)
        self._parameters = {name: self._initial(*shape) for name, shape in shapes().items()}
        self._directions = {
            name: (
                self._normal(rows, 1).mul(0.7).exp(),
                self._normal(1, columns).mul(0.5).exp(),
                self._normal(rows, _PERSISTENT_RANK),
                self._normal(_PERSISTENT_RANK, columns),
            )
            for name, (rows, columns) in shapes().items()
        }
        draw = 1 / torch.arange(1, _VOCABULARY + 1).pow(1.05)
        self._row_odds = draw / draw.sum()
        self.layout = Layout.of(TensorSpec(n, "BF16", shape) for n, shape in shapes().items())

    def steps(self, densities: tuple[float, ...]) -> Iterator[Step]:
        """A step at each density, all from the same moment of training."""
        optimizer = self._optimizer(_FIRST_RATE)
        for _ in range(_BURN_IN):
            self._step(optimizer)
        gradients = [self._gradients(), self._gradients()]
        return tuned_steps(
            densities, partial(measured_step, self.layout, self._parameters, optimizer, gradients)
        )

    def _optimizer(self, learning_rate: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._parameters.values(), lr=learning_rate, fused=True)

    def _step(self, optimizer: torch.optim.AdamW) -> None:
        for name, gradient in self._gradients().items():
            self._parameters[name].grad = gradient
        optimizer.step()

    def _gradients(self) -> State:
        return {name: self._gradient(name, *p.shape) for name, p in self._parameters.items()}

    def _gradient(self, name: str, rows: int, columns: int) -> Tensor:
        row_scale, column_scale, left, right = self._directions[name]
        noise = self._normal(rows, _NOISE_RANK), self._normal(_NOISE_RANK, columns)
        gradient = torch.cat([noise[0], 0.9 * left], 1) @ torch.cat([noise[1], right], 0)
        gradient *= 1e-6 * row_scale * column_scale
        if name == "embed":
            seen = torch.multinomial(self._row_odds, 4000, True, generator=self._random)
            mask = torch.zeros(rows, 1)
            mask[seen] = 1
            gradient *= mask
        return gradient

    def _initial(self, rows: int, columns: int) -> torch.nn.Parameter:
        scale = (
            0.02 * self._normal(rows, 1).mul(0.25).exp() * self._normal(1, columns).mul(0.15).exp()
        )
        return torch.nn.Parameter(self._normal(rows, columns) * scale)

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._random)


def tuned_steps(densities: Sequence[float], measured: Callable[[float], Step]) -> Iterator[Step]:
    """A step near each density: the learning rate is found by secants of the logarithms.

    Args:
        measured: the step at a learning rate; denser the higher it is.
    """
    points: list[tuple[float, float]] = []  # logarithms of learning rate and density
    for wanted in densities:
        for _ in range(_TUNING_STEPS):
            step = measured(_next_rate(points, math.log(wanted)))
            points.append((math.log(step.learning_rate), math.log(step.density)))
            if abs(step.density / wanted - 1) < _TOLERANCE:
                break
        yield step


def _next_rate(points: list[tuple[float, float]], wanted: float) -> float:
    """On the line through the two points nearest to what is wanted."""
    if not points:
        return _FIRST_RATE
    nearest = sorted(points, key=lambda point: abs(point[1] - wanted))
    (rate, density), *others = nearest
    slope = 1.0
    if others and others[0][1] != density:
        slope = (others[0][0] - rate) / (others[0][1] - density)
    return math.exp(rate + slope * (wanted - density))


def measured_step(
    layout: Layout,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    gradients: Sequence[Mapping[str, Tensor]],
    learning_rate: float,
) -> Step:
    """The last of some steps at a learning rate, of which nothing stays behind.

    Args:
        optimizer: whose moments it begins with.
        gradients: of each step.
    """
    start = {name: p.detach().clone() for name, p in parameters.items()}
    own = torch.optim.AdamW(parameters.values(), fused=True)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in own.param_groups:
        group["lr"] = learning_rate
    new: dict[str, NDArray[np.uint16]] = {}
    for step in gradients:
        old = new or _snapshot(parameters)
        for name, gradient in step.items():
            parameters[name].grad = gradient
        own.step()
        new = _snapshot(parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    changed = sum(int(np.count_nonzero(old[n] != new[n])) for n in old)
    changed_bytes = sum(int(np.count_nonzero((old[n] ^ new[n]).view(np.uint8))) for n in old)
    elements = layout.total_elements
    return Step(
        ArrayWeights(layout, old),
        ArrayWeights(layout, new),
        learning_rate,
        changed / elements,
        changed_bytes / (2 * elements),
    )


def _snapshot(parameters: Mapping[str, Tensor]) -> dict[str, NDArray[np.uint16]]:
    return {
        name: p.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).copy()
        for name, p in parameters.items()
    }
