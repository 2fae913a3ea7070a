"""The demo's trainer: a learner, the publisher attached to it, and their checkpoint."""

import contextlib
from pathlib import Path
from typing import Final, Self

import torch

from plait.errors import PlaitError
from plait_client.registry import RegistryClient
from plait_demo.learner import Learner
from plait_demo.settings import POLICY, Settings
from plait_trainer import Publisher

_PATIENCE_S: Final = 60.0  # with a registry that is on this very machine


class Trainer:
    """Learns, and publishes every step.

    Args:
        base: folder of the base model.
        checkpoint: written by `save`, to go on from; None: from the base model, which becomes the
            policy's first version without a byte uploaded, as the engines start from it too.
    """

    def __init__(
        self, settings: Settings, client: RegistryClient, base: Path, checkpoint: Path | None = None
    ) -> None:
        self.learner = Learner(base, learning_rate=settings.learning_rate)
        self.publisher = Publisher(
            self.learner.model,
            self.learner.optimizer,
            client=client,
            policy=POLICY,
            external=True,
            side_files=base,
            actor="demo trainer",
            patience=_PATIENCE_S,
            attach=checkpoint is None,
        )
        if checkpoint is not None:
            state = torch.load(checkpoint, weights_only=True)
            self.learner.load_state_dict(state["learner"])
            self.publisher.load_state_dict(state["publisher"])

    def save(self, checkpoint: Path) -> None:
        state = {
            "learner": self.learner.state_dict(),
            "publisher": self.publisher.state_dict(),
        }
        torch.save(state, checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.publisher.close()
            return
        # What failed in the body is the news; a publish still under way isn't waited for.
        with contextlib.suppress(PlaitError):
            self.publisher.close(abandon=True)
