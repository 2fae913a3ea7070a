"""The hook that the reconstruction detector has on an optimizer: in compiled steps, and when the
detector is gone."""

import gc
import weakref

import pytest
import torch

from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.side_by_side import Gradients, SideBySide, parameters
from tests.trainer_agent.tiny_models import Run


# Dynamo imports parts of torch that torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_what_a_compiled_step_changed_is_found_exactly() -> None:
    """Compiled, a step computes its corrections in float32: what that changes is read back."""
    tensors = parameters(a=(7, 10), b=(33,))
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-3)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)

    def step() -> torch.Tensor:
        optimizer.step()
        return tensors["b"].square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    for _ in range(4):
        gradients.give()
        compiled()
        assert pair.changed() > 0
    counts = pair.detector.report
    assert counts.recovered > 0
    assert counts.read_back == len(pair.recalled) < 8


def test_a_detector_that_nobody_holds_is_collected_and_steps_go_on() -> None:
    tensors = parameters(a=(7, 10))
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-3)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    gone = weakref.ref(pair.detector), weakref.ref(pair.detector._watching())
    del pair
    gc.collect()
    assert [each() for each in gone] == [None, None]
    gradients.give()
    optimizer.step()
    again = SideBySide(tensors, optimizer)
    gradients.give()
    optimizer.step()
    assert again.changed() > 0
    assert again.recalled == []


def test_a_publisher_that_was_dropped_looks_at_no_step_any_more(
    client: RegistryClient, policy: str
) -> None:
    run = Run()
    publisher = Publisher(
        run.model, run.optimizer, client=client, policy=policy, detector="reconstruction"
    )
    publisher.publish().result()
    expected = run.expected()
    detector = publisher._model.detector
    watch = weakref.ref(detector._watching())  # type: ignore[attr-defined]
    del detector, publisher
    gc.collect()
    assert watch() is None
    run.step()
    assert_bits_equal(weights_at(client, policy, 1), expected)
