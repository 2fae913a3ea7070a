"""The reconstruction detector: no copy of the weights, exact all the same.

The bits before a step are recovered from the optimizer's own state while it streams through the
model; those that could come out otherwise lie in a boundary log, made in the same pass. What was
found is proven tensor by tensor against the retained fingerprint; a tensor that fails, or that lies
outside what the error bound assumes, is read back from what was committed, and reported. Derivation
and limits: docs/reconstruction.md.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from plait.codec.algebra import add, apply
from plait.errors import FingerprintMismatch, PublishError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import TensorSpec
from plait.weights import Weights
from plait_trainer.boundary_log import LogWriter
from plait_trainer.comparing import TensorChange, compare_share, deltas_of
from plait_trainer.deltas import Deltas, add_up
from plait_trainer.detector import Capture, LiveTensors, ReadBack
from plait_trainer.inversion import Inversion, Options, error_offset, why_unbounded
from plait_trainer.optimized import (
    find_places,
    is_optimized,
    optimized_memory,
    refusal,
    steps_taken,
    unwrapped_optimizer,
)
from plait_trainer.partial_weights import LiveWeights, SomeWeights
from plait_trainer.share import Share
from plait_trainer.tracked import Begun, Observed, Pass, Room, Tracked

logger = logging.getLogger("plait.trainer")

# Compared at once: of the bits made here, small enough to stay in a cache; a device wants more.
_CPU_BLOCK: Final = 1 << 18

# A tensor of unknown origin is copied up to this size; a larger one is taken to stand still.
_COPIED_ITEMS: Final = 1 << 12


@dataclass
class ReconstructionReport:
    """What a detector did since it was made, in tensors unless it says otherwise.

    Attributes:
        recovered: passes in which a tensor's step was taken back.
        logged_again: passes before a step that exceeded what the log was made for.
        read_back: whose kept state had to be read from the registry.
        log_entries, log_bytes: of the boundary logs of now.
        copied_bytes: kept of tensors that can't be recovered.
    """

    recovered: int = 0
    logged_again: int = 0
    read_back: int = 0
    log_entries: int = 0
    log_bytes: int = 0
    copied_bytes: int = 0


@dataclass(eq=False)
class _Attached:
    """What an attached detector knows.

    Attributes:
        parameters: how many the optimizer has.
        stepped: a step has begun since the last observation.
        bounds: learning rates that the log is made for where a step outran its bound, by group.
        excess: factor by which updates exceed what the group's gradients lead to, where they do:
            moments that were loaded, or made under other betas.
    """

    share: Share
    live: LiveTensors
    optimizer: torch.optim.Optimizer
    read_back: ReadBack | None
    tracked: dict[str, Tracked]
    parameters: int
    bounds: dict[int, float] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)
    stepped: bool = False
    hook: RemovableHandle | None = None


class ReconstructionDetector:
    """Recovers the bits before each step of torch's AdamW or Adam from its moments.

    Args:
        learning_rate_bound: no step will have a larger one; where a step does, or none is given and
            it grows beyond the present and the scheduler's initial one, a pass over the weights
            before that step makes the log anew.
        threads: that look at tensors at the same time; more than one is for weights in CPU memory.

    Attributes:
        report: counters.
    """

    def __init__(self, *, learning_rate_bound: float | None = None, threads: int = 1) -> None:
        self.report = ReconstructionReport()
        self._bound = learning_rate_bound or 0.0
        self._threads = threads
        self._room = Room()
        self._attached: _Attached | None = None

    @property
    def keeps_copy(self) -> bool:
        return False

    @property
    def captured(self) -> Weights:
        held = self._held()
        return LiveWeights(held.share.local, held.live)

    # The port -----------------------------------------------------------------------------------

    def attach(
        self,
        live: LiveTensors,
        share: Share,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        read_back: ReadBack | None = None,
    ) -> Fingerprint:
        """As the port says.

        Raises:
            PublishError: no optimizer, one that isn't torch's AdamW or Adam, or betas under which
                nothing bounds an update.
        """
        optimizer = unwrapped_optimizer(optimizer)
        if optimizer is None or (why := refusal(optimizer)):
            why = "there is no optimizer" if optimizer is None else why
            raise PublishError(
                f"weights can't be reconstructed: {why}",
                remedy="use a SnapshotDetector, which works with any optimizer",
            )
        if base is not None:
            share.local.require_equal(base.layout, what="the base")
        places, memory = find_places(live, optimizer), optimized_memory(optimizer)
        tracked = {}
        for spec in share.local.tensors:
            tensor, copy = live[spec.name], None
            small = read_back is None or spec.items <= _COPIED_ITEMS
            if spec.name not in places and (small or is_optimized(tensor, memory)):
                copy = np.array(
                    tensor.bits(0, spec.items) if base is None else base.bits(spec.name)
                )
            tracked[spec.name] = Tracked(
                spec.name, places.get(spec.name), copy, ZERO, Observed(ZERO, {})
            )
        held = _Attached(share, live, optimizer, read_back, tracked, _parameters(optimizer))
        counts = steps_taken(optimizer, (t.place for t in tracked.values()))
        passes = {
            t.name: self._with_log(
                held, t, Pass(live[t.name], None if base is None else base.bits(t.name)), counts
            )
            for t in tracked.values()
        }
        for change in self._compare(held, passes):
            self._start_from(held, tracked[change.name], change, passes[change.name])
        self.close()
        self._attached = held
        held.hook = optimizer.register_step_pre_hook(self._before_step)
        self._count()
        self._log_kinds(held)
        return sum((t.kept for t in tracked.values()), ZERO)

    def capture(self, live: LiveTensors) -> Capture:
        held = self._held()
        held.live = live
        self._find_again(held)
        self._observe(held, held.tracked.values())
        held.stepped = False
        for t in held.tracked.values():
            grown = sum((delta.increment for delta in t.at.deltas.values()), t.kept)
            if t.at.lost is None and grown != t.at.fingerprint:
                t.at = replace(t.at, lost="an observation of it was cut short")
        if lost := [t for t in held.tracked.values() if t.at.lost is not None]:
            self._read_back(held, lost)
        self._count()
        total: dict[int, Any] = {}
        for t in held.tracked.values():
            for number, delta in t.at.deltas.items():
                total[number] = add(total[number], delta) if number in total else delta
        fingerprint = sum((t.at.fingerprint for t in held.tracked.values()), ZERO)
        return Capture({n: total[n] for n in sorted(total)}, fingerprint, "full")

    def keep(self, capture: Capture) -> None:  # noqa: ARG002 (the capture left here what it needs)
        held = self._held()
        places = {number: place for place, number in enumerate(held.share.numbers)}
        for t in held.tracked.values():
            if t.copy is not None:
                weights = SomeWeights(held.share.local, {t.name: t.copy})
                for number, delta in t.at.deltas.items():
                    apply(held.share.local_frames[places[number]], weights, delta)
            t.kept, t.at = t.at.fingerprint, replace(t.at, deltas={})
            t.surprises, t.surprised = t.surprises + 1 if t.surprised else 0, False

    def close(self) -> None:
        """Let go of the optimizer. Closing twice is allowed."""
        if self._attached is not None and self._attached.hook is not None:
            self._attached.hook.remove()
        self._attached = None

    # Steps --------------------------------------------------------------------------------------

    def _before_step(self, *_: object) -> None:
        """While the weights and the state of the step before still stand.

        What fails here keeps the step from happening, so that nothing is lost.
        """
        held = self._held()
        if held.stepped:
            self._observe(held, [t for t in held.tracked.values() if t.place is not None])
            held.stepped = False
        self._adopt(held)
        recovered = [t for t in held.tracked.values() if t.place is not None and t.at.lost is None]
        counts = steps_taken(held.optimizer, (t.place for t in recovered))
        options = [Options.of(group) for group in held.optimizer.param_groups]
        problems = [why_unbounded(each) for each in options]
        short: dict[str, Pass] = {}
        for t in recovered:
            assert t.place is not None
            own, before = options[t.place.group], counts[id(t.place.parameter)]
            problem = problems[t.place.group]
            if problem is None and before is not None:
                excess = held.excess.get(t.place.group, 1.0)
                needed = error_offset(own, before + 1, excess=excess)
                if needed > t.at.offset:
                    # Room to go on: a warm-up would outrun each bound by a little.
                    held.bounds[t.place.group] = 2 * own.learning_rate
                    short[t.name] = self._with_log(held, t, Pass(held.live[t.name]), counts)
            t.at = replace(t.at, begun=Begun(own, before, problem))
        self._log_again(held, short)
        held.stepped = True

    def _log_again(self, held: _Attached, passes: dict[str, Pass]) -> None:
        """The step that begins exceeds what these tensors' logs were made for."""
        if passes:
            logger.info("the boundary log of %d tensors is made for larger steps", len(passes))
        for name, each in passes.items():
            items = held.share.local[name].items
            for start in range(0, items, _CPU_BLOCK):
                each.read(start, min(start + _CPU_BLOCK, items), self._room)
            assert each.writer is not None
            t = held.tracked[name]
            t.at = replace(t.at, log=each.writer.log(), offset=each.writer.offset)
        self.report.logged_again += len(passes)

    def _adopt(self, held: _Attached) -> None:
        """Tensors that stood still and have joined the optimizer since are recovered from now."""
        if (count := _parameters(held.optimizer)) == held.parameters:
            return
        found = find_places(held.live, held.optimizer)
        joined = [t for t in held.tracked.values() if t.name in found and t.copy is None]
        joined = [t for t in joined if t.place is None and t.at.lost is None]
        for t in joined:
            t.place = found[t.name]
        counts = steps_taken(held.optimizer, (t.place for t in joined))
        passes = {t.name: self._with_log(held, t, Pass(held.live[t.name]), counts) for t in joined}
        for change in self._compare(held, passes):
            self._settle(held, held.tracked[change.name], passes[change.name], change)
        held.parameters = count

    # Passes -------------------------------------------------------------------------------------

    def _observe(self, held: _Attached, tracked: Iterable[Tracked]) -> None:
        """What changed in these tensors since they were last looked at."""
        chosen = [t for t in tracked if t.at.lost is None]
        counts = steps_taken(held.optimizer, (t.place for t in chosen))
        passes = {t.name: self._pass_over(held, t, counts) for t in chosen}
        changes = self._compare(held, passes)
        while changes:  # each is let go of as its deltas are made: what changed isn't held twice
            change = changes.pop()
            self._settle(held, held.tracked[change.name], passes.pop(change.name), change)

    def _pass_over(self, held: _Attached, t: Tracked, counts: dict[int, int | None]) -> Pass:
        """How a tensor's bits before its last step are known."""
        own = Pass(held.live[t.name], t.copy)
        place, begun = t.place, t.at.begun
        if place is None or begun is None:
            return own
        after = counts[id(place.parameter)]
        if after is not None and after == begun.before:
            return own  # the step had no gradient for it, or was skipped
        if begun.before is None or after is None or after != begun.before + 1:
            own.problem = f"its step count went from {begun.before} to {after}"
        elif begun.problem is not None:
            own.problem = begun.problem
        elif not place.stands:
            own.problem = "its parameter has been given other memory"
        else:
            state = held.optimizer.state[place.parameter]
            moments = place.moments(state, amsgrad=begun.options.amsgrad)
            if isinstance(moments, str):
                own.problem = moments
                return own
            own.moments, own.log = moments, t.at.log
            excess = held.excess.get(place.group, 1.0)
            own.inversion = Inversion.of(begun.options, after, excess=excess)
            self._with_log(held, t, own, counts)
        return own

    def _with_log(
        self, held: _Attached, t: Tracked, own: Pass, counts: dict[int, int | None]
    ) -> Pass:
        """The pass, writing a log for the next step if the tensor is recovered."""
        if t.place is None:
            return own
        group = held.optimizer.param_groups[t.place.group]
        options = Options.of(group)
        outrun = held.bounds.get(t.place.group, 0.0)
        scheduled = float(group.get("initial_lr", 0.0))
        bound = max(options.learning_rate, scheduled, self._bound, outrun)
        wide = replace(options, learning_rate=bound)
        step = (counts[id(t.place.parameter)] or 0) + 1
        excess = held.excess.get(t.place.group, 1.0)
        # Under options without a bound a step can't be taken back, whatever the log holds.
        offset = 0.0 if why_unbounded(options) else error_offset(wide, step, excess=excess)
        own.place, own.writer = t.place, LogWriter(held.share.local[t.name].items, offset)
        return own

    def _compare(self, held: _Attached, passes: dict[str, Pass]) -> list[TensorChange]:
        def read(spec: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            return passes[spec.name].read(start, stop, self._room)

        on_cpu = all(t.place is None or t.place.view.is_cpu for t in held.tracked.values())
        return compare_share(
            held.share, read, names=passes, threads=self._threads,
            block=_CPU_BLOCK if on_cpu else None,
        )  # fmt: skip

    def _settle(self, held: _Attached, t: Tracked, done: Pass, change: TensorChange) -> None:
        """Take over what a pass found, if it is proven; or the tensor is lost, for now."""
        start = t.kept if t.copy is not None else t.at.fingerprint
        proven = start + change.increment == change.now
        if not proven or (done.inversion is not None and done.problem is not None):
            why = "its copy was written to" if t.copy is not None else "it was changed by hand"
            t.at = replace(t.at, lost=done.problem or why, begun=None)
            if t.place is not None and 0 < done.excess < math.inf:
                # The next steps' moments aren't the gradients' own either: twice the room.
                grown = 2 * done.excess * held.excess.get(t.place.group, 1.0)
                held.excess[t.place.group] = max(grown, held.excess.get(t.place.group, 1.0))
            return
        found = deltas_of(held.share, [change])
        log, offset = t.at.log, t.at.offset
        if done.writer is not None:
            log, offset = done.writer.log(), done.writer.offset
        self.report.recovered += done.inversion is not None
        deltas = found if t.copy is not None else add_up(t.at.deltas, found)
        t.at = Observed(change.now, deltas, log, offset)

    def _start_from(self, held: _Attached, t: Tracked, change: TensorChange, done: Pass) -> None:
        """A pass that compared with the kept state itself."""
        t.kept = change.now - change.increment
        deltas: Deltas = deltas_of(held.share, [change])
        if done.writer is None:
            t.at = Observed(change.now, deltas)
        else:
            t.at = Observed(change.now, deltas, done.writer.log(), done.writer.offset)

    # Fallback -----------------------------------------------------------------------------------

    def _read_back(self, held: _Attached, lost: Sequence[Tracked]) -> None:
        """Compare with the kept state as the registry has it. Nothing moves unless all is proven.

        Raises:
            PublishError: there is nowhere to read it from.
            FingerprintMismatch: what was read isn't the kept state.
            PlaitError: as `read_back` does.
        """
        told = "; ".join(f"{t.name}: {t.at.lost}" for t in lost[:8])
        if held.read_back is None:
            raise PublishError(
                f"what changed in {len(lost)} tensors isn't known ({told})",
                remedy="attach again; a Publisher reads them back from the registry",
            )
        logger.warning("reading %d tensors back, of %d: %s", len(lost), len(held.tracked), told)
        kept = held.read_back([t.name for t in lost])
        counts = steps_taken(held.optimizer, (t.place for t in lost))
        passes = {}
        for t in lost:
            own = Pass(held.live[t.name], kept.bits(t.name))
            again = t.place is None or t.surprises or not t.place.stands
            passes[t.name] = own if again else self._with_log(held, t, own, counts)
        changes = self._compare(held, passes)
        odd = [c.name for c in changes if c.now - c.increment != held.tracked[c.name].kept]
        if odd:
            raise FingerprintMismatch(
                f"what was read back of {', '.join(odd[:8])} isn't the state that was published",
                remedy="attach again: what the weights are then is looked up by their content",
            )
        for change in changes:
            t, done = held.tracked[change.name], passes[change.name]
            if done.writer is None:
                # A second surprise in a row, or nothing to recover from: reading back each time
                # would cost more than a copy.
                t.place, t.copy = None, np.array(kept.bits(t.name))
            self._start_from(held, t, change, done)
            t.surprised = True
        self.report.read_back += len(changes)

    # --------------------------------------------------------------------------------------------

    def _find_again(self, held: _Attached) -> None:
        """The live tensors are asked for anew at each publish, and may be others."""

        def moved(t: Tracked) -> bool:
            view = getattr(held.live[t.name], "tensor", None)
            return t.place is not None and not (
                isinstance(view, torch.Tensor)
                and (view.data_ptr(), view.shape, view.stride(), view.device)
                == (
                    t.place.view.data_ptr(), t.place.view.shape, t.place.view.stride(),
                    t.place.view.device,
                )
            )  # fmt: skip

        if not (others := [t for t in held.tracked.values() if moved(t)]):
            return
        found = find_places(held.live, held.optimizer)
        for t in others:
            t.place = found.get(t.name)

    def _held(self) -> _Attached:
        if self._attached is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self._attached

    def _count(self) -> None:
        """Sizes of now, for the report."""
        tracked = self._held().tracked.values()
        logs = [t.at.log for t in tracked if t.at.log is not None]
        self.report.log_entries = sum(log.entries for log in logs)
        self.report.log_bytes = sum(log.nbytes for log in logs)
        self.report.copied_bytes = sum(t.copy.nbytes for t in tracked if t.copy is not None)

    def _log_kinds(self, held: _Attached) -> None:
        recovered = [t for t in held.tracked.values() if t.place is not None]
        copied = [t.name for t in held.tracked.values() if t.copy is not None]
        still = len(held.tracked) - len(recovered) - len(copied)
        logger.info(
            "reconstruction: %d tensors are recovered (log of %d bytes), %d are kept as a copy "
            "(%d bytes: %s), %d are taken to stand still",
            len(recovered), self.report.log_bytes, len(copied), self.report.copied_bytes,
            ", ".join(copied[:8]) or "none", still,
        )  # fmt: skip


def _parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
