"""The reconstruction detector: no copy of the weights, exact all the same.

The bits before a step are recovered from the optimizer's own state while it streams through the
model; those that could come out otherwise lie in a boundary log, made in the same pass. What was
found is proven tensor by tensor against the retained fingerprint; a tensor that fails, or that lies
outside what the error bound assumes, is read back from what was committed, and reported. Derivation
and limits: docs/reconstruction.md.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from plait.codec.algebra import negate
from plait.errors import FingerprintMismatch, PublishError, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.weights import Weights
from plait_trainer.comparing import TensorChange
from plait_trainer.deltas import add_up, apply_deltas, sum_of
from plait_trainer.detector import Capture, LiveTensors, ReadBack
from plait_trainer.earlier_weights import Runs
from plait_trainer.optimized import (
    find_places,
    is_optimized,
    optimized_memory,
    refusal,
    steps_taken,
    unwrapped_optimizer,
)
from plait_trainer.partial_weights import LiveWeights, SomeWeights, in_parts
from plait_trainer.share import Share
from plait_trainer.tracked import Observed, Pass, Tracked
from plait_trainer.watch import ReconstructionReport, Watch, watch_steps

logger = logging.getLogger("plait.trainer")

# A tensor of unknown origin is copied up to this size; a larger one is taken to stand still.
_COPIED_ITEMS: Final = 1 << 12


class ReconstructionDetector:
    """Recovers the bits before each step of torch's AdamW or Adam from its moments.

    Args:
        learning_rate_bound: no step will have a larger one; where a step does, or none is given and
            it grows beyond the present and the scheduler's initial one, a pass over the weights
            before that step makes the log anew.
        threads: that look at tensors at the same time; more than one is for weights in CPU memory.

    Attributes:
        report: counters.

    Raises:
        UsageError: a bound that is negative, or not finite.
    """

    def __init__(self, *, learning_rate_bound: float | None = None, threads: int = 1) -> None:
        if not 0 <= (learning_rate_bound or 0.0) < math.inf:
            raise UsageError(f"a learning rate bound of {learning_rate_bound}; expected 0 or more")
        self.report = ReconstructionReport()
        self._bound = learning_rate_bound or 0.0
        self._threads = threads
        self._watch: Watch | None = None
        self._hook: RemovableHandle | None = None
        self._recall: ReadBack | None = None

    @property
    def keeps_copy(self) -> bool:
        return False

    @property
    def captured(self) -> Weights:
        watch = self._watching()
        return LiveWeights(watch.share.local, watch.live)

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
            LayoutChanged: the base has another layout than the share.
        """
        self.close()
        optimizer = unwrapped_optimizer(optimizer)
        if optimizer is None or (why := refusal(optimizer)):
            why = "there is no optimizer" if optimizer is None else why
            raise PublishError(
                f"weights can't be reconstructed: {why}",
                remedy="use a SnapshotDetector, which works with any optimizer",
            )
        if base is not None:
            share.local.require_equal(base.layout, what="the base")
        tracked = _tracked(live, share, base, optimizer, copies_all=read_back is None)
        watch = Watch(share, live, optimizer, tracked, self.report, self._bound, self._threads)
        counts = steps_taken(optimizer, (t.place for t in tracked.values()))
        passes = {
            name: watch.with_log(
                t, Pass(live[name], None if base is None else Runs(base, name)), counts
            )
            for name, t in tracked.items()
        }
        for change in watch.compare(passes):
            watch.start_from(tracked[change.name], change, passes[change.name])
        self._watch, self._recall = watch, read_back
        self._hook = watch_steps(watch)
        self._count()
        self._tell()
        return sum((t.kept for t in tracked.values()), ZERO)

    def capture(self, live: LiveTensors) -> Capture:
        watch = self._watching()
        tracked = watch.tracked.values()
        watch.live = live
        watch.find_again()
        watch.observe(tracked)
        watch.stepped = False
        for t in tracked:
            grown = sum((delta.increment for delta in t.at.deltas.values()), t.kept)
            if t.at.lost is None and grown != t.at.fingerprint:
                t.at = replace(t.at, lost="an observation of it was cut short")
        if lost := [t for t in tracked if t.at.lost is not None]:
            self._read_back(watch, lost)
        self._count()
        for t in tracked:
            t.captured = t.at
        fingerprint = sum((t.at.fingerprint for t in tracked), ZERO)
        return Capture(sum_of(t.at.deltas for t in tracked), fingerprint, "full")

    def keep(self, capture: Capture) -> None:  # noqa: ARG002 (the capture left here what it needs)
        share = self._watching().share
        for t in self._watching().tracked.values():
            if (held := t.captured) is None:
                continue
            if t.copy is not None:
                apply_deltas(share, SomeWeights(share.local, {t.name: t.copy}), held.deltas)
            since = t.at.deltas
            if since is held.deltas:
                since = {}
            else:  # a step that began since the capture has been observed: its changes stay
                taken = {number: negate(delta) for number, delta in held.deltas.items()}
                since = add_up(since, taken)
            t.kept, t.at, t.captured = held.fingerprint, replace(t.at, deltas=since), None
            t.surprises, t.surprised = t.surprises + 1 if t.surprised else 0, False

    def close(self) -> None:
        """Let go of the optimizer. Closing twice is allowed."""
        if self._hook is not None:
            self._hook.remove()
        self._watch = self._hook = self._recall = None

    def _read_back(self, watch: Watch, lost: Sequence[Tracked]) -> None:
        """Compare with the kept state as the registry has it. Nothing moves unless all is proven.

        Raises:
            PublishError: there is nowhere to read it from.
            FingerprintMismatch: what was read isn't the kept state.
            PlaitError: as `read_back` does.
        """
        told = "; ".join(f"{t.name}: {t.at.lost}" for t in lost[:8])
        if self._recall is None:
            raise PublishError(
                f"what changed in {len(lost)} tensors isn't known ({told})",
                remedy="attach again; a Publisher reads them back from the registry",
            )
        logger.warning("reading %d tensors back, of %d: %s", len(lost), len(watch.tracked), told)
        compared: list[tuple[TensorChange, Pass, NDArray[Any] | None]] = []
        for names in in_parts(watch.share.layout, [t.name for t in lost]):
            compared += _compared(watch, names, self._recall(names))
        for change, done, copy in compared:
            t = watch.tracked[change.name]
            if copy is not None:
                t.place, t.copy = None, copy
            watch.start_from(t, change, done)
            t.surprised = True
        self.report.read_back += len(compared)

    def _watching(self) -> Watch:
        if self._watch is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self._watch

    def _count(self) -> None:
        """Sizes of now, for the report."""
        tracked = self._watching().tracked.values()
        logs = [t.at.log for t in tracked if t.at.log is not None]
        self.report.log_entries = sum(log.entries for log in logs)
        self.report.log_bytes = sum(log.nbytes for log in logs)
        self.report.copied_bytes = sum(t.copy.nbytes for t in tracked if t.copy is not None)

    def _tell(self) -> None:
        """What is recovered, and what isn't, for the log."""
        tracked = self._watching().tracked
        recovered = sum(t.place is not None for t in tracked.values())
        copied = [t.name for t in tracked.values() if t.copy is not None]
        logger.info(
            "reconstruction: %d tensors are recovered (log of %d bytes), %d are kept as a copy "
            "(%d bytes: %s), %d are taken to stand still",
            recovered, self.report.log_bytes, len(copied), self.report.copied_bytes,
            ", ".join(copied[:8]) or "none", len(tracked) - recovered - len(copied),
        )  # fmt: skip


