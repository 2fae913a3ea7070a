"""AdamW's update, taken back: the weights before a step from those after it and the moments.

The recovered weight is not quite the true one, and how far it can be off is bounded here: by
`slope · |w| + offset`, derived in docs/reconstruction.md. Everything is float32 arithmetic on runs
of elements: in torch on every device, in compiled loops of the same operations in CPU memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from plait_trainer import cpu_loops

# Unit roundoff of float32, and its smallest normal number: what flushing to zero can lose.
EPSILON: Final = 2.0**-24
_TINY: Final = 2.0**-126

# Roundings that the decay, the final addition and the recovery make at most, in units of the
# weight: 7; the ends of the interval that the boundary log looks at cost two more.
SLOPE: Final = 10 * EPSILON

# Roundings of the update, in units of the largest one: 12 forward, 12 back, one in the addition;
# the rest is margin.
_UPDATE_ROUNDINGS: Final = 32

# Below these, the bounds on the update and on what underflow loses say nothing any more.
_EPS_LEAST: Final = 2.0**-60
_DECAY_LEAST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """What one step of a parameter group does, as plain numbers.

    Attributes:
        weight_decay: decoupled; 0 where the decay is part of the gradient (L2).
        inexact: the bias corrections are computed in float32 (capturable, or betas in tensors).
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    inexact: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Options":
        """Of a parameter group as it stands; asks the device where they are tensors there."""
        beta1, beta2 = group["betas"]
        tensors = any(isinstance(beta, torch.Tensor) for beta in (beta1, beta2))
        return cls(
            learning_rate=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0,
            amsgrad=bool(group["amsgrad"]),
            inexact=bool(group["capturable"]) or tensors,
        )

    @property
    def decay(self) -> float:
        """What a step multiplies the weights by."""
        return 1.0 - self.learning_rate * self.weight_decay


def why_unbounded(options: Options) -> str | None:
    """Why nothing bounds the error under these options, in words; None: something does."""
    if not (options.learning_rate >= 0 and math.isfinite(options.decay)):
        return (
            f"its learning rate is {options.learning_rate} and its weight decay "
            f"{options.weight_decay}"
        )
    if not (0 <= options.beta1 < 1 and 0 < options.beta2 < 1):
        return f"its betas are {options.beta1:g} and {options.beta2:g}"
    if _decay_of_moments(options) >= 1:
        return (
            f"beta1² = {options.beta1**2:g} isn't below beta2 = {options.beta2:g}, so that nothing "
            "bounds an update"
        )
    if not options.decay >= _DECAY_LEAST:
        return (
            f"a step multiplies its weights by {options.decay:g} (learning rate · weight decay); "
            f"expected at least {_DECAY_LEAST:g}"
        )
    return None


def update_bound(options: Options, step: int) -> float:
    """The largest update that gradients can lead to in the step of this number, 1 for the first.

    By Cauchy-Schwarz over the gradients that both moments are made of, whatever these are; with
    room for the moments' own roundings, and for squares that underflow.
    """
    beta1, beta2, q = options.beta1, options.beta2, _decay_of_moments(options)
    ratio = (1 - beta1) / (1 - beta1**step)
    ratio *= math.sqrt((1 - beta2**step) / (1 - beta2) * (1 - q**step) / (1 - q))
    underflow = 2.0**-64 / max(options.eps, _EPS_LEAST)
    return abs(options.learning_rate) * (ratio * (1 + 2.0**-8) + underflow)


def error_offset(options: Options, step: int, *, excess: float = 1.0) -> float:
    """The part of the recovery's error that doesn't grow with the weight.

    Its other part is SLOPE times the weight's size.

    Args:
        options: bounded ones; see `why_unbounded`.
        step: number of the step that is taken back.
        excess: factor by which updates may exceed `update_bound`.
    """
    roundings = float(_UPDATE_ROUNDINGS)
    if options.inexact:
        first, second = (_correction_error(b, step) for b in (options.beta1, options.beta2))
        roundings += first + second / 2
    step_size = abs(options.learning_rate) / (1 - options.beta1**step)
    underflow = 8 * _TINY * (1 + step_size + 1 / max(options.eps, _EPS_LEAST))
    decay = max(options.decay, _DECAY_LEAST)
    return (EPSILON * roundings * excess * update_bound(options, step) + underflow) / decay


def _decay_of_moments(options: Options) -> float:
    """q = beta1² / beta2, with what rounding adds to it in a step."""
    return options.beta1**2 / options.beta2 * (1 + 16 * EPSILON)


def _correction_error(beta: float, step: int) -> float:
    """Error of a float32 `1 - beta^step`, relative, in units of EPSILON."""
    power = beta**step
    return ((step + 8) * power + 2) / (1 - power)


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimizer's state for a published tensor; `second` is what the root is taken of."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inversion:
    """One step of one parameter, to be taken back run by run.

    Attributes:
        update_bound: that no update may exceed.
        excess: the factor over what gradients lead to that is part of it.
    """

    step_size: float
    root: float
    eps: float
    decay: float
    update_bound: float
    excess: float

    @classmethod
    def of(cls, options: Options, step: int, *, excess: float = 1.0) -> "Inversion":
        """Of a step by its number.

        Args:
            excess: factor by which updates may exceed what gradients lead to.
        """
        return cls(
            step_size=options.learning_rate / (1 - options.beta1**step),
            root=math.sqrt(1 - options.beta2**step),
            eps=options.eps,
            decay=options.decay,
            update_bound=update_bound(options, step) * excess,
            excess=excess,
        )

    def recover(
        self, weights: torch.Tensor, moments: Moments, out: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """The weights before the step, within the error bound if the updates are within theirs.

        Args:
            weights: a run of them after the step, float32 [items], contiguous.
            moments: of the same run, likewise.
            out: float32 [items], overwritten.
        Returns:
            `out`, and the size of the largest update: NaN if one is.
        """
        if is_compiled(out):
            size = cpu_loops.recover(
                weights.numpy(), moments.first.numpy(), moments.second.numpy(),
                *map(np.float32, (1 / self.root, self.eps, self.step_size, 1 / self.decay)),
                out.numpy(),
            )  # fmt: skip
            return out, float(np.uint32(size).view(np.float32)) * abs(self.step_size)
        torch.sqrt(moments.second, out=out)
        out.mul_(1 / self.root).add_(self.eps)
        torch.div(moments.first, out, out=out)
        low, high = torch.aminmax(out)
        largest = max(-float(low), float(high)) * abs(self.step_size)
        torch.add(weights, out, alpha=self.step_size, out=out).mul_(1 / self.decay)
        return out, largest


def is_compiled(tensor: torch.Tensor) -> bool:
    """Whether compiled loops do what torch does elsewhere."""
    return tensor.is_cpu
