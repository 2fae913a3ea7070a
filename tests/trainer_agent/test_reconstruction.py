"""Reconstruction equals a stored copy, bit for bit, whatever the optimizer's options."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PublishError, UsageError
from plait.grain import grain_cut
from plait.layout import Layout, TensorSpec
from plait_trainer.boundary_log import near_boundary
from plait_trainer.inversion import Inversion, Moments, Options, error_offset
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.share import Share
from tests.trainer_agent.side_by_side import Gradients, SideBySide, parameters

WAYS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def run(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 6,
    dtype: torch.dtype = torch.bfloat16,
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda *_: None,
    **options: Any,
) -> SideBySide:
    """A run that publishes every step, of which nothing may have to be read back."""
    tensors = parameters()
    optimizer = optimizer_class(tensors.values(), **{"lr": 1e-5, **options})
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer, dtype)
    for step in range(steps):
        gradients.give()
        before_step(optimizer, step)
        optimizer.step()
        pair.publish()
    assert pair.recalled == []
    assert pair.detector.report.recovered == steps * len(tensors)
    return pair


@pytest.fixture(params=["compiled", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute: in CPU memory, and on any device."""
    if request.param == "torch":
        for module in ("inversion", "boundary_log"):
            monkeypatch.setattr(f"plait_trainer.{module}.is_compiled", lambda tensor: False)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-4, 1e-2])
def test_adamw_is_taken_back_exactly(way: str, lr: float) -> None:
    run(lr=lr, weight_decay=0.1, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"betas": (0.9, 0.95)},
        {"betas": (0.0, 0.999)},
        {"betas": (0.5, 0.2501), "lr": 1e-3},
        {"eps": 1e-15},
        {"eps": 1e-3},
        {"weight_decay": 4e3, "lr": 1e-4},
    ],
)
def test_each_option_is_covered(way: str, options: dict[str, Any]) -> None:
    run(**options, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"decoupled_weight_decay": True},
        {"decoupled_weight_decay": True, "amsgrad": True},
    ],
)
def test_adam_with_decay_in_the_gradient_or_beside_it(way: str, options: dict[str, Any]) -> None:
    run(torch.optim.Adam, weight_decay=0.1, **options, **WAYS[way])


@pytest.mark.parametrize("way", ["single", "foreach"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"lr": 1e-2},
        {"lr": torch.tensor(1e-4)},
        {"betas": (0.9, 0.95), "amsgrad": True, "maximize": True},
    ],
)
def test_capturable_steps(
    way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch offers them on devices alone, but computes them anywhere.
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    run(capturable=True, weight_decay=0.1, steps=12, **options, **WAYS[way])


def test_a_step_with_a_closure() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)

    def closure() -> float:
        gradients.give()
        return 1.0

    for _ in range(4):
        optimizer.step(closure)
        assert pair.changed() > 0
    assert pair.recalled == []


def test_another_default_dtype_changes_nothing() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients = Gradients(tensors)
    torch.set_default_dtype(torch.bfloat16)
    try:
        pair = SideBySide(tensors, optimizer)
        torch.set_default_dtype(torch.float32)
        gradients.give()
        torch.set_default_dtype(torch.bfloat16)
        optimizer.step()
        assert pair.changed() > 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert pair.recalled == []


@pytest.mark.parametrize("bound", [-1e-4, math.inf, math.nan])
def test_a_bound_that_bounds_nothing_is_refused(bound: float) -> None:
    with pytest.raises(UsageError, match="a learning rate bound of"):
        ReconstructionDetector(learning_rate_bound=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_published_dtype(dtype: torch.dtype) -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer, dtype)
    for _ in range(4):
        gradients.give()
        optimizer.step()
        assert pair.changed() > 0
    assert pair.recalled == []
    copied = sum(p.numel() * 4 for p in tensors.values()) if dtype == torch.float32 else 0
    assert pair.detector.report.copied_bytes == copied


def test_tensors_as_options() -> None:
    run(lr=torch.tensor(1e-4), foreach=False, fused=False, weight_decay=0.1)
    run(lr=torch.tensor(1e-4), fused=True)
    beta = torch.tensor(0.9), torch.tensor(0.999)
    run(lr=torch.tensor(1e-4), betas=beta, foreach=False, fused=False)


