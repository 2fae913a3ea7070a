"""A transformers Trainer as one of a job's processes, with the callback and nothing else.

python -m torch.distributed.run … -m tests.trainer_agent.transformers_program URL POLICY FOLDER
"""

import sys
from pathlib import Path

import torch

from plait_client.registry import RegistryClient
from plait_trainer.callback import PlaitCallback
from tests.trainer_agent.test_callback import published, trainer_of


def main(url: str, policy: str, folder: Path) -> None:
    with RegistryClient(url) as client:
        trainer = trainer_of(folder, PlaitCallback(policy=policy, client=client), steps=4)
        trainer.train()
    if trainer.args.process_index == 0:
        torch.save(published(trainer.model), folder / "trained.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
