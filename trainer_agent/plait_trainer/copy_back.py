"""The copy-back detector: at the copy from FP32 masters, the parameters still hold the old bits.

A trainer with mixed precision steps its masters and then rounds them into the 16-bit parameters
that the model computes with. Until then the parameters *are* the old state, so comparing there
needs no copy of the weights. Whatever has no master (buffers, FP32 parameters) is kept as a copy.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import FingerprintMismatch, PublishError, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import TensorSpec
from plait.weights import Weights
from plait_trainer.comparing import TensorChange, compare_share, deltas_of
from plait_trainer.deltas import Deltas, add_up, apply_deltas, sum_of
from plait_trainer.detector import Capture, LiveTensors, ReadBack
from plait_trainer.live import TensorView
from plait_trainer.memory import lies_within, memory_of, overlap, same_view
from plait_trainer.partial_weights import LiveWeights, SomeWeights, in_parts
from plait_trainer.shards import local_part
from plait_trainer.share import Share

logger = logging.getLogger("plait.trainer")

# (parameter, its master), of one shape and one order of strides.
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class _State:
    """What an attached detector knows.

    Attributes:
        live: as of the last attach or capture.
        masters: views of the masters, by the names of the tensors that they are rounded into.
        copies: kept state of the tensors without a master.
        kept: fingerprint of every tensor in the kept state.
        copied: fingerprint of every tensor with a master as of its last copy.
        changes: since the kept state, by tensor with a master.
        lost: tensors whose changes aren't known: they had other bits than the last copy left.
        captured: fingerprint of every tensor at the last capture.
        captured_own: what the last capture found in the tensors without a master.
    """

    share: Share
    live: LiveTensors
    masters: dict[str, TensorView]
    copies: SomeWeights
    kept: dict[str, Fingerprint]
    copied: dict[str, Fingerprint]
    read_back: ReadBack | None
    changes: dict[str, Deltas]
    lost: set[str] = field(default_factory=set)
    captured: dict[str, Fingerprint] = field(default_factory=dict)
    captured_own: Deltas = field(default_factory=dict)


class CopyBackDetector:
    """Compares at the copy that the training loop makes through it: `copy()` after each step.

    Args:
        pairs: gives the parameters and their masters; asked at every attach and every copy.

    Raises:
        UsageError: not a function.
    """

    def __init__(self, pairs: Callable[[], Pairs]) -> None:
        if not callable(pairs):
            raise UsageError(
                f"pairs is a {type(pairs).__name__}; expected a function that gives them",
                remedy="pass lambda: zip(parameters, masters)",
            )
        self._pairs = pairs
        # How many there were at the last attach.
        self._count = 0
        self._state: _State | None = None
        self._closed = False

    @property
    def keeps_copy(self) -> bool:
        return False

    def attach(
        self,
        live: LiveTensors,
        share: Share,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,  # noqa: ARG002 (others use its state)
        read_back: ReadBack | None = None,
    ) -> Fingerprint:
        """As the port says.

        Raises:
            UsageError: a master whose elements don't lie as its parameter's do; or no pairs.
            LayoutChanged: the base has another layout than the share.
        """
        self._state, self._closed, self._count = None, False, 0
        if base is not None:
            share.local.require_equal(base.layout, what="the base")
        pairs = self._paired()
        masters, self._count = dict(_masters_of(live, pairs)), len(pairs)

        def read(spec: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            new = live[spec.name].bits(start, stop)
            return new if base is None else base.bits(spec.name)[start:stop], new

        changes = compare_share(share, read)
        kept = {change.name: change.now - change.increment for change in changes}
        copies = {
            spec.name: np.array(
                live[spec.name].bits(0, spec.items) if base is None else base.bits(spec.name)
            )
            for spec in share.local.tensors if spec.name not in masters
        }  # fmt: skip
        self._state = _State(
            share, live, masters, SomeWeights(share.local, copies), kept,
            copied={change.name: change.now for change in changes if change.name in masters},
            read_back=read_back,
            changes={c.name: deltas_of(share, [c]) for c in changes if c.name in masters},
        )  # fmt: skip
        size = sum(bits.nbytes for bits in copies.values())
        logger.info("copy-back: %d tensors have a master; %d bytes are kept", len(masters), size)
        return sum(kept.values(), ZERO)

    def copy(self) -> None:
        """Round every master into its parameter, and take down what that changes; once it is
        closed, training may go on with the copy alone.

        Raises:
            PublishError, UsageError: not attached yet; or fewer pairs than there were, or none.
                Nothing was copied.
        """
        if self._closed:
            self._round()
            return
        state = self._attached()

        def read(spec: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            master = state.masters[spec.name]
            return state.live[spec.name].bits(start, stop), master.bits(start, stop)

        changes = compare_share(state.share, read, names=state.masters)
        self._round()
        for change in changes:
            name = change.name
            if change.now - change.increment != state.copied[name]:
                state.lost.add(name)  # somebody else wrote to the parameter since the last copy
            before = state.changes.get(name, {})
            state.changes[name] = add_up(before, deltas_of(state.share, [change]))
            state.copied[name] = change.now

    def capture(self, live: LiveTensors) -> Capture:
        state = self._attached()
        state.live = live
        copies = state.copies.arrays

        def read(spec: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            new = live[spec.name].bits(start, stop)
            return copies[spec.name][start:stop] if spec.name in copies else new, new

        found = compare_share(state.share, read)
        own = [change for change in found if change.name in copies]
        _require_proven(own, state.kept, "the kept copy")
        state.captured = {change.name: change.now for change in found}
        state.captured_own = deltas_of(state.share, own)
        lost = state.lost | {n for n, now in state.copied.items() if now != state.captured[n]}
        copied = (changes for name, changes in state.changes.items() if name not in lost)
        total = sum_of((state.captured_own, _read_back(state, lost), *copied))
        return Capture(total, sum(state.captured.values(), ZERO), "full")

    def keep(self, capture: Capture) -> None:  # noqa: ARG002 (the capture left here what it needs)
        state = self._attached()
        apply_deltas(state.share, state.copies, state.captured_own)
        state.kept = dict(state.captured)
        state.copied = {name: state.captured[name] for name in state.copied}
        state.changes, state.captured_own, state.lost = {}, {}, set()

    @property
    def captured(self) -> Weights:
        state = self._attached()
        return LiveWeights(state.share.local, state.live)

    def close(self) -> None:
        """Let go of the copies. Closing twice is allowed."""
        self._state, self._closed = None, True

    def _paired(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs of now.

        Raises:
            UsageError: something else, or fewer than there were.
        """
        pairs = list(self._pairs())
        for pair in pairs:
            kinds = [isinstance(each, torch.Tensor) for each in pair] if _is_row(pair) else []
            if kinds != [True, True]:
                raise UsageError(
                    f"a pair is {type(pair).__name__}; expected a parameter and its master"
                )
        if len(pairs) < self._count:
            raise UsageError(
                f"{len(pairs)} pairs were given, and {self._count} when the detector attached",
                remedy="give all of them at every call: an iterator is used up after one; or "
                "attach again",
            )
        return pairs

    def _round(self) -> None:
        pairs = self._paired()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)

    def _attached(self) -> _State:
        if self._state is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self._state


