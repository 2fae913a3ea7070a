"""A training run that can be saved and continued step for step, under any detector.

python -m tests.trainer_agent.resumable URL POLICY FOLDER DETECTOR

As a program: publishes version 1, captures two more publishes while nothing can be sent, trains on,
saves its checkpoint, and lets everything go its way: until it kills itself at PLAIT_FAILPOINT.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait_client.registry import RegistryClient
from plait_trainer import CopyBackDetector, Detector, Publisher, ReconstructionDetector
from plait_trainer.snapshot import SnapshotDetector
from tests.trainer_agent.tiny_models import Tiny, as_published

DETECTORS = ("snapshot", "reconstruction", "copy-back")


class HeldClient(RegistryClient):
    """A client whose uploads wait for a gate."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.gate.set()

    def missing_chunks(self, digests: Sequence[str]) -> list[str]:
        assert self.gate.wait(60)
        return super().missing_chunks(digests)


class NoChunks(RegistryClient):
    """A client that no weights can be fetched with."""

    def chunk(self, digest: str, size: int | None = None) -> bytes:
        raise AssertionError(f"chunk {digest} of {size} bytes was fetched")


class Resumable:
    """A model, its optimizer and its detector; BF16 beside FP32 masters for `copy-back`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model: nn.Module = Tiny(seed=3)
        parameters = list(self.model.parameters())
        self.masters: list[nn.Parameter] = []
        if kind == "copy-back":
            self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters or parameters, lr=1e-3)
        self.detector = self._detector()

    def _detector(self) -> Detector:
        if self.kind == "copy-back":
            return CopyBackDetector(lambda: zip(self.model.parameters(), self.masters, strict=True))
        return SnapshotDetector() if self.kind == "snapshot" else ReconstructionDetector()

    def step(self, number: int) -> None:
        """The same for the same number, in whatever process."""
        noise = torch.Generator().manual_seed(number)
        for parameter in self.masters or self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=noise)
            parameter.grad = gradient * (torch.rand(parameter.shape, generator=noise) < 0.3)
        self.optimizer.step()
        if isinstance(self.detector, CopyBackDetector):
            self.detector.copy()

    def publisher(self, client: RegistryClient, policy: str, **options: Any) -> Publisher:
        return Publisher(
            self.model, self.optimizer, client=client, policy=policy, detector=self.detector,
            **options,
        )  # fmt: skip

    def expected(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in as_published(self.model)}

    def save(self, path: Path, publisher: Publisher) -> None:
        torch.save(
            {
                "model": self.model.state_dict(), "masters": self.masters,
                "optimizer": self.optimizer.state_dict(), "publisher": publisher.state_dict(),
            },
            path,
        )  # fmt: skip

    @classmethod
    def load(cls, kind: str, path: Path) -> tuple["Resumable", Mapping[str, Any]]:
        """The run as it was saved, and its publisher's state."""
        saved = torch.load(path, weights_only=True)
        run = cls(kind)
        run.model.load_state_dict(saved["model"])
        with torch.no_grad():
            for master, was in zip(run.masters, saved["masters"], strict=True):
                master.copy_(was)
        run.optimizer.load_state_dict(saved["optimizer"])
        return run, saved["publisher"]


def main(url: str, policy: str, folder: Path, kind: str) -> None:
    run = Resumable(kind)
    with HeldClient(url) as client, run.publisher(client, policy) as publisher:
        publisher.publish().result()
        client.gate.clear()
        for number in (1, 2):
            run.step(number)
            publisher.publish()
            torch.save(run.expected(), folder / f"expected-{number + 1}.pt")
        run.step(3)
        run.save(folder / "checkpoint.pt", publisher)
        client.gate.set()
        publisher.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
