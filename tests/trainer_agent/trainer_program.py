"""A trainer as a program: trains, publishes every step, and saves its checkpoint after each.

python -m tests.trainer_agent.trainer_program URL POLICY FOLDER STEPS
"""

import sys
from pathlib import Path

import torch

from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.tiny_models import Run


def save(run: Run, publisher: Publisher, folder: Path) -> None:
    """Atomically: a kill leaves the checkpoint before."""
    torch.save({**run.saved(), "publisher": publisher.state_dict()}, folder / "next.pt")
    (folder / "next.pt").rename(folder / "last.pt")


def load(folder: Path) -> tuple[Run, dict[str, object]]:
    saved = torch.load(folder / "last.pt", weights_only=True)
    run = Run()
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    return run, saved["publisher"]


def main(url: str, policy: str, folder: Path, steps: int) -> None:
    run = Run()
    with RegistryClient(url) as client, Publisher(run.model, client=client, policy=policy) as out:
        out.publish({"step": 0}).result()
        save(run, out, folder)
        for step in range(1, steps + 1):
            run.step()
            out.publish({"step": step}).result()
            save(run, out, folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
