"""What a publisher is told is checked where it is constructed, before anything is written."""

from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import DocumentInvalid, NotFound, PlaitError, UsageError
from plait_client.registry import RegistryClient
from plait_trainer import CopyBackDetector, Publisher, SnapshotDetector
from plait_trainer.dtypes import DtypeRule
from plait_trainer.sources import ModuleSource
from tests.trainer_agent.tiny_models import Run


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("detector", None), ("detector", SnapshotDetector), ("detector", 3), ("detector", "snap"),
        ("ties", [1]), ("ties", {1: "a"}), ("dtypes", ["x"]), ("ties", {"a": 1}),
        ("dtypes", {1: "F16"}), ("dtypes", {"up.*": ["F16"]}),
        ("dtype", "bf16"), ("names", 3),
        ("queue_size", "2"), ("queue_size", 1.5), ("queue_size", True), ("queue_size", 0),
        ("when_full", "drop"), ("patience", -1), ("patience", float("nan")), ("patience", "3"),
        ("patience", None), ("peer_timeout", 0), ("peer_timeout", "1"), ("grain", 0),
        ("grain", 1.5), ("grain", "8"), ("kv_heads", "x"), ("actor", None), ("actor", "x" * 257),
        ("side_files", 3), ("store", "s3://bucket"), ("group", 3),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_at_once(
    client: RegistryClient, policy: str, argument: str, value: Any
) -> None:
    with pytest.raises(UsageError) as refused:
        Publisher(Run().model, client=client, policy=policy, **{argument: value})
    assert argument.partition("_")[0].removesuffix("s") in refused.value.message.replace(
        "heads", "kv"
    )
    with pytest.raises(NotFound):
        client.policy(policy)


@pytest.mark.parametrize("name", ["a/b", "12", "", None, "x" * 129, "-x"])
@pytest.mark.parametrize("what", ["policy", "channel"])
def test_names_are_checked_before_the_registry_is_asked(
    client: RegistryClient, policy: str, what: str, name: Any
) -> None:
    with pytest.raises(DocumentInvalid):
        Publisher(Run().model, client=client, **{"policy": policy, what: name})


@pytest.mark.parametrize(
    "model",
    [
        {"a": np.zeros(3)}, {"a": None}, {"a": 1.0}, {1: torch.zeros(3)}, lambda: None,
        lambda: {"a": [1]}, {}, torch.nn.Module(), 3, "model",
    ],
)  # fmt: skip
def test_what_holds_no_named_tensors_is_refused(
    client: RegistryClient, policy: str, model: Any
) -> None:
    with pytest.raises(UsageError):
        Publisher(model, client=client, policy=policy)
    with pytest.raises(NotFound):
        client.policy(policy)


def test_a_detector_that_isn_t_attached_yet_is_one(client: RegistryClient, policy: str) -> None:
    run = Run()
    detector = CopyBackDetector(list)
    with Publisher(run.model, client=client, policy=policy, detector=detector) as publisher:
        assert publisher.publish().version.seq == 1


def test_the_reason_is_a_plait_error_wherever_it_is_found(
    client: RegistryClient, policy: str
) -> None:
    with pytest.raises(PlaitError, match="list"):
        Publisher(
            Run().model,
            [1],
            client=client,
            policy=policy,
            detector="reconstruction",  # type: ignore[arg-type]
        )


def test_names_that_nothing_has_are_told(
    client: RegistryClient, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    options: dict[str, Any] = {
        "dtypes": {"up.*": "F16", "upp.*": None, "*.router": None}, "ties": {"head": "up.wieght"},
    }  # fmt: skip
    with caplog.at_level("WARNING", "plait.trainer"):
        Publisher(run.model, client=client, policy=policy, **options).close()
    assert "name of dtypes 'upp.*', dtypes '*.router', ties 'up.wieght'" in caplog.text


def test_a_source_says_itself_how_it_is_published(client: RegistryClient, policy: str) -> None:
    source = ModuleSource(Run().model, DtypeRule())
    with pytest.raises(UsageError, match="says itself"):
        Publisher(source, client=client, policy=policy, dtypes={"up.*": "F16"})
