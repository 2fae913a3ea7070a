"""Reconstruction: whether it is exact, what it holds, and what it takes, beside a snapshot."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from benchmarks.report import Section
from benchmarks.timing import memory_given_back, resident_peak
from benchmarks.workload import shapes
from plait.cut import plain_cut
from plait.grain import SlottedCut
from plait.layout import Layout
from plait_trainer.boundary_log import LogWriter
from plait_trainer.inversion import Inversion, Options, error_offset
from plait_trainer.live import TensorView, layout_of
from plait_trainer.optimized import Place
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.share import Share
from plait_trainer.snapshot import SnapshotDetector
from plait_trainer.tracked import Pass, Room

_ELEMENTS: Final = 1 << 22
_STEPS: Final = 20
_TIMED_STEPS: Final = 4
_LEARNING_RATE: Final = 5e-7
_BF16_BYTES_OF_QWEN3: Final = 2 * 596_049_920  # Qwen3-0.6B, its embedding tied

Schedule: TypeAlias = Callable[[int], float]
Detecting: TypeAlias = ReconstructionDetector | SnapshotDetector


def _constant(learning_rate: float) -> Schedule:
    return lambda _: learning_rate


def _warm_up(step: int) -> float:
    """From 0 to 1e-4."""
    return 1e-4 * step / (_STEPS - 1)


@dataclass(frozen=True)
class Variant:
    """Optimizer steps to be taken back."""

    name: str
    options: dict[str, Any]
    learning_rate: Schedule = field(default_factory=lambda: _constant(1e-6))
    optimizer: type[torch.optim.Adam] = torch.optim.AdamW
    dtype: torch.dtype = torch.bfloat16


_SINGLE: Final = {"foreach": False, "fused": False}
_FOREACH: Final = {"foreach": True}
_FUSED: Final = {"fused": True}
_SHORT: Final = {"betas": (0.9, 0.95)}
_VARIANTS: Final = (
    Variant("AdamW, single, 1e-6", {**_SINGLE, **_SHORT}),
    Variant("AdamW, foreach, 5e-6", _FOREACH, _constant(5e-6)),
    Variant("AdamW, fused, 1e-6", _FUSED),
    Variant("AdamW, fused, 1e-4", _FUSED, _constant(1e-4)),
    Variant("AdamW, single, 1e-3", _SINGLE, _constant(1e-3)),
    Variant("AdamW, lr·wd 0.3", {**_FUSED, "weight_decay": 3e5}),
    Variant("AdamW, amsgrad", {**_FUSED, **_SHORT, "amsgrad": True}),
    Variant("AdamW, maximize", {**_FOREACH, "maximize": True}),
    Variant("Adam, L2", {**_FUSED, "weight_decay": 0.1}, optimizer=torch.optim.Adam),
    Variant("AdamW, FP16 published", _FUSED, dtype=torch.float16),
    Variant("warm-up 0 → 1e-4, fused", _FUSED, _warm_up),
    Variant("warm-up 0 → 1e-4, foreach", {**_FOREACH, **_SHORT}, _warm_up),
)


def reconstruction_sections() -> list[Section]:
    return [_exactness(), _costs()]


def _exactness() -> Section:
    rows, elements, wrong = [], 0, 0
    for variant in _VARIANTS:
        plain, logged, entries, checked = _run(variant)
        elements, wrong = elements + checked, wrong + logged
        rows.append(
            [
                variant.name,
                f"{checked:,}",
                f"{plain}",
                f"{logged}",
                f"{entries / checked:.2e}",
                f"{4 * entries / checked:.2e} B",
            ]
        )
    rows.append(["together", f"{elements:,}", "", f"{wrong}", "", ""])
    return Section(
        "Reconstruction against a stored copy",
        f"{_STEPS} real steps of {_ELEMENTS:,} elements each (a hundredth of them tiny, some "
        "zero); the bits before each step recovered from the optimizer's state and compared with a "
        "copy of them, without the boundary log and with it.",
        ["steps", "element-steps", "wrong without log", "wrong with log", "logged",
         "log per element"],
        rows,
    )  # fmt: skip


def _run(variant: Variant) -> tuple[int, int, int, int]:
    """Wrong without the log, wrong with it, entries of the logs, elements: over all steps."""
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(_ELEMENTS, generator=random) * 0.02
    weights[: _ELEMENTS // 100] *= 1e-4
    weights[_ELEMENTS // 100 :][:1000] = 0
    parameter = torch.nn.Parameter(weights)
    optimizer = variant.optimizer([parameter], lr=0.0, **variant.options)
    drift = torch.randn(_ELEMENTS, generator=random) * 0.3
    place = Place(parameter, parameter.detach(), variant.dtype)
    live, room = TensorView("w", parameter.detach(), variant.dtype), Room()
    wrong_plain = wrong_logged = entries = 0
    for step in range(1, _STEPS + 1):
        noise = torch.randn(_ELEMENTS, generator=random)
        parameter.grad = (drift + noise).mul_(noise.roll(1).exp_()).mul_(1e-3)
        optimizer.param_groups[0]["lr"] = variant.learning_rate(step - 1)
        options = Options.of(optimizer.param_groups[0])
        writer = LogWriter(_ELEMENTS, error_offset(options, step))
        _, true = Pass(live, place=place, writer=writer).read(0, _ELEMENTS, room)
        optimizer.step()
        moments = place.moments(optimizer.state[parameter], amsgrad=options.amsgrad)
        assert not isinstance(moments, str)
        back = Pass(live, place=place, inversion=Inversion.of(options, step), moments=moments)
        found, _ = back.read(0, _ELEMENTS, room)
        assert back.problem is None, back.problem
        wrong_plain += int(np.count_nonzero(found != true))
        log = writer.log()
        log.correct(0, found)
        wrong_logged += int(np.count_nonzero(found != true))
        entries += log.entries
    return wrong_plain, wrong_logged, entries, _STEPS * _ELEMENTS


def _costs() -> Section:
    torch.manual_seed(1)
    tensors = {n: torch.nn.Parameter(torch.randn(shape) * 0.02) for n, shape in shapes().items()}
    optimizer = torch.optim.AdamW(tensors.values(), lr=_LEARNING_RATE, fused=True)
    for tensor in tensors.values():
        tensor.grad = torch.randn_like(tensor) * 1e-3
    for _ in range(3):
        optimizer.step()
    steps = []
    for options in (_FUSED, _FOREACH):
        own = torch.optim.AdamW(tensors.values(), lr=0.0, **options)  # type: ignore[arg-type]
        own.step()
        steps.append(min(_seconds(own.step) for _ in range(_TIMED_STEPS)))
        del own
    small = {"warm-up": torch.nn.Parameter(torch.zeros(8))}
    rows = []
    for make in (ReconstructionDetector, SnapshotDetector):
        _measured(make, small, torch.optim.AdamW(small.values()))  # compiles what it takes
        cost = _measured(make, tensors, optimizer)
        whole = cost.kept / cost.dense + cost.room / _BF16_BYTES_OF_QWEN3
        rows.append(
            [
                make.__name__,
                f"{cost.kept / cost.dense:.3%}",
                f"{cost.room / 1e6:.1f} MB",
                f"{whole:.2%}",
                f"{cost.delta / cost.dense:.2%}",
                *(f"{cost.seconds / each:.2f}" for each in steps),
            ]
        )
    elements = sum(tensor.numel() for tensor in tensors.values())
    return Section(
        "What a detector holds and takes",
        "Qwen3-0.6B's matrices in 3 of its 28 layers and an eighth of its vocabulary: "
        f"{elements:,} "
        f"FP32 masters, published as BF16, AdamW at {_LEARNING_RATE:g}. Shares are of the model's "
        "BF16 bytes. What is kept between steps grows with the model; the room that passes work "
        "in doesn't: how far resident memory rose beyond what is kept, and beyond the delta, "
        "which is held twice until it is handed over; not what the allocator holds for later. "
        "At full size: both, over all of Qwen3-0.6B. "
        "Time of a capture in units of the optimizer's own step, wall clock, best of "
        f"{_TIMED_STEPS}, one thread for the detector and {torch.get_num_threads()} for the step.",
        ["detector", "kept", "room", "kept + room at full size", "delta", "of a fused step",
         "of a foreach step"],
        rows,
    )  # fmt: skip


@dataclass(frozen=True)
class _Cost:
    """Bytes, and seconds of a capture."""

    dense: int
    kept: int
    room: int
    delta: int
    seconds: float


def _measured(
    make: Callable[[], Detecting],
    tensors: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> _Cost:
    """Of one detector that is timed, and of another one whose memory is measured."""
    timed, detector = make(), make()
    seconds, _, _ = _captured(timed, tensors, optimizer)
    timed.close()
    with memory_given_back() as before:
        _, sizes, layout = _captured(detector, tensors, optimizer)
        rose = resident_peak() - before
    kept = layout.dense_bytes
    if isinstance(detector, ReconstructionDetector):
        kept = detector.report.log_bytes + detector.report.copied_bytes
    detector.close()
    room = max(rose - kept - 2 * max(sizes), 0)
    return _Cost(layout.dense_bytes, kept, room, max(sizes), min(seconds[1:]))


def _captured(
    detector: Detecting,
    tensors: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> tuple[list[float], list[int], Layout]:
    """Attaches, and captures a few steps: seconds of each, and bytes of its delta."""
    live = {n: TensorView(n, p.detach(), torch.bfloat16) for n, p in tensors.items()}
    layout = layout_of(live.values())
    cut = plain_cut(layout, for_anchor=False)
    share = Share.whole(layout, SlottedCut(cut, (0,) * len(cut.frames)))
    detector.attach(live, share, optimizer=optimizer)
    seconds, sizes = [], []
    for _ in range(_TIMED_STEPS + 1):
        optimizer.step()
        started = time.perf_counter()
        capture = detector.capture(live)
        seconds.append(time.perf_counter() - started)
        deltas = capture.deltas.values()
        sizes.append(sum(d.positions.nbytes + d.differences.nbytes for d in deltas))
        detector.keep(capture)
        del capture, deltas  # the next one is made when this one has been handed over
    return seconds, sizes, layout


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
