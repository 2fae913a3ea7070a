"""Real steps: SmolLM2-135M under AdamW with policy gradients of real backward passes on text.

Windows of English technical text stand in for rollouts: the topics of Python's `help()`, which come
with the interpreter, so that one release of it always makes the same steps. Each window has an
advantage of +1 or -1, and the loss is the advantage times the mean negative log-probability, as in
REINFORCE. FP32 masters, BF16 for the engine. Moments are built up over some steps first, because
the first steps of a fresh optimizer are denser than any later one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from benchmarks.workload import Step, measured_step, tuned_steps
from plait.layout import Layout, TensorSpec
from plait_demo.model import base_model

_BURN_IN: Final = 8
_TOKENS: Final = 96
_WINDOWS: Final = 1
_CACHE: Final = Path(__file__).parent.parent / ".cache" / "plait-demo"
_LOW_BITS: Final = 16  # that BF16 rounds away


class LanguageModel:
    """The model in training, at the moment where steps are measured."""

    def __init__(self) -> None:
        # Two threads that wait for each other stand still on a machine that does other work.
        torch.set_num_threads(1)
        folder = base_model("smollm2", _CACHE)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        text = "\n".join(topics[name] for name in sorted(topics))
        self._tokens = torch.tensor(tokenizer(text)["input_ids"])
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self._random = torch.Generator().manual_seed(1)
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self.layout = Layout.of(
            TensorSpec(name, "BF16", tuple(p.shape)) for name, p in self._parameters.items()
        )
        self._spread()

    def _spread(self) -> None:
        """Puts each master anywhere within its BF16 value's rounding interval.

        A checkpoint's lie in the middle, from where small steps reach no other value; after some
        training they don't.
        """
        half = 1 << (_LOW_BITS - 1)
        with torch.no_grad():
            for parameter in self._parameters.values():
                low = torch.randint(
                    1 - half, half, parameter.shape, generator=self._random, dtype=torch.int32
                )
                low *= parameter != 0  # below zero lie the bits of a NaN
                parameter.view(torch.int32).add_(low)

    def steps(self, densities: Sequence[float]) -> Iterator[Step]:
        """A step near each density, all from the same moment of training."""
        optimizer = torch.optim.AdamW(self._parameters.values(), lr=1e-6, fused=True)
        for _ in range(_BURN_IN):
            self._backward()
            optimizer.step()
        gradients = []
        for _ in range(2):
            self._backward()
            held = {name: p.grad for name, p in self._parameters.items()}
            gradients.append({name: g.clone() for name, g in held.items() if g is not None})
        return tuned_steps(
            densities, partial(measured_step, self.layout, self._parameters, optimizer, gradients)
        )

    def _backward(self) -> None:
        self._model.zero_grad()
        for _ in range(_WINDOWS):
            last = self._tokens.numel() - _TOKENS
            start = int(torch.randint(last, (1,), generator=self._random))
            advantage = 1 - 2 * int(torch.randint(2, (1,), generator=self._random))
            window = self._tokens[start : start + _TOKENS][None]
            (advantage * self._model(input_ids=window, labels=window).loss).backward()
