"""Processes that hold a Megatron-Core model's shards publish it as one."""

import subprocess
import sys
from pathlib import Path

import torch

from plait_client.registry import RegistryClient
from tests.trainer_agent.megatron.group_program import WORLD, first_weights, next_weights
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess

ROOT = Path(__file__).parents[3]


def test_shards_experts_and_stages_make_the_versions_of_one_checkpoint(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.trainer_agent.megatron.group_program"]
    ranks = [
        subprocess.Popen(
            [*program, str(tmp_path), str(rank), shared_registry.url, policy],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(said)
    first, second = first_weights(), next_weights()
    assert_bits_equal(weights_at(client, policy, 1), first)
    assert_bits_equal(weights_at(client, policy, 2), second)
    changed = sum(
        int((tensor.view(torch.int16) != second[name].view(torch.int16)).sum())
        for name, tensor in first.items()
    )
    assert client.version(policy, "2").changed_elements == changed