def test_groups_have_options_of_their_own() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(
        [
            {"params": [tensors["a"]], "lr": 1e-5, "weight_decay": 0.0},
            {"params": [tensors["b"]], "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": [tensors["c"]], "amsgrad": True, "maximize": True, "eps": 1e-6},
        ],
        lr=1e-4,
    )
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for _ in range(5):
        gradients.give()
        optimizer.step()
        pair.publish()
    assert pair.recalled == []


@pytest.mark.parametrize("published", ["before the scheduler steps", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_warm_up_from_nothing_is_exact(way: str, published: str) -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4, **WAYS[way])
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 8, 1.0))
    assert optimizer.param_groups[0]["lr"] == 0
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for _ in range(12):
        gradients.give()
        optimizer.step()
        if published == "after":
            warm_up.step()  # as loops do: the step was made with the rate before
            pair.publish()
        else:
            pair.publish()
            warm_up.step()  # to a rate above the one that the log was made at
    assert pair.recalled == []
    assert pair.detector.report.logged_again == 0  # the scheduler's initial_lr is the bound


def test_a_warm_up_by_hand_makes_the_log_anew_where_it_outruns_it() -> None:
    def raise_it(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-4 * step / 8

    pair = run(lr=0.0, steps=10, before_step=raise_it)
    assert 0 < pair.detector.report.logged_again <= 5 * 3  # it doubles: not at every step


def test_a_declared_bound_spares_the_extra_passes() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=0.0)
    gradients = Gradients(tensors)
    pair = SideBySide(tensors, optimizer, learning_rate_bound=1e-4)
    for step in range(8):
        gradients.give()
        optimizer.param_groups[0]["lr"] = 1e-4 * step / 8
        optimizer.step()
        pair.publish()
    assert (pair.recalled, pair.detector.report.logged_again) == ([], 0)


def test_a_cosine_schedule_is_exact() -> None:
    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = 5e-5 * (1 + math.cos(step / 3))
        group["weight_decay"] = 0.1 * step

    run(lr=1e-4, steps=10, before_step=change)


def test_several_steps_of_one_publish_are_their_sum() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for steps in (1, 3, 0, 5):
        for _ in range(steps):
            gradients.give(without=["b"] if steps == 3 else [])
            optimizer.step()
        pair.publish()
    assert pair.recalled == []


def test_a_capture_that_nobody_took_over_is_made_again() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for _ in range(3):
        gradients.give()
        optimizer.step()
        first, second = pair.publish(keep=False), pair.publish(keep=False)
        assert first.fingerprint == second.fingerprint
        gradients.give()
        optimizer.step()
        pair.publish()
    assert pair.recalled == []


def test_steps_that_begin_before_a_capture_is_kept_belong_to_the_next() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for steps in (1, 2, 3):
        gradients.give()
        optimizer.step()
        found, wanted = pair.detector.capture(pair.live()), pair.snapshot.capture(pair.live())
        for _ in range(steps):
            gradients.give(without=["b"])
            optimizer.step()
        pair.detector.keep(found)
        pair.snapshot.keep(wanted)
        pair.publish()
    assert pair.recalled == []


def test_parameters_without_gradients_and_frozen_ones_stand_still() -> None:
    tensors = parameters()
    tensors["b"].requires_grad_(False)
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for step in range(6):
        gradients.give(without=["b", "c"] if step % 2 else ["b"])
        optimizer.step()
        pair.publish()
    assert pair.recalled == []
    assert pair.detector.report.recovered == 6 + 3


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_run_of_steps_and_publishes_is_exact(data: st.DataObject) -> None:
    exponents = st.floats(-9, -1)
    options = {
        "lr": 10 ** data.draw(exponents),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "betas": data.draw(st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.7, 0.5)])),
        "eps": 10 ** data.draw(st.floats(-15, -3)),
        "amsgrad": data.draw(st.booleans()),
        "maximize": data.draw(st.booleans()),
        **WAYS[data.draw(st.sampled_from(sorted(WAYS)))],
    }
    tensors = parameters(data.draw(st.integers(0, 99)), a=(3, 50), b=(), c=(40,))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor *= 10 ** data.draw(st.floats(-8, 8))
    optimizer = torch.optim.AdamW(tensors.values(), **options)
    gradients, pair = Gradients(tensors, data.draw(st.integers(0, 99))), None
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    pair = SideBySide(tensors, optimizer, dtype)
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 3))):
            gradients.give(without=[n for n in tensors if data.draw(st.booleans())])
            optimizer.step()
        pair.publish()
    assert pair.recalled == []


