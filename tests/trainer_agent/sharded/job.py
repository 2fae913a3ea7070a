"""One process of a training job; see ranks.py.

The scenarios end with an exit code: 0, or 3 for a typed error that it was told (and reports).
"""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from plait.errors import PlaitError
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.sharded.models import KINDS, VOCABULARY, TinyTransformer, gathered

TOLD = 3


class Job:
    """What a scenario works with.

    Attributes:
        rank: of this process, or 0 where there is only one.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.said: dict[str, Any] = {}

    def model(self, kind: str, start: Path | None = None) -> nn.Module:
        inner = TinyTransformer()
        if start is not None:
            inner.load_state_dict(torch.load(start))
        return KINDS[kind](inner)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """One optimizer step; the same data on all ranks, however many they are."""
        noise = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=noise)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def save(self, model: nn.Module, seq: int) -> None:
        """What the version must be; rank 0 keeps it."""
        whole = gathered(model)
        if self.rank == 0:
            torch.save(whole, self.folder / f"expected-{seq}.pt")


def steps(job: Job, url: str, policy: str, kind: str, count: str) -> None:
    """Publishes the model as it starts, and after each of `count` steps."""
    model = job.model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        first = out.publish({"rank": job.rank}).version.seq
        job.save(model, first)
        futures = []
        for number in range(int(count)):
            job.step(model, optimizer, number)
            futures.append(out.publish({"rank": job.rank, "step": number}))
            job.save(model, first + number + 1)
        job.said["seqs"] = [first, *(future.version.seq for future in futures)]
        job.said["state"] = out.state_dict()
        job.said["metrics"] = futures[-1].metrics.payload_bytes if futures else 0


SCENARIOS: dict[str, Callable[..., None]] = {"steps": steps}


@contextlib.contextmanager
def reporting(job: Job) -> Iterator[None]:
    try:
        yield
    except PlaitError as error:
        job.said["error"] = {"code": error.code, "message": str(error)}
        logging.exception("told")
    finally:
        (job.folder / f"said-{job.rank}.json").write_text(json.dumps(job.said))


def main(rank: int, size: int, store: str, folder: Path, scenario: str, *arguments: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    job = Job(rank, size, folder)
    if size > 1 or scenario.startswith("sharded"):
        distributed.init_process_group(
            "gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size
        )
    with reporting(job):
        SCENARIOS[scenario](job, *arguments)
    if distributed.is_initialized() and "error" not in job.said:
        distributed.barrier()
        distributed.destroy_process_group()
    sys.exit(TOLD if "error" in job.said else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
