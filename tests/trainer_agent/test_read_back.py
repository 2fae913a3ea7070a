"""A publisher without a copy of the weights, against a real registry: every version is exact, and
what can't be told from the optimizer comes back from what was committed."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import BaseMismatch, RegistryUnavailable
from plait.tensors import StateDictWeights
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.reconstruction import ReconstructionDetector
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.tiny_models import Run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))


def publisher_of(
    run: Run, client: RegistryClient, policy: str, **options: Any
) -> tuple[Publisher, ReconstructionDetector]:
    detector = ReconstructionDetector()
    publisher = Publisher(
        run.model, run.optimizer, client=client, policy=policy, detector=detector, **options
    )
    return publisher, detector


def test_every_version_of_a_run_is_the_model_cast_to_bf16(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Run()
    publisher, detector = publisher_of(run, client, policy)
    states = []
    with publisher:
        for step in range(8):
            states.append(run.expected())
            publisher.publish({"step": step})
            for _ in range(step % 3):
                run.step()
            run.model.seen += step
    for seq, expected in enumerate(states, 1):
        assert_bits_equal(weights_at(client, policy, seq), expected)
    assert detector.report.read_back == 0
    assert not run.optimizer._optimizer_step_pre_hooks
    checkout(client, f"{policy}@8", tmp_path / "out")
    folder = CheckpointFolder(tmp_path / "out")
    for name, tensor in states[-1].items():
        wanted = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert folder.bits(name).tobytes() == wanted


def test_weights_changed_by_hand_come_back_from_the_committed_version(
    client: RegistryClient, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    publisher, detector = publisher_of(run, client, policy)
    with publisher:
        for step in range(5):
            publisher.publish()
            run.step()
            if step % 2:
                run.model.up.weight.data.clamp_(-0.1, 0.1)
        with caplog.at_level(logging.WARNING, "plait.trainer"):
            publisher.publish()
    assert detector.report.read_back == 2
    assert_bits_equal(weights_at(client, policy, 6), run.expected())


def test_what_was_captured_and_not_committed_belongs_to_the_kept_state(
    far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    run = Run()
    publisher, detector = publisher_of(run, far, policy, patience=0.0)
    with publisher:
        publisher.publish().result()
        run.step()
        proxy.lose("", "cut", times=1 << 20)
        failed = publisher.publish()
        assert isinstance(failed.exception(), RegistryUnavailable)
        run.step()
        run.model.down.weight.data[0] = 3
        with pytest.raises(RegistryUnavailable):
            publisher.publish()
        proxy.heal()
        version = publisher.publish().version
    assert detector.report.read_back == 1
    assert version.seq == 2
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_an_external_line_has_nothing_to_read_back(client: RegistryClient, policy: str) -> None:
    run = Run()
    publisher, detector = publisher_of(run, client, policy, external=True)
    base = run.expected()
    with publisher:
        publisher.publish()
        run.step()
        version, last = publisher.publish().version, run.expected()
        run.model.up.bias.data[0] = 3
        run.step()
        for _ in range(2):
            with pytest.raises(BaseMismatch, match="doesn't hold the weights"):
                publisher.publish()
        assert detector.report.read_back == 0
        assert client.version(policy, "main").seq == 2
        assert_bits_equal(weights_at(client, policy, 1, dict(base)), base)
        # With the last version's weights at hand, as the remedy says, it goes on.
        held = StateDictWeights(client.layout(version.layout_digest), last)
        publisher.attach(base=held)
        assert publisher.publish().version.seq == 3
    assert_bits_equal(weights_at(client, policy, 3, dict(base)), run.expected())


def test_weights_loaded_before_the_first_publish_are_simply_its_anchor(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    publisher, detector = publisher_of(run, client, policy)
    with publisher:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += 1
        first = publisher.publish()
        assert first.done()  # the anchor was read from the live weights
        expected = run.expected()
        run.step()
        publisher.publish()
    assert_bits_equal(weights_at(client, policy, 1), expected)
    assert_bits_equal(weights_at(client, policy, 2), run.expected())
    assert detector.report.read_back == 0


def test_along_a_grain(client: RegistryClient, policy: str) -> None:
    run = Run()
    publisher, detector = publisher_of(run, client, policy, grain=2)
    with publisher:
        for _ in range(3):
            publisher.publish()
            run.step()
        publisher.publish().result()
        with torch.no_grad():
            run.model.gain += 1
            run.model.up.weight.mul_(0.5)
        publisher.publish()
    assert detector.report.read_back == 2
    assert_bits_equal(weights_at(client, policy, 5), run.expected())


def test_a_resumed_trainer_continues_with_the_changes_since_the_version(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    publisher, _ = publisher_of(run, client, policy)
    with publisher:
        publisher.publish()
        run.step()
        publisher.publish()
    saved = run.saved()
    resumed = Run(seed=3)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    publisher, detector = publisher_of(resumed, client, policy)
    with publisher:
        resumed.step()
        version = publisher.publish().version
    assert (version.seq, version.parent, detector.report.read_back) == (3, 2, 0)
    assert_bits_equal(weights_at(client, policy, 3), resumed.expected())
