"""A trainer that comes back: what it holds decides where it continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.errors import (
    BaseMismatch,
    HeadMoved,
    LayoutChanged,
    NotFound,
    UnknownBase,
    UsageError,
)
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.tiny_models import Run
from tests.trainer_agent.trainer_program import load

ROOT = Path(__file__).parents[2]


def train_until_killed(url: str, policy: str, folder: Path, failpoint: str) -> None:
    program = [sys.executable, "-m", "tests.trainer_agent.trainer_program", url, policy]
    result = subprocess.run(
        [*program, str(folder), "9"], cwd=ROOT, timeout=120, check=False,
        env={**os.environ, "PLAIT_FAILPOINT": failpoint},
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL


def test_a_trainer_killed_between_upload_and_commit_continues_with_the_next_number(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    train_until_killed(shared_registry.url, policy, tmp_path, "trainer.uploaded:4")
    # The fourth version was uploaded whole, and nobody can see it.
    assert client.version(policy, "main").seq == 3
    run, state = load(tmp_path)
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())
    publisher = Publisher(run.model, client=client, policy=policy, attach=False)
    with publisher:
        publisher.load_state_dict(state)
        with torch.no_grad():
            run.model.up.bias[:3] += 1
        version = publisher.publish().version
    assert (version.seq, version.parent, version.changed_elements) == (4, 3, 3)
    assert client.manifest(version.manifest_digest).base is not None
    assert_bits_equal(weights_at(client, policy, 4), run.expected())


def test_a_trainer_killed_between_commit_and_checkpoint_is_told_where_the_line_is(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    train_until_killed(shared_registry.url, policy, tmp_path, "trainer.committed:4")
    assert client.version(policy, "main").seq == 4
    run, state = load(tmp_path)
    publisher = Publisher(run.model, client=client, policy=policy, attach=False)
    with publisher:
        with pytest.raises(HeadMoved, match=r"these weights are version 3 .* at version 4"):
            publisher.load_state_dict(state)
        publisher.rebase(to=3)
        run.step()
        version = publisher.publish().version
    assert (version.seq, version.parent) == (5, 3)
    assert client.version(policy, "main").seq == 5
    assert_bits_equal(weights_at(client, policy, 5), run.expected())


def test_a_run_that_begins_at_step_37_publishes_what_it_has_then(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    for _ in range(3):
        run.step()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        version = publisher.publish({"step": 37}).version
    assert (version.seq, version.kind, version.metadata) == (1, "anchor", {"step": 37})
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())


def test_a_second_process_continues_the_chain_without_any_state(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    for _ in range(2):
        with Publisher(run.model, client=client, policy=policy) as publisher:
            publisher.publish()
            run.step()
            publisher.publish()
    versions = [client.version(policy, str(seq)) for seq in range(1, 5)]
    assert [version.parent for version in versions] == [None, 1, 2, 3]
    assert [version.changed_elements > 0 for version in versions] == [True, True, False, True]
    assert_bits_equal(weights_at(client, policy, 4), run.expected())


def test_unknown_weights_are_refused_and_say_what_helps(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
    run.step()
    with pytest.raises(UnknownBase, match=r"no version of .* has the weights") as refusal:
        Publisher(run.model, client=client, policy=policy)
    assert "base=" in refusal.value.remedy
    assert "new_anchor=True" in refusal.value.remedy
    # With the weights of the last version at hand, the step since then is a delta.
    checkout(client, policy, tmp_path / "base")
    publisher = Publisher(run.model, client=client, policy=policy, attach=False)
    with publisher:
        publisher.attach(base=CheckpointFolder(tmp_path / "base"))
        version = publisher.publish().version
    assert (version.seq, version.kind, version.parent) == (2, "delta", 1)
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_a_new_anchor_starts_another_line_in_the_same_policy(
    client: RegistryClient, policy: str
) -> None:
    with Publisher(Run(seed=1).model, client=client, policy=policy) as publisher:
        publisher.publish()
    other = Run(seed=2)
    with Publisher(other.model, client=client, policy=policy, new_anchor=True) as publisher:
        publisher.publish()
        other.step()
        publisher.publish()
    versions = [client.version(policy, str(seq)) for seq in (1, 2, 3)]
    assert [version.kind for version in versions] == ["anchor", "anchor", "delta"]
    assert [version.parent for version in versions] == [None, None, 2]
    assert_bits_equal(weights_at(client, policy, "main"), other.expected())


def test_weights_that_are_known_begin_no_new_line(client: RegistryClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
        early = run.saved()
        run.step()
        publisher.publish()
    run.model.load_state_dict(early["model"])
    with pytest.raises(HeadMoved, match=r"are version 1 .* is at version 2"):
        Publisher(run.model, client=client, policy=policy, new_anchor=True)


def test_a_new_anchor_may_have_another_layout(client: RegistryClient, policy: str) -> None:
    with Publisher({"w": torch.zeros(16, 2)}, client=client, policy=policy) as publisher:
        publisher.publish()
    trimmed = {"w": torch.zeros(10, 2)}
    with pytest.raises(LayoutChanged, match=r"'w' is BF16\[10, 2\]"):
        Publisher(trimmed, client=client, policy=policy)
    with Publisher(trimmed, client=client, policy=policy, new_anchor=True) as publisher:
        assert publisher.publish().version.seq == 2
    assert weights_at(client, policy, 2)["w"].shape == (10, 2)


def test_another_channel_begins_at_any_version(client: RegistryClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
        early = run.saved()
        run.step()
        publisher.publish()
    run.model.load_state_dict(early["model"])
    with Publisher(run.model, client=client, policy=policy, channel="try") as publisher:
        run.step()
        version = publisher.publish().version
    assert (version.seq, version.parent, version.channel, version.generation) == (3, 1, "try", 1)
    assert client.version(policy, "main").seq == 2


def test_the_trainers_state_is_small_and_checked(client: RegistryClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        assert publisher.state_dict()["seq"] is None
        version = publisher.publish().version
        state = publisher.state_dict()
    assert state.pop("changes_digest").startswith("sha256:")
    assert sum(part.nbytes for part in state["changes"]) < 512
    assert {**state, "changes": None} == {
        "format": "plait-trainer/2", "policy": policy, "channel": "main", "seq": 1,
        "version_digest": version.version_digest, "layout_digest": version.layout_digest,
        "fingerprint": version.fingerprint, "changes": None,
    }  # fmt: skip
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.load_state_dict(state)
        with pytest.raises(UsageError, match="the trainer state is of"):
            publisher.load_state_dict({**state, "policy": "other"})
        with pytest.raises(NotFound, match="which this trainer committed as version 1"):
            publisher.load_state_dict({**state, "version_digest": "sha256:" + "0" * 64})
        run.step()
        with pytest.raises(UnknownBase):
            publisher.load_state_dict(state)


def test_rebase_refuses_weights_that_are_not_the_version(
    client: RegistryClient, policy: str
) -> None:
    run, other = Run(seed=1), Run(seed=2)
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
    publisher = Publisher(other.model, client=client, policy=policy, attach=False)
    with publisher, pytest.raises(BaseMismatch, match="are not version 1"):
        publisher.rebase()