@pytest.mark.usefixtures("loops")
def test_huge_tiny_zero_and_subnormal_weights() -> None:
    extremes = [3e38, -3e38, 6.5e4, 1e-38, 1e-45, -1e-45, 0.0, -0.0, 1e-30, 1.0, 0.00390625]
    values = torch.tensor(extremes).repeat(40)
    for lr, dtype in ((1e-6, torch.bfloat16), (1e-3, torch.float16), (0.0, torch.bfloat16)):
        tensors = {"w": torch.nn.Parameter(values.clone())}
        optimizer = torch.optim.AdamW(tensors.values(), lr=lr, weight_decay=0.1)
        gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer, dtype)
        for _ in range(4):
            gradients.give()
            optimizer.step()
            pair.publish()
        assert pair.recalled == []


def test_gradients_that_underflow_when_squared() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-3)
    pair = SideBySide(tensors, optimizer)
    for step in range(4):
        for tensor in tensors.values():
            tensor.grad = torch.randn_like(tensor) * 10.0 ** -(18 + 6 * step)
        optimizer.step()
        pair.publish()
    assert pair.recalled == []


def test_strided_parameters_and_views_of_parameters() -> None:
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.randn(4, 6, 50) * 0.02)
    turned = torch.nn.Parameter((torch.randn(70, 30) * 0.02).t())
    fused = torch.nn.Parameter(torch.randn(24, 40) * 0.02)
    sparse = torch.nn.Parameter((torch.randn(40, 40) * 0.02)[::2, ::2])
    own = {"stacked": stacked, "turned": turned, "fused": fused, "sparse": sparse}
    optimizer = torch.optim.AdamW(own.values(), lr=1e-4, foreach=False)
    blocks = fused.view(2, 3, 4, 40)
    views = {
        **{f"expert.{number}": stacked[number].t() for number in range(4)},
        "turned": turned,
        "q": blocks[:, :2],
        "k": blocks[:, 2],
        "sparse": sparse,
    }
    gradients, pair = Gradients(own), SideBySide(views, optimizer)
    for _ in range(5):
        gradients.give()
        optimizer.step()
        assert pair.changed() > 0
    assert pair.recalled == []
    assert pair.detector.report.copied_bytes == 0


def test_part_of_a_parameter_with_gaps_is_kept_as_a_copy() -> None:
    sparse = torch.nn.Parameter((torch.randn(40, 40) * 0.02)[::2, ::2])
    optimizer = torch.optim.AdamW([sparse], lr=1e-4)
    own = {"sparse": sparse}
    gradients, pair = Gradients(own), SideBySide({"half": sparse[:10]}, optimizer)
    for _ in range(2):
        gradients.give()
        optimizer.step()
        assert pair.changed() > 0
    assert (pair.recalled, pair.detector.report.copied_bytes) == ([], 10 * 20 * 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_a_scaler_skips_changes_nothing(way: str) -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4, **WAYS[way])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pair = SideBySide(tensors, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = torch.stack([(t * torch.randn_like(t)).sum() for t in tensors.values()]).sum()
        scaler.scale(loss * (math.inf if step % 2 else 1e-3)).backward()
        scaler.step(optimizer)  # a fused one is called even then, and told of it
        scaler.update()
        assert (pair.changed() > 0) == (step % 2 == 0)
    assert pair.recalled == []


def test_a_base_other_than_the_live_weights_is_the_first_difference() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-3)
    extra = {"buffer": torch.zeros(9)}
    gradients = Gradients(tensors)
    before = SideBySide({**tensors, **extra}, optimizer)
    base = before.snapshot.captured
    gradients.give()
    optimizer.step()
    extra["buffer"][3] = 1
    pair = SideBySide({**tensors, **extra}, optimizer, base=base)
    gradients.give()
    optimizer.step()
    assert pair.changed() > 1000
    gradients.give()
    optimizer.step()
    pair.publish()
    assert pair.recalled == []


def test_several_threads_find_the_same() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer, threads=3)
    for _ in range(3):
        gradients.give()
        optimizer.step()
        pair.publish()
    assert pair.recalled == []


