"""Torch's processes as a group: over gloo, in a process group that nobody else uses.

The training's own collectives may run on any device and in any order beside it. Messages are
pickled: they stay within one training job.
"""

import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import distributed

from plait.errors import PeerLost, PlaitError, PublishError
from plait_trainer.group import LEADER

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")

_CLOSE: Final = "close"
_EVERYBODY: Final = "every process of the group constructs one; or pass group=False"

# How many groups of the same processes this one has opened.
_opened: Counter[tuple[int, ...]] = Counter()


class TorchGroup:
    """The processes of a torch process group, as a `Group`. Used by one thread at a time.

    Every process of the group opens it, in the same order as its other groups.

    Args:
        parent: whose processes they are; by default all of them.
        timeout: seconds that one of them waits for another.
        open_within: seconds that one of them waits for the others to open it; by default the same.

    Raises:
        PeerLost: one of them hasn't come within that time.
    """

    def __init__(
        self,
        parent: distributed.ProcessGroup | None = None,
        *,
        timeout: float = 1800.0,
        open_within: float | None = None,
    ) -> None:
        ranks = tuple(distributed.get_process_group_ranks(parent or distributed.group.WORLD))
        self.rank: int = ranks.index(distributed.get_rank())
        self.size: int = len(ranks)
        # Not new_group: it takes every process of the job, or gives a group of some of them the
        # name, and with it the stale addresses, of an earlier one.
        _opened[ranks] += 1
        store = torch.distributed.PrefixStore(  # type: ignore[attr-defined]
            f"plait/{'-'.join(map(str, ranks))}/{_opened[ranks]}",
            distributed.distributed_c10d._get_default_store(),
        )
        _meet(store, self.rank, ranks, timeout if open_within is None else open_within)
        try:
            self._group: distributed.ProcessGroupGloo | None = distributed.ProcessGroupGloo(
                store, self.rank, self.size, timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise PeerLost(
                f"one of the ranks {list(ranks)} went while they opened a publisher: {error}",
                remedy=_EVERYBODY,
            ) from error
        self._timeout = timeout
        self._over: PlaitError | None = None
        self._closed = False

    def exchange(self, step: str, item: object, answer: Callable[[list[Any]], T]) -> T:
        if self._over is not None:
            raise type(self._over)(self._over.message, remedy=self._over.remedy)
        try:
            if self.rank != LEADER:
                return self._follow(step, item, self._timeout)  # type: ignore[no-any-return]
            return self._answer(step, item, answer)
        except PlaitError as error:
            self._over = error
            raise

    def close(self, *, within: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        timeout = self._timeout if within is None else min(within, self._timeout)
        if self._over is None:
            try:
                # Gloo aborts where a process leaves while another one still speaks to it.
                if self.rank == LEADER:
                    self._gather(_CLOSE, None, timeout)
                    self._tell("done", None, timeout)
                else:
                    self._follow(_CLOSE, None, timeout)
            except PlaitError as error:
                logger.warning("the group of publishers closes without the others: %s", error)
        self._over = PublishError("the group of publishers is closed")
        self._group = None

    def _answer(self, step: str, item: object, answer: Callable[[list[Any]], T]) -> T:
        items = self._gather(step, item, self._timeout)
        answered = answer(items)
        self._tell("done", answered, self._timeout)
        return answered

    def _gather(self, step: str, item: object, timeout: float) -> list[Any]:
        """Everybody's item; or everybody is told why not."""
        items, lost, elsewhere = [item], [], []
        for rank in range(1, self.size):
            began = time.monotonic()
            try:
                at, theirs = self._receive(rank, timeout)
            except RuntimeError as error:
                logger.debug("rank %d: %s", rank, error)
                lost.append(rank)
                if time.monotonic() - began < timeout:
                    continue
                break  # gloo has given up all connections with this one: the others say nothing
            items.append(theirs)
            if at != step:
                elsewhere.append(f"rank {rank} is at {at!r}")
        if lost or elsewhere:
            refusal = _lost(lost, step) if lost else _apart(step, elsewhere)
            self._tell("refused", refusal, timeout, but=lost)
            raise refusal
        return items

    def _tell(
        self, kind: str, what: object, timeout: float, *, but: list[int] | None = None
    ) -> None:
        """Whoever can't be told is lost; what was answered stands."""
        message = pickle.dumps((kind, what))
        lost = []
        for rank in range(1, self.size):
            if rank in (but or ()):
                continue
            try:
                self._send(rank, message, timeout)
            except RuntimeError as error:
                logger.debug("rank %d: %s", rank, error)
                lost.append(rank)
        if lost:
            self._over = _lost(lost, "the next step")

    def _follow(self, step: str, item: object, timeout: float) -> Any:
        try:
            self._send(LEADER, pickle.dumps((step, item)), timeout)
            kind, what = self._receive(LEADER, timeout)
        except RuntimeError as error:
            raise _lost([LEADER], step) from error
        if kind == "refused":
            raise what
        return what

    @property
    def _gloo(self) -> Any:
        """Torch's type of it says nothing of `send` and `recv`."""
        assert self._group is not None
        return self._group

    def _send(self, rank: int, message: bytes, timeout: float) -> None:
        size = torch.tensor([len(message)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for tensor in (size, body):
            self._gloo.send([tensor], rank, 0).wait(timedelta(seconds=timeout))

    def _receive(self, rank: int, timeout: float) -> tuple[str, Any]:
        size = torch.empty(1, dtype=torch.int64)
        self._gloo.recv([size], rank, 0).wait(timedelta(seconds=timeout))
        body = torch.empty(int(size), dtype=torch.uint8)
        self._gloo.recv([body], rank, 0).wait(timedelta(seconds=timeout))
        what: tuple[str, Any] = pickle.loads(body.numpy().tobytes())
        return what


def _meet(store: Any, rank: int, ranks: Sequence[int], within: float) -> None:
    """Returns once every process has come: gloo would wait for each of them in turn.

    Raises:
        PeerLost: some haven't in time; they are named.
    """
    names = [f"here/{each}" for each in range(len(ranks))]
    store.set(names[rank], "")
    try:
        store.wait(names, timedelta(seconds=within))
    except RuntimeError as error:
        absent = [job for job, name in zip(ranks, names, strict=True) if not store.check([name])]
        raise PeerLost(
            f"rank {', '.join(map(str, absent))} of the ranks {list(ranks)} hasn't opened a "
            f"publisher within {within:g} s",
            remedy=_EVERYBODY,
            ranks=absent,
        ) from error


def _lost(ranks: list[int], step: str) -> PeerLost:
    names = ", ".join(map(str, ranks))
    return PeerLost(
        f"rank {names} of the group of publishers is gone, or didn't come to {step!r} in time",
        remedy="restart the job from its checkpoint: what was committed is found by content",
        ranks=ranks,
    )


def _apart(step: str, elsewhere: list[str]) -> PublishError:
    return PublishError(
        f"rank {LEADER} is at {step!r}, but {', '.join(elsewhere)}",
        remedy="every process makes the same calls of its Publisher in the same order",
    )
