"""A plain loop: every K-th step, the first state and the last one."""

from typing import Any

import pytest
import torch

from plait.errors import HeadMoved, UsageError
from plait_client.registry import RegistryClient
from plait_trainer.loop import PublishingLoop
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.test_publish_faults import move
from tests.trainer_agent.tiny_models import Run


def test_every_third_step_is_a_version_and_so_are_the_first_and_the_last_state(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    states = [run.expected()]
    with PublishingLoop(run.model, run.optimizer, policy=policy, every=3, client=client) as loop:
        for step in range(1, 8):
            run.step()
            future = loop.step({"loss": 1.0 / step})
            assert (future is not None) == (step % 3 == 0)
            if step in (3, 6, 7):
                states.append(run.expected())
    versions = client.versions(policy).versions
    assert [version.metadata["step"] for version in versions] == [7, 6, 3, 0]
    assert versions[1].metadata["loss"] == 1.0 / 6
    for seq, expected in enumerate(states, 1):
        assert_bits_equal(weights_at(client, policy, seq), expected)


def test_a_loop_that_holds_a_version_begins_without_a_new_one(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    for _ in range(2):
        with PublishingLoop(run.model, run.optimizer, policy=policy, client=client):
            pass
    assert client.version(policy, "main").seq == 1


def test_an_error_in_the_loop_is_the_one_that_is_told(client: RegistryClient, policy: str) -> None:
    run = Run()

    def train() -> None:
        with PublishingLoop(run.model, run.optimizer, policy=policy, client=client) as loop:
            run.step()
            loop.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert client.version(policy, "main").seq == 2


def test_a_refused_step_raises_and_the_loop_closes(client: RegistryClient, policy: str) -> None:
    run = Run()

    def train() -> None:
        with PublishingLoop(run.model, run.optimizer, policy=policy, client=client) as loop:
            run.step()
            loop.publish().result()
            move(client, policy, to=1)
            for _ in range(3):
                run.step()
                loop.step()
                loop.publisher.flush()

    with pytest.raises(HeadMoved, match="it diverged"):
        train()
    assert client.channel(policy, "main").seq == 1


def test_the_environment_names_the_registry(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PLAIT_URL", shared_registry.url)
    with PublishingLoop({"w": torch.ones(4)}, policy=policy) as loop:
        assert loop.is_published
    assert client.version(policy, "main").seq == 1


@pytest.mark.parametrize("every", [0, -3, 1.5, 2.0, True, "4", None])
def test_a_version_every_so_many_steps_needs_a_whole_number(
    every: Any, client: RegistryClient, policy: str
) -> None:
    with pytest.raises(UsageError, match="expected a whole number of at least 1"):
        PublishingLoop({"w": torch.ones(4)}, policy=policy, every=every, client=client)