def test_tensors_of_many_blocks_and_columns_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait_trainer.watch._CPU_BLOCK", 50_000)
    shapes = {"q_proj.weight": (400, 700), "down_proj.weight": (700, 400), "o.weight": (3, 70_001)}
    tensors = parameters(2, **shapes)
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-4)
    layout = Layout.of(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())
    share = Share.whole(layout, grain_cut(layout, for_anchor=False))
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer, share=share)
    for steps in (1, 2):
        for _ in range(steps):
            gradients.give()
            optimizer.step()
        assert len(pair.publish().deltas) > 3
    assert pair.recalled == []
    assert pair.detector.report.log_entries > 100


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("lr", [1e-30, 3e-38])
def test_a_processor_that_flushes_subnormals_to_zero(lr: float, alike: bool) -> None:
    tensors = {"w": torch.nn.Parameter(torch.randn(4000) * 1e-36)}
    optimizer = torch.optim.AdamW(tensors.values(), lr=lr, foreach=False)
    gradients, pair = Gradients(tensors), SideBySide(tensors, optimizer)
    for step in range(4):
        gradients.give()
        assert tensors["w"].grad is not None
        tensors["w"].grad *= 10.0 ** (-9 * step)
        # A thread's own setting: others, which take the step back, may have another.
        if not torch.set_flush_denormal(True):
            pytest.fail("this processor can't flush subnormals, which the bound's last term is for")
        try:
            optimizer.step()
            if alike:
                pair.publish()
        finally:
            torch.set_flush_denormal(False)
        pair.publish()
    assert pair.recalled == []


def test_the_log_is_small() -> None:
    tensors = {"w": torch.nn.Parameter(torch.randn(1 << 20) * 0.02)}
    optimizer = torch.optim.AdamW(tensors.values(), lr=5e-6)
    pair = SideBySide(tensors, optimizer)
    report = pair.detector.report
    assert 0 < report.log_entries < tensors["w"].numel() / 2000
    assert report.log_bytes < tensors["w"].numel() * 2 / 500
    assert report.copied_bytes == 0


def test_the_compiled_loops_do_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights = torch.randn(5000) * 0.02 * torch.randn(5000).mul(9).exp()
    weights[:7] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, 3.4e38])
    weights.view(torch.int32)[7] = 0x7FFFFFFF  # a NaN that would be rounded to a zero
    moments = Moments(torch.randn(5000) * 1e-3, torch.rand(5000) * 1e-6)
    options = Options(1e-4, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, inexact=False)
    found = []
    for compiled in (True, False):
        for module in ("inversion", "boundary_log"):
            monkeypatch.setattr(f"plait_trainer.{module}.is_compiled", lambda _, c=compiled: c)
        room = torch.empty(2, 5000)
        recovered, largest = Inversion.of(options, 3).recover(weights, moments, torch.empty(5000))
        near = near_boundary(weights, error_offset(options, 3), torch.bfloat16, room)
        found.append((recovered, largest, near))
    (recovered, largest, near), (by_torch, largest_by_torch, near_by_torch) = found
    torch.testing.assert_close(recovered, by_torch, rtol=3e-7, atol=1e-9, equal_nan=True)
    assert largest == pytest.approx(largest_by_torch, rel=1e-6)
    assert near.tolist() == near_by_torch.tolist()
    assert {0, 1, 2, 3, 4, 7} <= set(near.tolist())
    moments.first[9] = math.nan
    recovered, largest = Inversion.of(options, 3).recover(weights, moments, torch.empty(5000))
    assert math.isnan(largest)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-3), "a SGD isn't torch's AdamW or Adam"),
        (lambda p: torch.optim.NAdam(p), "a NAdam isn't"),
        (lambda p: torch.optim.AdamW(p, betas=(0.99, 0.98)), "beta1² isn't below beta2"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "group 0 is differentiable"),
    ],
)
def test_what_cannot_be_taken_back_is_refused_in_words(make: Any, why: str) -> None:
    tensors = parameters()
    with pytest.raises(PublishError, match=why):
        SideBySide(tensors, make(tensors.values()))


def test_no_optimizer_is_refused_and_so_is_a_capture_without_attaching() -> None:
    with pytest.raises(PublishError, match="isn't attached"):
        ReconstructionDetector().capture({})
    tensors = parameters()
    pair = SideBySide(tensors, torch.optim.AdamW(tensors.values()))
    with pytest.raises(PublishError, match="there is no optimizer"):
        pair.detector.attach(pair.live(), pair.share)
    with pytest.raises(PublishError, match="isn't attached"):
        pair.detector.capture(pair.live())


def test_hooks_go_when_it_closes_and_when_it_attaches_again() -> None:
    tensors = parameters()
    optimizer = torch.optim.AdamW(tensors.values())
    pair = SideBySide(tensors, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    pair.detector.attach(pair.live(), pair.share, optimizer=optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    pair.detector.close()
    pair.detector.close()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    Gradients(tensors).give()
    optimizer.step()
