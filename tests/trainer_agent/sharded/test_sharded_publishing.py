"""Processes that hold a model together publish it together: every version is the whole model."""

from pathlib import Path

import pytest
import torch

from plait_client.registry import RegistryClient
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.sharded.ranks import run_job, succeeded


def assert_versions_are_the_model(
    client: RegistryClient, policy: str, folder: Path, seqs: list[int]
) -> None:
    for seq in seqs:
        expected = torch.load(folder / f"expected-{seq}.pt")
        assert_bits_equal(weights_at(client, policy, seq), expected)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("fsdp", 3), ("fsdp", 2), ("tp", 2), ("ddp", 2), ("hsdp", 4), ("both", 4)],
)
def test_every_version_of_a_run_is_the_gathered_model(
    kind: str, size: int, shared_registry: RegistryProcess, client: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    ranks = succeeded(run_job("steps", size, tmp_path, shared_registry.url, policy, kind, "3"))
    for rank in ranks:
        assert rank.said["seqs"] == [1, 2, 3, 4]
        assert rank.said["state"] == ranks[0].said["state"]
        assert rank.said["metrics"] == ranks[0].said["metrics"] > 0
    assert_versions_are_the_model(client, policy, tmp_path, [1, 2, 3, 4])
    assert client.version(policy, "3").metadata == {"rank": 0, "step": 1}
    manifest = client.manifest(client.version(policy, "1").manifest_digest)
    assert len(manifest.chunks) == size  # each process has sent its own
