"""What isn't committed travels in the checkpoint, each process's part in its own state."""

from pathlib import Path

import pytest

from plait_client.registry import RegistryClient
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.sharded.ranks import Job, run_jobs, succeeded
from tests.trainer_agent.sharded.test_sharded_faults import assert_is_bumped, seqs


@pytest.mark.parametrize(
    ("saver", "failpoint", "head"),
    [("torch", "before_commit", 1), ("torch", "after_commit", 2), ("dcp", "after_commit", 2)],
)
def test_processes_go_on_from_their_own_states(
    saver: str, failpoint: str, head: int, shared_registry: RegistryProcess,
    client: RegistryClient, policy: str, tmp_path: Path,
) -> None:  # fmt: skip
    """Rank 0 is killed around the commit of what was in flight when they were saved."""
    arguments = {"url": shared_registry.url, "policy": policy, "saver": saver}
    killed, restarted = run_jobs(
        tmp_path / "jobs",
        [
            Job("saved_in_flight", 2, arguments, {0: f"trainer.{failpoint}:2"}, tmp_path),
            Job("continued", 2, arguments, folder=tmp_path),
        ],
    )
    assert (killed[0].code, killed[1].said["error"]) == (-9, "peer_lost")
    for rank in succeeded(restarted):
        assert (rank.said["found"], rank.said["seq"], rank.said["parent"]) == (head, head + 1, head)
    assert seqs(client, policy) == list(range(1, head + 2))
    assert_is_bumped(client, policy, head, head - 1)
    assert_is_bumped(client, policy, head + 1, 2)


def test_states_of_others_are_refused_and_say_what_helps(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """Of another number of processes; of one process on all; and with other weights on all."""
    arguments = {"url": shared_registry.url, "policy": policy, "saver": "torch"}
    failing = {0: "trainer.before_commit:2"}
    _, three, same, other, right = run_jobs(
        tmp_path / "jobs",
        [
            Job("saved_in_flight", 2, arguments, failing, tmp_path),
            Job("continued", 3, {**arguments, "whose": 0}, folder=tmp_path),
            Job("continued", 2, {**arguments, "whose": 0}, folder=tmp_path),
            Job("continued", 2, {**arguments, "bumps": 3}, folder=tmp_path),
            Job("continued", 2, arguments, folder=tmp_path),
        ],
    )
    for ranks, words in (
        (three, "before the number of processes or the grain changes, publish"),
        (same, "each process loads the state that it saved"),
        (other, "lead to other weights"),
    ):
        for rank in ranks:
            assert rank.said["error"] == "unknown_base", rank.log
            assert words in rank.said["message"]
    for rank in succeeded(right):
        assert rank.said["seq"] == 2
    assert seqs(client, policy) == [1, 2]


def test_a_state_that_is_damaged_on_one_process_is_taken_up_by_none(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    arguments = {"url": shared_registry.url, "policy": policy}
    [ranks] = run_jobs(tmp_path, [Job("with_a_damaged_state", 2, arguments)])
    assert [rank.said["damaged"][0] for rank in succeeded(ranks)] == [
        "publish_failed", "size_mismatch",
    ]  # fmt: skip
    assert "to read the checkpoint failed on rank 1" in ranks[0].said["damaged"][1]
    assert_is_bumped(client, policy, 2, 1)


def test_what_more_processes_left_behind_is_in_no_version_of_fewer(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """Three have uploaded their parts of version 2 when one dies; two publish it anew."""
    arguments = {"url": shared_registry.url, "policy": policy}
    killed, restarted = run_jobs(
        tmp_path,
        [
            Job("bumps", 3, {**arguments, "count": 2}, {1: "trainer.uploaded:2"}),
            Job("bumps", 2, {**arguments, "count": 1}),
        ],
    )
    assert killed[1].code == -9
    succeeded(restarted)
    assert seqs(client, policy) == [1, 2]
    assert len(client.manifest(client.version(policy, "1").manifest_digest).chunks) == 3
    assert len(client.manifest(client.version(policy, "2").manifest_digest).chunks) == 2
    assert_is_bumped(client, policy, 2, 1)
