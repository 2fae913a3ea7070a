"""Watching a model's tensors while an optimizer steps: what each step changed, and how it is known.

Every pass proves what it found, tensor by tensor. What can't be proven is marked as lost, with the
reason; the detector answers for it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakMethod

import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from plait.layout import TensorSpec
from plait_trainer.boundary_log import LogWriter
from plait_trainer.comparing import TensorChange, compare_share, deltas_of
from plait_trainer.deltas import Deltas, add_up
from plait_trainer.detector import LiveTensors
from plait_trainer.inversion import Inversion, Options, error_offset, why_unbounded
from plait_trainer.optimized import Place, find_places, groups_of, steps_taken
from plait_trainer.share import Share
from plait_trainer.tracked import Begun, Observed, Pass, Room, Tracked

logger = logging.getLogger("plait.trainer")

# Compared at once: of the bits made here, small enough to stay in a cache; a device wants more.
_CPU_BLOCK: Final = 1 << 18

# Updates that exceed their bound by more than this factor are an accident, not a habit.
_EXCESS_MOST: Final = 1024.0


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
class Watch:
    """Tensors under reconstruction, and the optimizer that steps them.

    Attributes:
        share: what this process publishes.
        live: as of the last attach or capture.
        tracked: the tensors of the share's local layout, by name.
        bound: no step has a larger learning rate, as far as was declared.
        threads: that look at tensors at the same time.
        bounds: learning rates that the log is made for where a step outran its bound, by group.
        excess: factor by which updates exceed what the group's gradients lead to, where they do:
            moments that were loaded, or made under other betas.
        groups: the number of each parameter's group as of now, by the parameter's id.
        known: the ids of the parameters among which tensors were last looked for.
        stepped: a step has begun since the last observation.
    """

    share: Share
    live: LiveTensors
    optimizer: torch.optim.Optimizer
    tracked: dict[str, Tracked]
    report: ReconstructionReport
    bound: float
    threads: int
    bounds: dict[int, float] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    known: frozenset[int] = frozenset()
    stepped: bool = False
    _room: Room = field(default_factory=Room)

    def __post_init__(self) -> None:
        self.groups = groups_of(self.optimizer)
        self.known = frozenset(self.groups)

    def before_step(self, *_: object) -> None:
        """While the weights and the state of the step before still stand.

        What fails here keeps the step from happening, so that nothing is lost.
        """
        if self.stepped:
            self.observe([t for t in self.tracked.values() if t.place is not None])
            self.stepped = False
        self._follow_parameters()
        recovered = [t for t in self.tracked.values() if t.place is not None and t.at.lost is None]
        counts = steps_taken(self.optimizer, (t.place for t in recovered))
        options = [Options.of(group) for group in self.optimizer.param_groups]
        problems = [why_unbounded(each) for each in options]
        short: dict[str, Pass] = {}
        for t in recovered:
            assert t.place is not None
            group = self.groups[id(t.place.parameter)]
            own, before, problem = options[group], counts[id(t.place.parameter)], problems[group]
            if problem is None and before is not None:
                excess = self.excess.get(group, 1.0)
                needed = error_offset(own, before + 1, excess=excess)
                if needed > t.at.offset:
                    # Room to go on: a warm-up would outrun each bound by a little.
                    self.bounds[group] = 2 * own.learning_rate
                    short[t.name] = self.with_log(t, Pass(self.live[t.name]), counts)
            t.at = replace(t.at, begun=Begun(own, before, problem))
        self._log_again(short)
        self.stepped = True

    def _log_again(self, passes: dict[str, Pass]) -> None:
        """The step that begins exceeds what these tensors' logs were made for."""
        if passes:
            logger.info("the boundary log of %d tensors is made for larger steps", len(passes))
        for name, each in passes.items():
            items = self.share.local[name].items
            for start in range(0, items, _CPU_BLOCK):
                each.read(start, min(start + _CPU_BLOCK, items), self._room)
            assert each.writer is not None
            t = self.tracked[name]
            t.at = replace(t.at, log=each.writer.log(), offset=each.writer.offset)
        self.report.logged_again += len(passes)

    def _follow_parameters(self) -> None:
        """Tensors whose parameters have left the optimizer stand still from now; those that stood
        still and have joined it are recovered."""
        self.groups = groups_of(self.optimizer)
        for t in self.tracked.values():
            if t.place is not None and self._group_of(t.place) is None:
                t.place = None
        if self.groups.keys() == self.known:
            return
        found = find_places(self.live, self.optimizer)
        joined = [t for t in self.tracked.values() if t.name in found and t.copy is None]
        joined = [t for t in joined if t.place is None and t.at.lost is None]
        for t in joined:
            t.place = found[t.name]
        counts = steps_taken(self.optimizer, (t.place for t in joined))
        passes = {t.name: self.with_log(t, Pass(self.live[t.name]), counts) for t in joined}
        for change in self.compare(passes):
            self._settle(self.tracked[change.name], passes[change.name], change)
        self.known = frozenset(self.groups)

    def _group_of(self, place: Place) -> int | None:
        """The number of its parameter's group; None: the parameter has left the optimizer."""
        return self.groups.get(id(place.parameter))

    # Passes -------------------------------------------------------------------------------------

    def observe(self, tracked: Iterable[Tracked]) -> None:
        """What changed in these tensors since they were last looked at."""
        self.groups = groups_of(self.optimizer)
        chosen = [t for t in tracked if t.at.lost is None]
        counts = steps_taken(self.optimizer, (t.place for t in chosen))
        passes = {t.name: self._pass_over(t, counts) for t in chosen}
        changes = self.compare(passes)
        while changes:  # each is let go of as its deltas are made: what changed isn't held twice
            change = changes.pop()
            self._settle(self.tracked[change.name], passes.pop(change.name), change)

    def _pass_over(self, t: Tracked, counts: dict[int, int | None]) -> Pass:
        """How a tensor's bits before its last step are known."""
        own = Pass(self.live[t.name], t.copy)
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
            state = self.optimizer.state[place.parameter]
            moments = place.moments(state, amsgrad=begun.options.amsgrad)
            if isinstance(moments, str):
                own.problem = moments
                return own
            own.place, own.moments, own.log = place, moments, t.at.log
            excess = self._excess_of(place)
            own.inversion = Inversion.of(begun.options, after, excess=excess)
            self.with_log(t, own, counts)
        return own

    def with_log(self, t: Tracked, own: Pass, counts: dict[int, int | None]) -> Pass:
        """The pass, writing a log for the next step if there can be one that is recovered from."""
        if t.place is None or (number := self._group_of(t.place)) is None:
            return own
        group = self.optimizer.param_groups[number]
        options = Options.of(group)
        outrun = self.bounds.get(number, 0.0)
        scheduled = float(group.get("initial_lr", 0.0))
        bound = max(options.learning_rate, scheduled, self.bound, outrun)
        wide = replace(options, learning_rate=bound)
        step = (counts[id(t.place.parameter)] or 0) + 1
        excess = self._excess_of(t.place)
        # Under options without a bound a step can't be taken back, whatever the log holds.
        offset = 0.0 if why_unbounded(options) else error_offset(wide, step, excess=excess)
        own.place, own.writer = t.place, LogWriter(self.share.local[t.name].items, offset)
        return own

    def compare(self, passes: dict[str, Pass]) -> list[TensorChange]:
        def read(spec: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            return passes[spec.name].read(start, stop, self._room)

        on_cpu = all(t.place is None or t.place.view.is_cpu for t in self.tracked.values())
        return compare_share(
            self.share, read, names=passes, threads=self.threads,
            block=_CPU_BLOCK if on_cpu else None,
        )  # fmt: skip

    def _settle(self, t: Tracked, done: Pass, change: TensorChange) -> None:
        """Take over what a pass found, if it is proven; or the tensor is lost, for now."""
        start = t.kept if t.copy is not None else t.at.fingerprint
        proven = start + change.increment == change.now
        if not proven or (done.inversion is not None and done.problem is not None):
            why = "its copy was written to" if t.copy is not None else "it was changed by hand"
            t.at = replace(t.at, lost=done.problem or why, begun=None)
            if t.place is not None and 0 < done.excess <= _EXCESS_MOST:
                # The next steps' moments aren't the gradients' own either: twice the room.
                self._expect_excess(t.place, 2 * done.excess)
            return
        found = deltas_of(self.share, [change])
        log, offset = t.at.log, t.at.offset
        if done.writer is not None:
            log, offset = done.writer.log(), done.writer.offset
        self.report.recovered += done.inversion is not None
        deltas = found if t.copy is not None else add_up(t.at.deltas, found)
        t.at = Observed(change.now, deltas, log, offset)

    def _excess_of(self, place: Place) -> float:
        group = self._group_of(place)
        return 1.0 if group is None else self.excess.get(group, 1.0)

    def _expect_excess(self, place: Place, excess: float) -> None:
        if (group := self._group_of(place)) is not None:
            self.excess[group] = max(self.excess.get(group, 1.0), excess)

    def start_from(self, t: Tracked, change: TensorChange, done: Pass) -> None:
        """A pass that compared with the kept state itself."""
        t.kept = change.now - change.increment
        deltas: Deltas = deltas_of(self.share, [change])
        if done.writer is None:
            t.at = Observed(change.now, deltas)
        else:
            t.at = Observed(change.now, deltas, done.writer.log(), done.writer.offset)

    def find_again(self) -> None:
        """The live tensors are asked for anew at each publish, and may be others."""

        def moved(t: Tracked) -> bool:
            view = getattr(self.live[t.name], "tensor", None)
            return t.place is not None and not (
                isinstance(view, torch.Tensor)
                and (view.data_ptr(), view.shape, view.stride(), view.device)
                == (
                    t.place.view.data_ptr(), t.place.view.shape, t.place.view.stride(),
                    t.place.view.device,
                )
            )  # fmt: skip

        if not (others := [t for t in self.tracked.values() if moved(t)]):
            return
        found = find_places(self.live, self.optimizer)
        for t in others:
            t.place = found.get(t.name)


def watch_steps(watch: Watch) -> RemovableHandle:
    """Has the watch look before each step of its optimizer, until the handle is removed.

    The optimizer doesn't keep the watch: of one that nobody holds any longer, a function stays that
    does nothing. It isn't taken away from here, as the collector may run while the optimizer walks
    through its hooks.
    """
    looks: WeakMethod[Callable[..., None]] = WeakMethod(watch.before_step)

    def before_step(*arguments: object) -> None:
        if (look := looks()) is not None:
            look(*arguments)

    # A compiled training step calls it between two graphs. Dynamo, which this imports, is there
    # already: constructing an optimizer imports it.
    disable: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable
    return watch.optimizer.register_step_pre_hook(disable(before_step))
