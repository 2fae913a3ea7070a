"""From a trainer's model through a registry into another process's module, and back again."""

import secrets
from pathlib import Path

import torch

from plait.wire import MoveRequest
from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_rollout.directory import DirectoryReplica
from plait_rollout.follower import Follower
from plait_rollout.in_place import InPlaceReplica
from plait_rollout.module_loader import ModuleLoader
from plait_rollout.reload import ReloadReplica
from plait_rollout.source import DeltaSource
from plait_rollout.torch_module import TorchModuleEngine
from plait_trainer import Publisher
from tests.rollout_agent.waiting import until
from tests.server.processes import registry_process
from tests.trainer_agent.reading import assert_bits_equal
from tests.trainer_agent.tiny_models import FEATURES, Run, Tiny

POLICY = "tiny"


def serving_module() -> Tiny:
    """Parameters in BF16 as an engine has them; weights of no version."""
    module = Tiny(seed=99)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return module


def held(module: Tiny) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def answers(module: Tiny) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, FEATURES).to(torch.bfloat16)
    with torch.no_grad():
        found: torch.Tensor = module(inputs)
    return found


def follower_of(client: RegistryClient, engine: TorchModuleEngine, folder: Path) -> Follower:
    fetcher = Fetcher(client, ChunkCache(folder / "cache"))
    reload = ReloadReplica(DirectoryReplica(folder / "copy", fetcher), ModuleLoader(engine))
    replica = InPlaceReplica(engine, DeltaSource(fetcher), reload=reload)
    return Follower(fetcher, replica, policy=POLICY, name="m", memory=folder / "memory")


def rolled_back(client: RegistryClient, to: int) -> None:
    channel = client.channel(POLICY, "main")
    request = MoveRequest(
        to=str(to),
        expected_generation=channel.generation,
        kind="rollback",
        move_id=secrets.token_hex(16),
        reason="reward hacking",
    )
    client.move_channel(POLICY, "main", request)


def test_a_module_follows_a_trainer_step_by_step_and_through_a_rollback(tmp_path: Path) -> None:
    run, module = Run(), serving_module()
    engine = TorchModuleEngine(module)
    states: dict[int, dict[str, torch.Tensor]] = {}
    said: dict[int, torch.Tensor] = {}
    with (
        registry_process(tmp_path) as registry,
        RegistryClient(registry.url) as client,
        Publisher(run.model, run.optimizer, client=client, policy=POLICY) as publisher,
        follower_of(client, engine, tmp_path) as follower,
    ):

        def arrived(seq: int, generation: int) -> None:
            until(lambda: follower.status().stamp == f"{POLICY}@{seq}#{generation}")
            assert engine.version() == f"{POLICY}@{seq}#{generation}"
            assert_bits_equal(held(module), states[seq])

        for seq in range(1, 5):
            run.step()
            states[seq] = run.expected()
            assert publisher.publish().result(60).seq == seq
            arrived(seq, seq)
            said[seq] = answers(module)
        assert not torch.equal(said[4], said[2])

        rolled_back(client, 2)
        arrived(2, 5)
        assert torch.equal(answers(module), said[2])
        until(lambda: [row.report.seq for row in client.replicas(POLICY)] == [2])
        (row,) = client.replicas(POLICY)
        assert (row.lag_versions, row.lag_seconds, row.drifted) == (0, 0, False)

        follower.go_to("4")
        assert_bits_equal(held(module), states[4])
        assert torch.equal(answers(module), said[4])