def _is_row(pair: object) -> bool:
    return isinstance(pair, tuple | list)


def _read_back(state: _State, lost: set[str]) -> Deltas:
    """What changed in tensors whose kept state has to be fetched.

    Raises:
        PublishError: there is nowhere to fetch it from.
        FingerprintMismatch: what was fetched isn't the kept state.
    """
    if not lost:
        return {}
    told = ", ".join(sorted(lost)[:8])
    if state.read_back is None:
        raise PublishError(f"{told}: written to beside the copy from their masters")
    logger.warning("%s: written to beside the copy from their masters; reading them back", told)
    changes: list[TensorChange] = []
    for names in in_parts(state.share.layout, [n for n in state.copied if n in lost]):
        kept = state.read_back(names)

        def read(
            spec: TensorSpec, start: int, stop: int, kept: Weights = kept
        ) -> tuple[NDArray[Any], NDArray[Any]]:
            return kept.bits(spec.name)[start:stop], state.live[spec.name].bits(start, stop)

        changes += compare_share(state.share, read, names=names)
    _require_proven(changes, state.kept, "what was read back")
    return deltas_of(state.share, changes)


def _require_proven(
    changes: Iterable[TensorChange], kept: Mapping[str, Fingerprint], what: str
) -> None:
    if odd := [c.name for c in changes if c.now - c.increment != kept[c.name]]:
        raise FingerprintMismatch(
            f"{what} of {', '.join(odd[:8])} isn't the state that the last publish left",
            remedy="attach again",
        )


def _masters_of(
    live: LiveTensors, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[str, TensorView]]:
    """A view of the master for every live tensor that is, or lies in, one paired parameter."""
    held: dict[tuple[object, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, master in ((local_part(p), local_part(m)) for p, m in pairs):
        if parameter.shape != master.shape or parameter.stride() != master.stride():
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} and strides "
                f"{list(parameter.stride())} has a master of {list(master.shape)} and "
                f"{list(master.stride())}; expected the same"
            )
        held.setdefault(memory_of(parameter), []).append((parameter, master))
    for name, tensor in live.items():
        if not isinstance(tensor, TensorView) or tensor.tensor.dtype != tensor.dtype:
            continue
        view = tensor.tensor.detach()
        around = [pair for pair in held.get(memory_of(view), ()) if overlap(view, pair[0])]
        if len(around) == 1 and lies_within(view, around[0][0]):
            shown = same_view(view, *around[0])
            assert shown is not None  # their strides are equal
            yield name, TensorView(name, shown, tensor.dtype)
