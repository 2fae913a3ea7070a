"""Processes that hold a model together publish it together: every version is the whole model."""

from pathlib import Path

import pytest
import torch

from plait.tensors import StateDictWeights, layout_of_tensors
from plait.weights import fingerprint_weights
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.sharded.ranks import Job, run_job, run_jobs, succeeded


def assert_versions_are_the_model(
    client: RegistryClient, policy: str, folder: Path, seqs: list[int]
) -> None:
    for seq in seqs:
        expected = torch.load(folder / f"expected-{seq}.pt")
        assert_bits_equal(weights_at(client, policy, seq), expected)


def test_every_version_of_every_kind_of_sharding_is_the_gathered_model(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    kinds = {"fsdp": 3, "tp": 2, "ddp": 2, "hsdp": 4, "both": 4}
    jobs = [
        Job("steps", size, {"url": shared_registry.url, "policy": f"{policy}-{kind}", "kind": kind})
        for kind, size in kinds.items()
    ]
    for number, (job, ranks) in enumerate(zip(jobs, run_jobs(tmp_path, jobs), strict=True)):
        name = str(job.arguments["policy"])
        for rank in succeeded(ranks):
            assert rank.said["seqs"] == [2, 3, 4]
            assert rank.said["state"] == ranks[0].said["state"]
            assert rank.said["payload"] == ranks[0].said["payload"]
        assert_versions_are_the_model(client, name, tmp_path / f"job-{number}", [1, 2, 3, 4])
        assert client.version(name, "3").metadata == {"rank": 0, "step": 1}
        manifest = client.manifest(client.version(name, "1").manifest_digest)
        assert len(manifest.chunks) == job.size  # each process has sent its own


def test_versions_are_checked_out_as_checkpoints(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """From nothing, and from one version to the next, by the client that everybody uses."""
    arguments = {"url": shared_registry.url, "policy": policy, "kind": "fsdp", "count": 2}
    succeeded(run_job(tmp_path / "job", Job("steps", 3, arguments, folder=tmp_path)))
    for seq in (1, 2, 3):
        checkout(client, f"{policy}@{seq}", tmp_path / "checkout")
        expected = torch.load(tmp_path / f"expected-{seq}.pt")
        wanted = fingerprint_weights(StateDictWeights(layout_of_tensors(expected), expected))
        found = CheckpointFolder(tmp_path / "checkout")
        assert found.layout == layout_of_tensors(expected)
        assert fingerprint_weights(found) == wanted


@pytest.mark.parametrize("detector", ["reconstruction", "auto"])
def test_shards_without_a_copy_of_the_weights_are_the_model_too(
    detector: str, shared_registry: RegistryProcess, client: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    arguments = {"url": shared_registry.url, "policy": policy, "detector": detector}
    job = Job("steps", 3, {**arguments, "kind": "fsdp"}, folder=tmp_path)
    for rank in succeeded(run_job(tmp_path / "job", job)):
        assert rank.said["seqs"] == [2, 3, 4]
    assert_versions_are_the_model(client, policy, tmp_path, [1, 2, 3, 4])


def test_a_mixtures_stacked_experts_are_published_by_whoever_holds_them(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """As transformers writes them, one by one: two on each of two processes, none on the third."""
    detectors = ("snapshot", "reconstruction")
    jobs = [
        Job(
            "mixture_steps", 3,
            {"url": shared_registry.url, "policy": f"{policy}-{detector}", "detector": detector},
        )
        for detector in detectors
    ]  # fmt: skip
    for number, (detector, ranks) in enumerate(
        zip(detectors, run_jobs(tmp_path, jobs), strict=True)
    ):
        succeeded(ranks)
        for seq in (1, 2, 3):
            checkout(client, f"{policy}-{detector}@{seq}", tmp_path / f"{detector}-{seq}")
            found = CheckpointFolder(tmp_path / f"{detector}-{seq}")
            saved = CheckpointFolder(tmp_path / f"job-{number}" / f"saved-{seq}")
            assert any(".experts.3." in tensor.name for tensor in saved.layout.tensors)
            assert found.layout == saved.layout
            for tensor in saved.layout.tensors:
                assert found.bits(tensor.name).tobytes() == saved.bits(tensor.name).tobytes()


def test_a_run_goes_on_with_any_other_number_of_processes(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """Two, three, one, two by columns, four by both; each from the checkpoint of the one before."""
    arguments = {"url": shared_registry.url, "policy": policy, "count": 2}
    jobs = [
        Job("steps", size, {**arguments, "kind": kind, "resumes": number > 0}, folder=tmp_path)
        for number, (kind, size) in enumerate(
            [("fsdp", 2), ("fsdp", 3), ("alone", 1), ("tp", 2), ("both", 4)]
        )
    ]
    first = 1
    for ranks in run_jobs(tmp_path / "jobs", jobs):
        for rank in succeeded(ranks):
            assert rank.said["seqs"] == [first + 1, first + 2]
            assert rank.said["found"] == (None if first == 1 else first)
        first += 2
    assert_versions_are_the_model(client, policy, tmp_path, list(range(1, first + 1)))
    versions = {version.seq: version for version in client.all_versions(policy)}
    assert [versions[seq].parent for seq in sorted(versions)] == [None, *range(1, first)]
    assert {version.kind for version in versions.values() if version.seq > 1} == {"delta"}


def test_a_model_trained_on_from_a_version_is_published_as_the_difference(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    arguments = {"url": shared_registry.url, "policy": policy}
    begun = Job("steps", 2, {**arguments, "kind": "fsdp", "count": 0}, folder=tmp_path)
    going_on = Job("from_a_base", 3, arguments, folder=tmp_path)
    first, second = run_jobs(tmp_path / "jobs", [begun, going_on])
    succeeded(first)
    for rank in succeeded(second):
        assert rank.said["unknown"][0] == "unknown_base"
        assert (rank.said["seq"], rank.said["parent"]) == (2, 1)
    assert client.version(policy, "2").kind == "delta"


def test_an_external_line_begins_with_what_all_processes_hold(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    arguments = {"url": shared_registry.url, "policy": policy}
    ranks = succeeded(run_job(tmp_path / "job", Job("external", 3, arguments, folder=tmp_path)))
    # One process's weights had changed: nobody went on.
    assert [rank.said["changed"][0] for rank in ranks] == [
        "publish_failed",
        "usage",
        "publish_failed",
    ]
    assert "rank 1: an external anchor" in ranks[0].said["changed"][1]
    manifest = client.manifest(client.version(policy, "1").manifest_digest)
    assert manifest.external
    assert [side_file.name for side_file in manifest.side_files] == ["config.json"]
    held = torch.load(tmp_path / "expected-1.pt")
    expected = torch.load(tmp_path / "expected-2.pt")
    assert_bits_equal(weights_at(client, policy, 2, held), expected)


def test_who_publishes_together_follows_from_the_model_or_from_what_is_said(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    arguments = {"url": shared_registry.url, "policy": policy}
    ranks = succeeded(run_job(tmp_path, Job("choices", 3, arguments)))
    for number, rank in enumerate(ranks):
        assert rank.said["grain"][0] == rank.said["merge"][0] == "usage"
        assert rank.said["alone"][0] == "publish_failed"
        assert "no process that publishes holds all" in rank.said["alone"][1]
        assert client.version(f"{policy}-{number}", "main").seq == 1
        assert "it publishes alone" in rank.log
        assert "which publish it together" in rank.log
    assert [rank.said.get("seq") for rank in ranks] == [2, None, 2]
    assert {rank.said["all"] for rank in ranks} == {3}
