"""One published tensor under reconstruction: what is known of it, and a pass over it."""

import threading
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from plait.fingerprint import Fingerprint
from plait.tensors import bits_of
from plait.weights import UNSIGNED
from plait_trainer.boundary_log import BoundaryLog, LogWriter
from plait_trainer.deltas import Deltas
from plait_trainer.inversion import Inversion, Moments, Options
from plait_trainer.live import LiveTensor, run_of
from plait_trainer.optimized import Place

# Items worked on at once: on a CPU few enough for its caches, on a device enough to fill it.
_CPU_ITEMS: Final = 1 << 16
_DEVICE_ITEMS: Final = 1 << 22

# A bound of 0 is exceeded by any update.
_LEAST: Final = 1e-300


class Sliced(Protocol):
    """A tensor's bits: an array, or what makes the run that is asked for."""

    def __getitem__(self, run: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Begun:
    """An optimizer step that has begun, as its pre-hook saw it.

    Attributes:
        before: steps that the parameter had taken; None: its state doesn't say.
        problem: why the step can't be taken back, if it changes this tensor.
    """

    options: Options
    before: int | None
    problem: str | None


@dataclass(frozen=True, eq=False)
class Observed:
    """What is known of a tensor as it was last looked at. Replaced as a whole, so that an
    interrupt leaves the old knowledge or the new.

    Attributes:
        fingerprint: of its bits then, at their words in the whole layout.
        deltas: from the kept state to then.
        log: boundary log of its weights then; None where nothing is recovered.
        offset: of the error bound that the log is made for; see `inversion.error_offset`.
        begun: a step since then.
        lost: why its changes since the kept state aren't known; None: they are.
    """

    fingerprint: Fingerprint
    deltas: Deltas
    log: BoundaryLog | None = None
    offset: float = 0.0
    begun: Begun | None = None
    lost: str | None = None


@dataclass(eq=False)
class Tracked:
    """One tensor of the local layout.

    Attributes:
        place: where the optimizer keeps it; None: it isn't recovered.
        copy: its bits in the kept state, where it is neither recovered nor taken to stand still.
        kept: its fingerprint in the kept state.
        surprises: publishes in a row for which it had to be read back.
        surprised: for the present one, too.
        captured: as the last capture left it, until that is kept.
    """

    name: str
    place: Place | None
    copy: NDArray[Any] | None
    kept: Fingerprint
    at: Observed
    surprises: int = 0
    surprised: bool = False
    captured: Observed | None = None


class Room(threading.local):
    """Scratch of the thread that asks, by device."""

    def __init__(self) -> None:
        self._held: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """float32 [3, items worked on at once]."""
        if device not in self._held:
            items = _CPU_ITEMS if device.type == "cpu" else _DEVICE_ITEMS
            self._held[device] = torch.empty((3, items), dtype=torch.float32, device=device)
        return self._held[device]


@dataclass(eq=False)
class Pass:
    """A pass over one tensor: what `compare_share` reads.

    Attributes:
        live: its present bits.
        old: the bits to compare with; None: recovered ones or, without an inversion, the live ones.
        place: whose weights are read where anything is recovered or written down.
        log: of the weights before the step.
        writer: of the log for the next step.
        problem: why the result isn't to be believed; None: if it is proven, it is.
        excess: of the largest update over what gradients lead to, as a factor; 0 where none is.
    """

    live: LiveTensor
    old: Sliced | None = None
    place: Place | None = None
    inversion: Inversion | None = None
    moments: Moments | None = None
    log: BoundaryLog | None = None
    writer: LogWriter | None = None
    problem: str | None = None
    excess: float = 0.0

    def read(self, start: int, stop: int, room: Room) -> tuple[NDArray[Any], NDArray[Any]]:
        """Items [start, stop) before and now, as bits."""
        if self.writer is None and self.inversion is None:
            new = self.live.bits(start, stop)
            return new if self.old is None else self.old[start:stop], new
        assert self.place is not None
        new = np.empty(stop - start, UNSIGNED[self.place.dtype.itemsize])
        old = new if self.inversion is None else np.empty_like(new)
        scratch = room.on(self.place.view.device)
        for first in range(start, stop, scratch.shape[1]):
            last = min(first + scratch.shape[1], stop)
            self._run(first, last, old[first - start :], new[first - start :], scratch)
        if self.inversion is not None and self.log is not None:
            self.log.correct(start, old)
        return old if self.old is None else self.old[start:stop], new

    def _run(
        self, start: int, stop: int, old: NDArray[Any], new: NDArray[Any], scratch: torch.Tensor
    ) -> None:
        place, items = self.place, stop - start
        assert place is not None
        weights = run_of(place.view, start, stop).contiguous()
        published = weights.to(place.dtype)
        new[:items] = bits_of(published.cpu().contiguous())
        if self.inversion is not None and self.moments is not None:
            first, second = self.moments.first, self.moments.second
            run = Moments(*(run_of(m, start, stop).contiguous() for m in (first, second)))
            recovered, largest = self.inversion.recover(weights, run, scratch[2, :items])
            old[:items] = bits_of(recovered.to(place.dtype).cpu())
            bound = self.inversion.update_bound
            if not largest <= bound:  # nor is NaN
                factor = largest * self.inversion.excess / max(bound, _LEAST)
                self.excess = max(self.excess, factor)
                self.problem = f"an update is {largest:g}, and gradients lead to {bound:g} at most"
        if self.writer is not None:
            self.writer.add(start, weights, published, scratch[:2])
