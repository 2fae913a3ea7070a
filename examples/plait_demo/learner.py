"""The trainer's step: group-relative policy gradient, AdamW on FP32 masters, BF16 weights.

Nothing here knows plait: this is the ordinary mixed-precision step that a publisher attaches to.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from plait_demo.rollouts import Sample

_MICRO_BATCH: Final = 16  # sequences; bounds the logits held at once
_GRADIENT_NORM_MAX: Final = 1.0


class Learner:
    """A BF16 causal language model, its FP32 masters and their optimizer.

    Attributes:
        model: the policy, BF16; what is published.
        masters: FP32 copies by parameter name; what AdamW moves.
        steps: optimizer steps taken.
    """

    def __init__(self, folder: Path, *, learning_rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.train()
        self.masters = {
            name: parameter.detach().float().clone()
            for name, parameter in self.model.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=learning_rate, weight_decay=0.0, fused=True
        )
        self.steps = 0

    def step(self, samples: Sequence[Sample]) -> None:
        """One optimizer step on one round's samples; the masters are rounded into the model."""
        advantages = group_relative(samples)
        tokens = sum(len(sample.answer.tokens) for sample in samples)
        for first in range(0, len(samples), _MICRO_BATCH):
            part = slice(first, first + _MICRO_BATCH)
            loss = -self._weighted_logprob(samples[part], advantages[part]) / max(tokens, 1)
            loss.backward()  # type: ignore[no-untyped-call]
        self._update()
        self.steps += 1

    def _weighted_logprob(self, samples: Sequence[Sample], advantages: Sequence[float]) -> Tensor:
        """Sum over all answer tokens of advantage x log-probability: a scalar."""
        rows = [(*sample.prompt, *sample.answer.tokens) for sample in samples]
        width = max(map(len, rows))
        ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        hidden = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state

        # Only answer tokens are scored; each is predicted from the position before it.
        places = [
            (row, column)
            for row, sample in enumerate(samples)
            for column in range(len(sample.prompt), len(rows[row]))
        ]
        row_of, column_of = torch.tensor(places).T
        logits = self.model.lm_head(hidden[row_of, column_of - 1]).float()
        logprobs = logits.log_softmax(-1).gather(1, ids[row_of, column_of, None])[:, 0]
        total: Tensor = (torch.tensor(advantages)[row_of] * logprobs).sum()
        return total

    def _update(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            gradient = parameters[name].grad
            master.grad = None if gradient is None else gradient.float()
            parameters[name].grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), _GRADIENT_NORM_MAX)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, master in self.masters.items():
                parameters[name].copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart needs; the BF16 model follows from the masters."""
        return {
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.masters[name].copy_(state["masters"][name])
                parameter.copy_(self.masters[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def group_relative(samples: Sequence[Sample]) -> list[float]:
    """Each reward minus its group's mean, over its group's deviation; 0 where all are alike."""
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample.reward)
    centre = {group: statistics.fmean(rewards) for group, rewards in groups.items()}
    spread = {group: statistics.pstdev(rewards) for group, rewards in groups.items()}
    return [
        (sample.reward - centre[sample.group]) / (spread[sample.group] + 1e-4) for sample in samples
    ]
