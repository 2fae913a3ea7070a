"""Which published tensors are views of an optimizer's parameters, and where its state for them is.

Matched by memory: names and modules play no part, so stacked experts, fused projections and the
local shards of distributed tensors are found alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from plait_trainer.detector import LiveTensors
from plait_trainer.inversion import Moments
from plait_trainer.memory import lies_within, memory_of, overlap, same_view
from plait_trainer.shards import local_part

# Published dtypes that rounding reaches from float32 with something to spare.
RECOVERABLE: Final = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, eq=False)
class Place:
    """A published tensor inside a parameter of the optimizer.

    Attributes:
        parameter: as the optimizer has it, possibly a distributed tensor.
        view: the published tensor itself, in the parameter's memory, float32.
        dtype: published.
    """

    parameter: torch.Tensor
    view: torch.Tensor
    dtype: torch.dtype

    @property
    def stands(self) -> bool:
        """Whether the parameter still is the memory that is published."""
        return memory_of(local_part(self.parameter)) == memory_of(self.view)

    def moments(self, state: Mapping[str, Any], *, amsgrad: bool) -> Moments | str:
        """The same view of the moments; or why there is none, in words."""
        first = self._same_view(state.get("exp_avg"))
        second = self._same_view(state.get("max_exp_avg_sq" if amsgrad else "exp_avg_sq"))
        if isinstance(first, str):
            return first
        return second if isinstance(second, str) else Moments(first, second)

    def _same_view(self, value: object) -> torch.Tensor | str:
        parameter = local_part(self.parameter)
        if not isinstance(value, torch.Tensor):
            return "a moment is missing in the optimizer's state"
        found = local_part(value)
        said, wanted = (f"{t.dtype}{list(t.shape)} on {t.device}" for t in (found, parameter))
        if said != wanted:
            return f"a moment is {said}; expected {wanted}"
        view = same_view(self.view, parameter, found)
        return "a moment has other strides than its parameter" if view is None else view


def find_places(live: LiveTensors, optimizer: torch.optim.Optimizer) -> dict[str, Place]:
    """The tensors, by name, that are float32 parameters of the optimizer, or views of such.

    Left out are those published in a dtype that float32 isn't rounded to, and those whose memory
    belongs to several parameters.
    """
    parameters: dict[tuple[object, int], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters.setdefault(memory_of(local_part(parameter)), []).append(parameter)
    places = {}
    for name, tensor in live.items():
        view, dtype = getattr(tensor, "tensor", None), getattr(tensor, "dtype", None)
        if not isinstance(view, torch.Tensor) or dtype not in RECOVERABLE:
            continue
        view = view.detach()
        if view.dtype != torch.float32 or view.is_neg() or not view.numel():
            continue
        around = [
            parameter for parameter in parameters.get(memory_of(view), ())
            if overlap(view, local_part(parameter))
        ]  # fmt: skip
        if len(around) != 1:
            continue
        local = local_part(around[0])
        if local.dtype == torch.float32 and lies_within(view, local):
            places[name] = Place(around[0], view, dtype)
    return places


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The number of each parameter's group, by the parameter's id."""
    return {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def optimized_memory(optimizer: torch.optim.Optimizer) -> set[tuple[object, int]]:
    """The memory of every parameter of the optimizer, as `is_optimized` asks for it."""
    return {
        memory_of(local_part(parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def is_optimized(tensor: object, memory: set[tuple[object, int]]) -> bool:
    """Whether a live tensor shares memory with an optimizer's parameter."""
    view = getattr(tensor, "tensor", None)
    return isinstance(view, torch.Tensor) and memory_of(view.detach()) in memory


def unwrapped_optimizer(
    optimizer: torch.optim.Optimizer | None,
) -> torch.optim.Optimizer | None:
    """The optimizer that steps, inside wrappers that hold it under that name."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer's steps can't be taken back, in words; None: they can."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return f"a {type(optimizer).__name__} isn't torch's AdamW or Adam"
    for number, group in enumerate(optimizer.param_groups):
        if group["differentiable"]:
            return f"group {number} is differentiable"
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if beta1**2 >= beta2:
            return (
                f"group {number} has betas {beta1:g} and {beta2:g}: beta1² isn't below beta2, so "
                "that nothing bounds an update"
            )
    return None


def steps_taken(
    optimizer: torch.optim.Optimizer, places: Iterable[Place | None]
) -> dict[int, int | None]:
    """Steps that the parameters of these places have taken, by the parameters' ids.

    0 where there is no state yet; None where the state doesn't say. Steps that lie on a device are
    fetched at once.
    """
    counts: dict[int, int | None] = {}
    far: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place in places:
        if place is None or id(place.parameter) in counts:
            continue
        key = id(place.parameter)
        state = optimizer.state.get(place.parameter) or {"step": 0}
        step = state.get("step")
        counts[key] = None
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            local = local_part(step).reshape(())
            if local.device.type == "cpu":
                counts[key] = int(local)
            else:
                far.setdefault(local.device, []).append((key, local.float()))
        elif isinstance(step, (int, float)):
            counts[key] = int(step)
    for rows in far.values():
        found = torch.stack([step for _, step in rows]).cpu().tolist()
        counts.update((key, int(count)) for (key, _), count in zip(rows, found, strict=True))
    return counts
