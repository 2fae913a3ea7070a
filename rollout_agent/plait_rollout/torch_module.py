"""The Engine port for a plain torch module in this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from plait.errors import (
    BaseMismatch,
    EngineRefused,
    EngineUnavailable,
    PlaitError,
    ReplicaUnproven,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait.weights import Weights, fingerprint_weights
from plait_rollout.engine import ApplyReport, AttachReport, Move, StageReport
from plait_rollout.gate import GenerationGate
from plait_rollout.live_tensors import LiveTensors, places_of
from plait_rollout.staging import StagedFrame, add_up, require_base
from plait_rollout.stopwatch import stopwatch
from plait_rollout.touched import Bits, increment_between, increment_on_base

# What writing to tensors may raise. Anything else is undone too, and passed on as it is.
_WRITE_FAILURES: Final = (RuntimeError, ValueError, MemoryError, PlaitError)


@dataclass(frozen=True, eq=False)
class _Undo:
    """One frame's part of an undo list: its old bits are written, whatever is there now."""

    frame: StagedFrame
    old: Bits


class TorchModuleEngine:
    """A module's tensors, moved in place between two generations.

    Whoever samples from the module does so inside `generating()`; a move waits for those inside,
    holds new ones back, and lets them in again when the new weights are proven.

    Args:
        tensors: the module, or its tensors by canonical name. A module's parameters and persistent
            buffers are taken under their own names; tied ones may have names that the layout lacks.
        pause, resume: called around the change, for engines with a loop of their own.
        on_applied: called with the new stamp before generation goes on: the place to drop caches
            that were computed from the old weights. If it raises, the move is undone.
        pause_seconds: how long a move waits for generations to finish.
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        on_applied: Callable[[str], None] | None = None,
        pause_seconds: float = 60.0,
    ) -> None:
        self._source = tensors
        self._pause, self._resume = pause, resume
        self._on_applied = on_applied
        self._pause_seconds = pause_seconds
        self._gate = GenerationGate()
        self._live: LiveTensors | None = None
        self._held = ZERO
        self._stamp = ""
        self._staged: tuple[Move, tuple[StagedFrame, ...]] | None = None
        self._last: tuple[Fingerprint, list[_Undo]] | None = None

    @contextmanager
    def generating(self) -> Iterator[str]:
        """Around one generation: yields the stamp of the weights, which stay as they are inside.

        Raises:
            ReplicaUnproven: a move failed and could not be undone.
        """
        with self._gate.passing():
            yield self._stamp

    def attach(self, layout: Layout) -> AttachReport:
        """See Engine. Generations that were held back for want of proof wait for the next move.

        Raises:
            LayoutChanged: the module's tensors aren't the layout's.
            MapUnproven: they can't be changed in place.
        """
        self.close()
        live = LiveTensors(layout, self._tensors())
        self._held = live.fingerprint()
        self._live = live
        notes = tuple(f"{name} is tied to {owner}" for name, owner in live.tied_to.items())
        return AttachReport(self._held, ranks=1, notes=notes)

    def fingerprint(self) -> Fingerprint:
        """See Engine. What it finds is the state that the next move must start from."""
        self._held = self._attached().fingerprint()
        return self._held

    def stage(self, move: Move) -> StageReport:
        """See Engine."""
        self.discard()
        with stopwatch() as elapsed:
            live = self._attached()
            live.layout.require_equal(move.layout, what="the move")
            if move.base != self._held:
                raise BaseMismatch(
                    f"the move starts from {move.base}, the module holds {self._held}",
                    expected=str(move.base),
                    found=str(self._held),
                )
            frames = add_up(move)
            live.require_ties_kept(frames)
            require_base(frames, live.read)
        self._staged = move, frames
        return StageReport(sum(frame.delta.count for frame in frames), elapsed.seconds)

    def apply(self) -> ApplyReport:
        """See Engine."""
        if self._staged is None:
            raise EngineRefused("no move is staged")
        (move, frames), self._staged = self._staged, None
        live = self._attached()
        undo: list[_Undo] = []
        with stopwatch() as paused, self._paused():
            with stopwatch() as scatter, self._taking_back(live, undo):
                _scatter(live, frames, undo)
                _prove(live, undo, move.target - move.base)
                self._announce(move.stamp)
            self._held, self._last = move.target, (move.base, undo)
        return ApplyReport(paused.seconds, scatter.seconds)

    def discard(self) -> None:
        """See Engine."""
        self._staged = None

    def undo(self, stamp: str) -> ApplyReport:
        """See Engine. Only the last applied move can be taken back, and once."""
        if self._last is None:
            raise EngineRefused("there is no applied move to take back")
        self.discard()
        live = self._attached()
        (base, undo), self._last = self._last, None
        with stopwatch() as paused, self._paused():
            redo = [_Undo(u.frame, live.read(u.frame.spec, u.frame.delta.positions)) for u in undo]
            with stopwatch() as scatter, self._taking_back(live, redo):
                _write_back(live, undo)
                _prove(live, redo, base - self._held)
                self._announce(stamp)
            self._held = base
        return ApplyReport(paused.seconds, scatter.seconds)

    def load(self, weights: Weights, stamp: str) -> ApplyReport:
        """Replaces every weight: the way to a state that no delta leads to. Attach afterwards.

        It keeps no undo list, which would be as large as the module.

        Raises:
            LayoutChanged, MapUnproven: nothing was written.
            ReplicaUnproven: cut short, or not what it should be; generation stays held back.
        """
        self.close()
        live = LiveTensors(weights.layout, self._tensors())
        expected = fingerprint_weights(weights)
        with stopwatch() as paused, self._paused():
            found: Fingerprint | None = None
            try:
                with stopwatch() as writing:
                    live.replace(weights)
                    found = live.fingerprint()
            finally:
                if found != expected:
                    self._condemn(f"a load of {stamp!r} was not completed")
            if found != expected:
                raise ReplicaUnproven(
                    f"loaded {found}, expected {expected}", remedy="load it again"
                )
            self._announce(stamp)
        return ApplyReport(paused.seconds, writing.seconds)

    def version(self) -> str:
        """See Engine. Empty before the first move."""
        return self._stamp

    def close(self) -> None:
        """See Engine."""
        self.discard()
        self._live = self._last = None

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        if not isinstance(self._source, torch.nn.Module):
            return self._source
        # A module may keep things in its state that aren't tensors (`get_extra_state`).
        state = self._source.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def _attached(self) -> LiveTensors:
        """The live tensors, if they still are the module's."""
        if self._live is None:
            raise EngineUnavailable("the module is not attached", remedy="attach it")
        if places_of(self._tensors()) != self._live.places:
            raise EngineUnavailable(
                "the module's tensors were replaced since it was attached", remedy="attach it again"
            )
        return self._live

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Nobody generates inside. Afterwards generation goes on, unless nothing is proven."""
        if self._pause is not None:
            self._pause()
        try:
            self._gate.close(within_seconds=self._pause_seconds)
            proven = False
            try:
                yield
                proven = True
            finally:
                # A refused move leaves the gate as it found it: a condemned one waits for a proof.
                if proven or not self._gate.condemned:
                    self._gate.open()
        finally:
            if self._resume is not None and not self._gate.condemned:
                self._resume()

    @contextmanager
    def _taking_back(self, live: LiveTensors, undo: list[_Undo]) -> Iterator[None]:
        """If the block fails, what it wrote is taken back before anybody can read it.

        Raises:
            EngineRefused: taken back, and proven.
            ReplicaUnproven: not proven; generation stays held back.
        """
        done = False
        try:
            yield
            done = True
        except _WRITE_FAILURES as error:
            raise EngineRefused(
                f"the move failed and was undone: {error}", cause=getattr(error, "code", "failed")
            ) from error
        finally:
            if not done:
                self._take_back(live, undo)

    def _take_back(self, live: LiveTensors, undo: list[_Undo]) -> None:
        try:
            _write_back(live, undo)
            odd = [u for u in undo if not np.array_equal(_now(live, u), u.old)]
            why = f"{len(odd)} frames don't hold their old bits" if odd else ""
        except _WRITE_FAILURES as error:
            why = str(error)
        if why:
            self._condemn(f"a failed move could not be undone: {why}")
            raise ReplicaUnproven(
                f"a failed move could not be undone: {why}",
                remedy="load a whole version again before this module serves",
            )

    def _condemn(self, why: str) -> None:
        self._stamp = ""
        self._live = self._last = None
        self._gate.condemn(why)

    def _announce(self, stamp: str) -> None:
        if self._on_applied is not None:
            self._on_applied(stamp)
        self._stamp = stamp


def _scatter(live: LiveTensors, frames: Sequence[StagedFrame], undo: list[_Undo]) -> None:
    """Adds the deltas to the live bits.

    All old bits are on the undo list before the first write: a tied tensor's frame reads memory
    that another frame writes.
    """
    for frame in frames:
        old = live.read(frame.spec, frame.delta.positions)
        if increment_on_base(frame.spec, frame.delta, old) != frame.delta.increment:
            raise BaseMismatch(f"frame {frame.number} was changed since the move was staged")
        undo.append(_Undo(frame, old))
    for written in undo:
        delta = written.frame.delta
        live.write(written.frame.spec, delta.positions, written.old + delta.differences)


def _write_back(live: LiveTensors, undo: Sequence[_Undo]) -> None:
    for written in undo:
        live.write(written.frame.spec, written.frame.delta.positions, written.old)


def _prove(live: LiveTensors, before: Sequence[_Undo], increment: Fingerprint) -> None:
    """Re-reads what was touched: its fingerprint must have grown by exactly the increment."""
    found = sum(
        (
            increment_between(u.frame.spec, u.frame.delta.positions, u.old, _now(live, u))
            for u in before
        ),
        ZERO,
    )
    if found != increment:
        raise EngineRefused(
            f"the touched words add up to {found}, expected {increment}: a write was lost"
        )


def _now(live: LiveTensors, written: _Undo) -> Bits:
    return live.read(written.frame.spec, written.frame.delta.positions)