def _compared(
    watch: Watch, names: Sequence[str], kept: Weights
) -> Iterator[tuple[TensorChange, Pass, NDArray[Any] | None]]:
    """What changed in some tensors since the kept state, and the pass that found it: with a log;
    or, for those that aren't recovered from now on, with a copy of the kept state.

    Raises:
        FingerprintMismatch: `kept` isn't that state.
    """
    tracked = [watch.tracked[name] for name in names]
    counts = steps_taken(watch.optimizer, (t.place for t in tracked))
    passes = {}
    for t in tracked:
        own = Pass(watch.live[t.name], kept.bits(t.name))
        # After a second surprise in a row, reading back each time would cost more than a copy.
        again = t.place is None or t.surprises or not t.place.stands
        passes[t.name] = own if again else watch.with_log(t, own, counts)
    changes = watch.compare(passes)
    odd = [c.name for c in changes if c.now - c.increment != watch.tracked[c.name].kept]
    if odd:
        raise FingerprintMismatch(
            f"what was read back of {', '.join(odd[:8])} isn't the state that was published",
            remedy="attach again: what the weights are then is looked up by their content",
        )
    for change in changes:
        done = passes[change.name]
        copy = np.array(kept.bits(change.name)) if done.writer is None else None
        done.old = None  # what was read back isn't held any longer
        yield change, done, copy


def _tracked(
    live: LiveTensors, share: Share, base: Weights | None, optimizer: torch.optim.Optimizer,
    *, copies_all: bool,
) -> dict[str, Tracked]:  # fmt: skip
    """Each tensor of the local layout, and how its old bits will be known.

    Args:
        copies_all: nothing can be read back, so that no tensor may be taken to stand still.
    """
    places, memory = find_places(live, optimizer), optimized_memory(optimizer)
    tracked = {}
    for spec in share.local.tensors:
        tensor, copy = live[spec.name], None
        moves = copies_all or spec.items <= _COPIED_ITEMS or is_optimized(tensor, memory)
        if spec.name not in places and moves:
            copy = np.array(tensor.bits(0, spec.items) if base is None else base.bits(spec.name))
        tracked[spec.name] = Tracked(
            spec.name, places.get(spec.name), copy, ZERO, Observed(ZERO, {})
        )
    return tracked
