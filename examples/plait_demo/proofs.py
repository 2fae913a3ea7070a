"""Claims that the demo makes, each checked as often as there is occasion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import nn

from plait_client.checkpoint import CheckpointFolder
from plait_demo.rollouts import Answer


class Claim(StrEnum):
    """What must be true; the words are shown as they stand."""

    STAMPED = "every sample is stamped with the version of the weights that made it"
    PROVEN = "both engines prove every version by its fingerprint, bit for bit"
    AGREE = "both engines give the same answers with equal log-probabilities"
    DIFFERENT = "the versions compared below do answer differently"
    BACK = "after the rollback, answers and log-probabilities are what they were"
    FORWARD = "forward again, they are the newest version's once more"
    RESTARTED = "a killed engine, restarted from the base model, catches up and answers alike"
    CONTINUED = "a new trainer, from the old one's checkpoint, continues the same chain"
    CHECKOUT = "`plait checkout` gives the trainer's BF16 weights bit for bit"
    VERIFIED = "`plait verify` finds every stored byte and every sum right"
    FINISHED = "the demo ran to its end"


@dataclass
class Proof:
    """One claim and what came of checking it. Never checked is not passed."""

    claim: Claim
    checks: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.checks > 0 and not self.failures

    def to_document(self) -> dict[str, Any]:
        return {
            "claim": self.claim.value,
            "passed": self.passed,
            "checks": self.checks,
            "failures": self.failures,
        }


class Proofs:
    """All claims of one run."""

    def __init__(self) -> None:
        self.all = [Proof(claim) for claim in Claim]
        self._of = {proof.claim: proof for proof in self.all}

    def check(self, claim: Claim, holds: bool, otherwise: str) -> None:
        """Counts one check; `otherwise` says what was found if it doesn't hold."""
        proof = self._of[claim]
        proof.checks += 1
        if not holds:
            proof.failures.append(otherwise)

    @property
    def passed(self) -> bool:
        return all(proof.passed for proof in self.all)


def same_answers(found: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    """Equal tokens, and log-probabilities equal as numbers: no tolerance."""
    return [(a.tokens, a.logprobs) for a in found] == [(a.tokens, a.logprobs) for a in expected]


def differing_tensors(folder: CheckpointFolder, model: nn.Module) -> list[str]:
    """Names of tensors that a checkout and a BF16 model don't hold with the same bits."""
    live = {
        name: parameter.detach().view(-1).view(torch.int16).numpy().view(np.uint16)
        for name, parameter in model.named_parameters()
    }
    names = {tensor.name for tensor in folder.layout.tensors}
    differing = names ^ live.keys()
    differing |= {
        name for name in names & live.keys() if not np.array_equal(folder.bits(name), live[name])
    }
    return sorted(differing)
