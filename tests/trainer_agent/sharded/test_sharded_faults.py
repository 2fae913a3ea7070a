"""One process fails, dies or goes astray: all are told, no base moves, nothing hangs or is lost."""

from pathlib import Path

import pytest
import torch

from plait_client.registry import RegistryClient
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.sharded.models import TinyTransformer, gathered
from tests.trainer_agent.sharded.ranks import Ended, Job, run_job, run_jobs, succeeded
from tests.trainer_agent.sharded.scenarios import bump


def after_bumps(count: int) -> dict[str, torch.Tensor]:
    model = TinyTransformer()
    for _ in range(count):
        bump(model)
    return gathered(model, torch.bfloat16)


def assert_is_bumped(client: RegistryClient, policy: str, seq: int, count: int) -> None:
    assert_bits_equal(weights_at(client, policy, seq), after_bumps(count))


def seqs(client: RegistryClient, policy: str) -> list[int]:
    return sorted(version.seq for version in client.all_versions(policy))


def run(
    scenario: str, registry: RegistryProcess, policy: str, folder: Path, **arguments: object
) -> list[Ended]:
    job = Job(scenario, 3, {"policy": policy, **(arguments or {"url": registry.url})})
    return succeeded(run_job(folder, job))


@pytest.mark.parametrize("place", ["captured", "uploaded", "committed"])
def test_a_process_killed_in_a_publish_is_named_and_the_job_goes_on(
    place: str, shared_registry: RegistryProcess, client: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """In the second of three publishes. The restarted job has the last committed checkpoint."""
    jobs = []
    for victim in range(3):
        arguments = {"url": shared_registry.url, "policy": f"{policy}-{victim}"}
        jobs.append(
            Job("bumps", 3, {**arguments, "count": 3}, failpoints={victim: f"trainer.{place}:2"})
        )
        committed = 1 if place == "committed" else 0  # changes since the first version
        restart = {**arguments, "count": 1, "before": committed}
        jobs.append(Job("bumps", 3, restart))
    ended = run_jobs(tmp_path, jobs)
    for victim, (killed, restarted) in enumerate(zip(ended[::2], ended[1::2], strict=True)):
        assert_survivors_were_told(killed, victim)
        head = committed + 1
        for rank in succeeded(restarted):
            assert rank.said["found"] == head
        name = f"{policy}-{victim}"
        assert seqs(client, name) == list(range(1, head + 2))
        assert_is_bumped(client, name, head, committed)
        assert_is_bumped(client, name, head + 1, committed + 1)


@pytest.mark.parametrize(("place", "committed"), [("before_commit", 0), ("after_commit", 1)])
def test_rank_0_killed_around_the_commit_leaves_the_version_or_none(
    place: str, committed: int, shared_registry: RegistryProcess, client: RegistryClient,
    policy: str, tmp_path: Path,
) -> None:  # fmt: skip
    arguments = {"url": shared_registry.url, "policy": policy}
    killed, restarted = run_jobs(
        tmp_path,
        [
            Job("bumps", 3, {**arguments, "count": 3}, failpoints={0: f"trainer.{place}:2"}),
            Job("bumps", 3, {**arguments, "count": 1, "before": committed}),
        ],
    )
    assert_survivors_were_told(killed, 0)
    for rank in succeeded(restarted):
        assert rank.said["found"] == committed + 1
    assert seqs(client, policy) == list(range(1, committed + 3))
    assert_is_bumped(client, policy, committed + 2, committed + 1)


def assert_survivors_were_told(ranks: list[Ended], victim: int) -> None:
    assert ranks[victim].code == -9
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.code == 3, rank.log
            assert rank.said["error"] == "peer_lost", rank.log
            assert f"rank {victim} of the group of publishers is gone" in rank.said["message"]


def test_an_upload_that_fails_on_one_process_moves_no_base_and_loses_nothing(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    ranks = run(
        "with_one_upload_failing", shared_registry, policy, tmp_path,
        url=shared_registry.url, port=shared_registry.port,
    )  # fmt: skip
    for name in ("first", "second"):
        assert [rank.said[name][0] for rank in ranks] == [
            "publish_failed", "publish_failed", "registry_unavailable",
        ]  # fmt: skip
        assert "to upload failed on rank 2:" in ranks[0].said[name][1]
        assert [rank.said[f"{name} version"] for rank in ranks] == [1, 1, 1]
    assert [rank.said["seq"] for rank in ranks] == [2, 2, 2]
    assert seqs(client, policy) == [1, 2]
    assert_is_bumped(client, policy, 2, 3)


def test_a_capture_that_fails_on_one_process_is_kept_by_none(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    ranks = run("with_one_capture_failing", shared_registry, policy, tmp_path)
    assert [rank.said["failed"][0] for rank in ranks] == [
        "publish_failed", "limit_exceeded", "publish_failed",
    ]  # fmt: skip
    assert "to capture failed on rank 1: metadata of" in ranks[2].said["failed"][1]
    assert [rank.said["seq"] for rank in ranks] == [2, 2, 2]
    assert_is_bumped(client, policy, 2, 2)


def test_ctrl_c_on_one_process_is_told_to_the_others(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    ranks = run("with_an_interrupt", shared_registry, policy, tmp_path)
    assert ranks[1].said["failed"] == "interrupted"
    assert "rank 1: it was interrupted" in ranks[0].said["failed"][1]
    assert [rank.said["seq"] for rank in ranks] == [3, 3, 3]
    assert_is_bumped(client, policy, 3, 2)


def test_a_commit_without_an_answer_is_in_doubt_on_every_process_and_settled_first(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    ranks = run(
        "with_an_unknown_commit", shared_registry, policy, tmp_path, port=shared_registry.port
    )
    assert {rank.said["second"][0] for rank in ranks} == {"commit_unknown"}
    assert [rank.said["seq"] for rank in ranks] == [3, 3, 3]
    assert_is_bumped(client, policy, 2, 1)
    assert_is_bumped(client, policy, 3, 2)


def test_a_rollback_fences_off_every_process_until_they_rebase(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    ranks = run("behind_a_rollback", shared_registry, policy, tmp_path)
    for rank in ranks:
        assert rank.said["commit"][0] == rank.said["fenced"][0] == "head_moved"
        assert "it diverged" in rank.said["commit"][1]
        assert rank.said["rebase"][0] == "base_mismatch"
        assert rank.said["seq"] == 3
    assert client.version(policy, "3").parent == 2
    assert_is_bumped(client, policy, 3, 2)


def test_a_process_that_goes_another_way_is_named_and_nobody_waits_for_it(
    shared_registry: RegistryProcess, policy: str, tmp_path: Path
) -> None:
    ranks = run("apart", shared_registry, policy, tmp_path)
    for number in (0, 2):
        code, message = ranks[number].said["publish"]
        assert (code, ranks[number].said["again"][0]) == ("publish_failed", "publish_failed")
        assert "rank 0 is at 'capture', but rank 1 is at 'close'" in message


def test_a_process_that_doesnt_come_is_given_up(
    shared_registry: RegistryProcess, policy: str, tmp_path: Path
) -> None:
    ranks = run("without_an_answer", shared_registry, policy, tmp_path)
    assert [rank.said["publish"][0] for rank in ranks] == ["peer_lost"] * 3
    assert "rank 1 of the group" in ranks[0].said["publish"][1]
