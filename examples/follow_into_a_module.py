"""Follow a policy into a live torch module, in this process.

python examples/follow_into_a_module.py
"""

import os
from pathlib import Path

import torch

from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_rollout import (
    DeltaSource,
    DirectoryReplica,
    Follower,
    InPlaceReplica,
    ModuleLoader,
    ReloadReplica,
    TorchModuleEngine,
)

POLICY = "toy"


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ).to(torch.bfloat16)
    engine = TorchModuleEngine(model)
    with RegistryClient(os.environ.get("PLAIT_URL", "http://127.0.0.1:8400")) as client:
        fetcher = Fetcher(client, ChunkCache())
        # This module starts from random weights, which no delta leads away from: the first version
        # is loaded whole, and from then on it is moved in place.
        whole = ReloadReplica(DirectoryReplica(Path("toy-checkout"), fetcher), ModuleLoader(engine))
        replica = InPlaceReplica(engine, DeltaSource(fetcher), reload=whole)
        follower = Follower(fetcher, replica, policy=POLICY, name="a-module")
        for ref in ("1", "main", "main~2"):
            status = follower.go_to(ref)
            with engine.generating() as stamp, torch.no_grad():
                answer = model(torch.ones(1, 64, dtype=torch.bfloat16)).float().norm().item()
            print(f"{ref:>7}: version {status.seq}, stamp {stamp}, answer {answer:.6f}")
        follower.stop()


if __name__ == "__main__":
    main()
