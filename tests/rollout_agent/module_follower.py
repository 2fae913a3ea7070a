"""A follower of a torch state that lies in a file, so that a torn one outlives its process.

`python -m tests.rollout_agent.module_follower URL POLICY FOLDER KILL_AFTER` catches up, and is
killed when so many frames of the move are written.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_rollout.directory import DirectoryReplica
from plait_rollout.follower import Follower
from plait_rollout.in_place import InPlaceReplica
from plait_rollout.live_tensors import LiveTensors
from plait_rollout.module_loader import ModuleLoader
from plait_rollout.reload import ReloadReplica
from plait_rollout.source import DeltaSource
from plait_rollout.status import Status
from plait_rollout.torch_module import TorchModuleEngine

from .states import State, fresh_state


def shared_state(folder: Path) -> State:
    """A state in one file of the folder, made from `fresh_state` the first time."""
    state, made = {}, (folder / "live").exists()
    first = fresh_state()
    size = sum(tensor.numel() * tensor.element_size() + 8 for tensor in first.values())
    storage = torch.UntypedStorage.from_file(str(folder / "live"), shared=True, nbytes=size)
    offset = 0
    for name, tensor in first.items():
        flat = torch.empty(0, dtype=tensor.dtype)
        flat.set_(storage, offset // tensor.element_size(), tensor.shape)
        if not made:
            flat.copy_(tensor)
        state[name] = flat
        offset += -(-tensor.numel() * tensor.element_size() // 8) * 8
    return state


def die_after(writes: int) -> None:
    write, written = LiveTensors.write, 0

    def counting(*arguments: object) -> None:
        nonlocal written
        if written == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        written += 1
        write(*arguments)  # type: ignore[arg-type]

    LiveTensors.write = counting  # type: ignore[method-assign, assignment]


def catch_up(client: RegistryClient, policy: str, folder: Path) -> Status:
    """One run of a follower whose state lies in the folder."""
    engine = TorchModuleEngine(shared_state(folder))
    fetcher = Fetcher(client, ChunkCache(folder / "cache"))
    reload = ReloadReplica(DirectoryReplica(folder / "d", fetcher), ModuleLoader(engine))
    replica = InPlaceReplica(engine, DeltaSource(fetcher), reload=reload)
    follower = Follower(fetcher, replica, policy=policy, name="m", memory=folder / "memory")
    return follower.catch_up()


if __name__ == "__main__":
    die_after(int(sys.argv[4]))
    with RegistryClient(sys.argv[1]) as client:
        catch_up(client, sys.argv[2], Path(sys.argv[3]))
