"""The detector that chooses, and says why."""

import logging

import pytest
import torch

from plait.errors import PublishError, UsageError
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.choice import AutoDetector, DetectorName, detector_of
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.snapshot import SnapshotDetector
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.tiny_models import Run


def published(run: Run, detector: AutoDetector, client: RegistryClient, policy: str) -> None:
    states = [run.expected()]
    with Publisher(
        run.model, run.optimizer, client=client, policy=policy, detector=detector
    ) as publisher:
        publisher.publish()
        for _ in range(3):
            run.step()
            states.append(run.expected())
            publisher.publish()
    for seq, expected in enumerate(states, 1):
        assert_bits_equal(weights_at(client, policy, seq), expected)


def test_adamw_on_fp32_parameters_is_taken_back_without_a_copy(
    client: RegistryClient, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    detector = AutoDetector()
    with caplog.at_level(logging.INFO, "plait.trainer"):
        published(Run(), detector, client, policy)
    assert isinstance(detector.chosen, ReconstructionDetector)
    assert "detector: reconstruction, because the optimizer's own state" in caplog.text


def test_another_optimizer_needs_a_copy(client: RegistryClient, policy: str) -> None:
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)  # type: ignore[assignment]
    detector = AutoDetector()
    published(run, detector, client, policy)
    assert isinstance(detector.chosen, SnapshotDetector)
    assert "SGD" in detector.why


def test_weights_that_the_optimizer_doesnt_hold_need_a_copy(
    client: RegistryClient, policy: str
) -> None:
    state = {"w": torch.zeros(64, dtype=torch.bfloat16)}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(64))])
    detector = AutoDetector()
    with Publisher(state, optimizer, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish().result()
    assert isinstance(detector.chosen, SnapshotDetector)
    assert "only 0 of 128 bytes are FP32 parameters" in detector.why


def test_without_an_optimizer_there_is_nothing_to_take_back(
    client: RegistryClient, policy: str
) -> None:
    detector = AutoDetector()
    Publisher(Run().model, client=client, policy=policy, detector=detector).close()
    assert detector.why == "no optimizer was given"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auto", AutoDetector),
        ("snapshot", SnapshotDetector),
        ("reconstruction", ReconstructionDetector),
    ],
)  # fmt: skip
def test_a_detector_goes_by_its_name(name: DetectorName, kind: type) -> None:
    assert isinstance(detector_of(name), kind)


def test_unknown_names_and_unattached_detectors_are_refused() -> None:
    with pytest.raises(UsageError, match="no detector 'magic'; expected one of auto"):
        detector_of("magic")  # type: ignore[arg-type]
    with pytest.raises(PublishError, match="isn't attached"):
        AutoDetector().capture({})
