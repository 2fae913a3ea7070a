"""What lies outside the error bound's assumptions is noticed, read back, proven and reported."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plait.errors import FingerprintMismatch, PublishError, RegistryUnavailable
from plait_trainer.partial_weights import SomeWeights
from tests.trainer_agent.side_by_side import Gradients, SideBySide, parameters


class Training:
    """A run of three parameters, watched by both detectors."""

    def __init__(self, **options: object) -> None:
        self.tensors = parameters()
        self.optimizer = torch.optim.AdamW(self.tensors.values(), **{"lr": 1e-4, **options})
        self.gradients = Gradients(self.tensors)
        self.pair = SideBySide(self.tensors, self.optimizer)

    def step(self) -> None:
        self.gradients.give()
        self.optimizer.step()

    def recalled(self) -> list[str]:
        """What a publish reads back, having compared it with the stored copy."""
        self.pair.recalled.clear()
        self.pair.publish()
        return list(self.pair.recalled)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return self.optimizer.state[self.tensors[name]]


@pytest.mark.parametrize("before", [True, False])
def test_weights_changed_by_hand_beside_a_step(
    before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training()
    for _ in range(2):
        run.step()
        assert run.recalled() == []
    if not before:
        run.step()
    with torch.no_grad():
        run.tensors["a"][3, :7] += 1
    if before:
        run.step()
    with caplog.at_level(logging.WARNING):
        assert run.recalled() == ["a"]
    assert "reading 1 tensors back, of 3: a: it was changed by hand" in caplog.text
    assert run.pair.detector.report.read_back == 1
    run.step()
    assert run.recalled() == []


def test_weights_changed_by_hand_without_a_step_and_between_two() -> None:
    run = Training()
    with torch.no_grad():
        run.tensors["b"].clamp_(-1e-3, 1e-3)
    assert run.recalled() == ["b"]
    run.step()
    with torch.no_grad():
        run.tensors["c"] *= 0.5
    run.step()
    run.step()
    assert run.recalled() == ["c"]


def test_a_frozen_parameter_edited_by_hand() -> None:
    run = Training()
    run.tensors["b"].requires_grad_(False)
    run.gradients.give(without=["b"])
    run.optimizer.step()
    assert run.recalled() == []
    run.tensors["b"][5] = 7
    assert run.recalled() == ["b"]
    assert run.recalled() == []


def test_what_surprises_at_every_publish_is_kept_as_a_copy() -> None:
    run = Training()
    for publish in range(4):
        run.step()
        with torch.no_grad():
            run.tensors["a"].mul_(0.999)
        assert run.recalled() == (["a"] if publish < 2 else [])
    assert run.pair.detector.report.copied_bytes == 2 * run.tensors["a"].numel()


def test_one_surprise_leaves_no_copy() -> None:
    run = Training()
    for publish in range(6):
        run.step()
        if publish % 2:
            run.tensors["a"].data[0] = publish
        assert run.recalled() == (["a"] if publish % 2 else [])
    assert run.pair.detector.report.copied_bytes == 0


@pytest.mark.parametrize("scale", [0.5, 1e3, float("inf"), float("nan")])
def test_moments_changed_from_outside(scale: float) -> None:
    run = Training()
    run.step()
    assert run.recalled() == []
    run.step()
    run.state("a")["exp_avg"].mul_(scale)
    assert run.recalled() == ["a"]
    run.state("a")["exp_avg"].zero_()
    run.step()
    assert run.recalled() == []


def test_moments_loaded_between_two_steps_are_the_next_steps_own() -> None:
    run, other = Training(), Training(lr=1e-2)
    for _ in range(3):
        run.step()
        other.step()
    assert run.recalled() == []
    run.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    run.step()
    run.pair.publish()
    for _ in range(3):
        run.step()
        run.pair.publish()
    assert run.pair.recalled == []


def test_moments_beyond_what_gradients_lead_to_are_noticed_once() -> None:
    run = Training()
    run.step()
    run.pair.publish()
    for name in run.tensors:
        run.state(name)["exp_avg_sq"].mul_(1e-4)  # updates a hundred times too large
    run.step()
    assert sorted(run.recalled()) == ["a", "b", "c"]
    for _ in range(4):
        run.step()
        assert run.recalled() == []  # the log has room for them now
    assert run.pair.detector.report.copied_bytes == 0


def test_betas_that_change_are_noticed_once() -> None:
    run = Training()
    for step in range(8):
        run.optimizer.param_groups[0]["betas"] = (0.9, 0.95 if step % 2 else 0.999)
        run.step()
        found = run.recalled()
        assert (found == []) or step == 1


def test_betas_without_a_bound_are_read_back_while_they_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Training()
    run.step()
    run.optimizer.param_groups[0]["betas"] = (0.99, 0.97)
    run.step()
    with caplog.at_level(logging.WARNING):
        assert run.recalled() == ["a", "b", "c"]
    assert "a: beta1² = 0.9801 isn't below beta2 = 0.97" in caplog.text
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    run.step()
    run.pair.publish()


def test_a_decay_that_leaves_nothing_of_the_weights() -> None:
    run = Training(lr=1e-2, weight_decay=99.0)
    run.step()
    assert sorted(run.recalled()) == ["a", "b", "c"]


def test_gradients_that_are_not_finite() -> None:
    run = Training()
    run.step()
    run.pair.publish()
    run.gradients.give()
    assert run.tensors["a"].grad is not None
    run.tensors["a"].grad[0, 0] = float("nan")
    assert run.tensors["b"].grad is not None
    run.tensors["b"].grad[1] = float("inf")
    run.optimizer.step()
    assert run.recalled() == ["a", "b"]
    run.step()
    assert set(run.recalled()) <= {"a", "b"}
    run.step()
    assert run.recalled() == []


def test_a_start_up_step_without_gradients_shifts_the_count() -> None:
    run = Training(weight_decay=0.1)
    for tensor in run.tensors.values():
        tensor.grad = torch.zeros_like(tensor)
    run.optimizer.step()  # makes the state, and decays the weights
    run.pair.publish()
    run.step()
    run.pair.publish()
    run.state("b")["step"].fill_(40)
    run.step()
    run.pair.publish()
    assert run.pair.recalled == []


def test_a_step_count_that_jumps_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    run = Training()
    run.step()
    run.state("a")["step"] += 1
    with caplog.at_level(logging.WARNING):
        assert run.recalled() == ["a"]
    assert "a: its step count went from 0 to 2" in caplog.text


def test_a_state_that_lost_its_step_count() -> None:
    run = Training()
    run.step()
    run.pair.publish()
    del run.state("a")["step"]
    with pytest.raises(KeyError, match="step"):
        run.step()
    run.pair.publish()
    run.state("a")["step"] = torch.tensor(1.0)
    run.step()
    run.pair.publish()


def test_moments_of_another_form_are_not_recovered_from(caplog: pytest.LogCaptureFixture) -> None:
    run = Training()
    run.step()
    run.pair.publish()
    run.step()
    kept = {name: dict(run.state(name)) for name in run.tensors}
    run.state("a")["exp_avg"] = kept["a"]["exp_avg"].bfloat16()
    run.state("b")["exp_avg_sq"] = kept["b"]["exp_avg_sq"].view(3, 11)
    del run.state("c")["exp_avg"]
    with caplog.at_level(logging.WARNING):
        assert run.recalled() == ["a", "b", "c"]
    for told in (
        "a moment is torch.bfloat16[70, 1000] on cpu; expected torch.float32[70, 1000] on cpu",
        "a moment is torch.float32[3, 11] on cpu; expected torch.float32[33] on cpu",
        "a moment is missing in the optimizer's state",
    ):
        assert told in caplog.text
    for name, state in kept.items():
        run.state(name).update(state)
    run.step()
    assert run.recalled() == []


def test_bf16_parameters_and_buffers_are_kept_as_copies() -> None:
    tensors = {
        "wide": torch.nn.Parameter(torch.randn(40, 9)),
        "narrow": torch.nn.Parameter(torch.randn(50).bfloat16()),
        "buffer": torch.zeros(8),
    }
    optimizer = torch.optim.AdamW([tensors["wide"], tensors["narrow"]], lr=1e-2)
    pair = SideBySide(tensors, optimizer, dtypes={"buffer": torch.float32})
    for _ in range(3):
        for name in ("wide", "narrow"):
            tensors[name].grad = torch.randn_like(tensors[name])
        tensors["buffer"][1] += 1e-6
        optimizer.step()
        assert pair.changed() > 1
    assert pair.recalled == []
    assert pair.detector.report.copied_bytes == 50 * 2 + 8 * 4


def test_a_large_tensor_that_nobody_optimizes_stands_still_until_it_moves() -> None:
    tensors = {"w": torch.nn.Parameter(torch.randn(30)), "frozen": torch.randn(100, 100)}
    optimizer = torch.optim.AdamW([tensors["w"]], lr=1e-2)
    pair = SideBySide(tensors, optimizer)
    assert pair.detector.report.copied_bytes == 0
    pair.publish()
    tensors["frozen"][5] = 1
    assert (pair.changed(), pair.recalled) == (100, ["frozen"])
    tensors["frozen"][6] = 1
    assert (pair.changed(), pair.recalled) == (100, ["frozen"])
    assert pair.detector.report.copied_bytes == 20_000


def test_a_parameter_that_joins_the_optimizer_is_recovered_from_then_on() -> None:
    late = torch.nn.Parameter(torch.randn(100, 100) * 0.02)
    tensors = {**parameters(), "late": late}
    optimizer = torch.optim.AdamW([tensors["a"], tensors["b"], tensors["c"]], lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [late], "lr": 1e-2})
        gradients.give()
        optimizer.step()
        pair.publish()
    assert pair.recalled == []
    assert pair.detector.report.copied_bytes == 0


def test_parameters_that_leave_the_optimizer_stand_still_and_may_come_back() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW([{"params": [t]} for t in tensors.values()], lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)

    def step() -> None:
        gradients.give()
        optimizer.step()

    step()
    left = optimizer.param_groups.pop()
    pair.publish()
    step()
    step()
    pair.publish()
    optimizer.add_param_group(left)
    step()
    left = optimizer.param_groups.pop(0)  # the others' numbers change
    step()
    pair.publish()
    step()
    optimizer.add_param_group(left)
    step()
    pair.publish()
    assert pair.recalled == []
    assert pair.detector.report.copied_bytes == 0


def test_groups_that_change_places_keep_their_options() -> None:
    tensors = parameters()
    groups = [{"params": [t], "lr": 10.0**-n} for n, t in enumerate(tensors.values(), 3)]
    optimizer = torch.optim.AdamW(groups)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for _ in range(4):
        gradients.give()
        optimizer.step()
        optimizer.param_groups.reverse()
        pair.publish()
    assert pair.recalled == []


def test_a_negative_learning_rate_is_outside_the_bound() -> None:
    run = Training()
    run.optimizer.param_groups[0]["lr"] = -1e-4
    run.step()
    assert run.recalled() == ["a", "b", "c"]
    run.optimizer.param_groups[0]["lr"] = 1e-4
    run.step()
    assert run.recalled() == []


def test_a_step_that_fails_halfway() -> None:
    run = Training(foreach=False)
    run.step()
    run.pair.publish()
    kept = run.state("b").pop("exp_avg")
    with pytest.raises(KeyError, match="exp_avg"):
        run.step()  # "a" has stepped then, "b" and "c" haven't
    run.state("b")["exp_avg"] = kept
    run.step()
    assert run.recalled() == []


@pytest.mark.parametrize("steps", [1, 2])
def test_a_parameter_that_is_given_other_memory(steps: int) -> None:
    run = Training()
    run.step()
    run.pair.publish()
    run.tensors["a"].data = run.tensors["a"].data.clone()
    for _ in range(steps):
        run.step()
    # It is looked for at a publish: a step that another one followed is over by then.
    assert run.recalled() == (["a"] if steps == 2 else [])
    run.step()
    assert run.recalled() == []


def test_parameters_that_share_memory_are_kept_as_a_copy() -> None:
    first = torch.nn.Parameter(torch.randn(20, 20))
    second = torch.nn.Parameter(first.data[:5])
    optimizer = torch.optim.AdamW([first, second], lr=1e-3)
    pair = SideBySide({"first": first}, optimizer)
    for _ in range(2):
        first.grad, second.grad = torch.randn(20, 20), torch.randn(5, 20)
        optimizer.step()
        pair.publish()
    assert (pair.recalled, pair.detector.report.copied_bytes) == ([], 800)


def refuse(error: Exception) -> Callable[..., SomeWeights]:
    def read_back(names: object) -> SomeWeights:
        raise error

    return read_back


def test_nothing_moves_while_the_kept_state_cannot_be_read() -> None:
    run = Training()
    held = run.pair.detector._watch
    assert held is not None
    working = run.pair.read_back
    run.step()
    run.tensors["a"].data[0] = 5
    run.pair.detector._recall = refuse(RegistryUnavailable("away"))
    for _ in range(2):
        with pytest.raises(RegistryUnavailable, match="away"):
            run.pair.detector.capture(run.pair.live())
        run.step()
    run.pair.detector._recall = None
    with pytest.raises(PublishError, match="what changed in 1 tensors isn't known"):
        run.pair.detector.capture(run.pair.live())
    run.pair.detector._recall = working
    assert run.recalled() == ["a"]


def test_what_is_read_back_must_be_the_kept_state() -> None:
    run = Training()
    working = run.pair.read_back
    run.step()
    run.tensors["a"].data[0] = 5

    def wrong(names: list[str]) -> SomeWeights:
        weights = working(names)
        weights.bits("a")[3] ^= 1
        return weights  # type: ignore[return-value]

    run.pair.detector._recall = wrong
    with pytest.raises(FingerprintMismatch, match="read back of a isn't the state"):
        run.pair.detector.capture(run.pair.live())
    run.pair.detector._recall = working
    assert run.recalled() == ["a"]


def test_much_is_read_back_in_parts_and_nothing_moves_until_all_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Training()
    run.step()
    for tensor in run.tensors.values():
        tensor.data.mul_(0.5)
    working, parts = run.pair.read_back, []

    def read_back(names: list[str]) -> SomeWeights:
        weights = working(names)
        parts.append(list(names))
        if len(parts) == 2:
            weights.bits(names[0])[0] ^= 1
        return weights  # type: ignore[return-value]

    monkeypatch.setattr("plait_trainer.partial_weights._PART_BYTES", 2 * 33 + 2 * 385)
    run.pair.detector._recall = read_back
    with pytest.raises(FingerprintMismatch, match="read back of b isn't the state"):
        run.pair.detector.capture(run.pair.live())
    assert parts == [["a"], ["b", "c"]]
    run.pair.publish()
    assert parts[2:] == [["a"], ["b", "c"]]
    run.step()
    assert run.recalled() == []


def test_an_observation_that_fails_keeps_the_step_from_happening() -> None:
    run = Training()
    held = run.pair.detector._watch
    assert held is not None
    run.step()
    live = held.live
    held.live = {}
    before = {name: tensor.clone() for name, tensor in run.tensors.items()}
    with pytest.raises(KeyError):
        run.step()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in before.items())
    held.live = live
    run.step()
    assert run.recalled() == []


def test_an_observation_that_was_cut_short_is_noticed() -> None:
    run = Training()
    run.step()
    run.step()
    held = run.pair.detector._watch
    assert held is not None
    tracked = held.tracked["c"]
    tracked.at = replace(tracked.at, deltas={})
    assert run.recalled() == ["c"]
