"""The Group port: the processes that publish one policy together, and how they agree.

One primitive, `exchange`: everybody's item goes to rank 0, and its answer goes to everybody. Each
exchange carries the name of its step, so that processes which have gone separate ways are told so
instead of waiting for each other. Rank 0 speaks to each of them alone, and so knows who is lost.
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from plait.errors import PlaitError, PublishError

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")

LEADER: Final = 0


class Group(Protocol):
    """Processes in ranks. Every one of them makes the same exchanges in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, step: str, item: object, answer: Callable[[list[Any]], T]) -> T:
        """What rank 0's `answer` is to the items of all, in order of their ranks.

        Args:
            item, and the answer: can be pickled.
            answer: called on rank 0 only. It doesn't raise.
        Raises:
            PeerLost: a process is gone, or hasn't come within the group's timeout. Nothing can be
                exchanged from then on.
            PublishError: another process is at another step; and so, too, from then on.
        """
        ...

    def close(self, *, within: float | None = None) -> None:
        """Waits for the others to close it too, and lets go of it. Closing twice is allowed.

        Args:
            within: seconds to wait; by default the group's timeout.
        """
        ...


class Alone:
    """One process, which needs nobody."""

    rank = LEADER
    size = 1

    def exchange(self, step: str, item: object, answer: Callable[[list[Any]], T]) -> T:  # noqa: ARG002
        return answer([item])

    def close(self, *, within: float | None = None) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What an action has come to, as other processes may be told."""

    value: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], T]) -> "Outcome[T]":
        try:
            return cls(value=action())
        except Exception as error:  # noqa: BLE001 (`get` raises it)
            return cls(error=error)

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

    def told(self) -> "Outcome[T]":
        """For other processes, which may not know a library's own errors."""
        if self.error is None or _travels(self.error):
            return self
        return Outcome(error=PublishError(f"{type(self.error).__name__}: {self.error}"))


def agree(group: Group, step: str, mine: Outcome[T]) -> list[T]:
    """What every process's action has come to, in order of their ranks: if all succeeded.

    Raises:
        PublishError: another process's action failed; it is named. Whoever's own failed raises
            its own error.
    """
    return agreed(step, mine, group.exchange(step, mine.told(), lambda all_: all_))


def agreed(step: str, mine: Outcome[T], outcomes: Sequence[Outcome[T]]) -> list[T]:
    """The values of all outcomes; raises as `agree` does."""
    mine.get()
    refuse_failures(step, outcomes)
    return [outcome.get() for outcome in outcomes]


def refuse_failures(step: str, outcomes: Sequence[Outcome[Any]]) -> None:
    """Raises PublishError if any of them is an error."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    if failed:
        raise PublishError(
            f"to {step} failed on "
            + "; ".join(f"rank {rank}: {_in_words(error)}" for rank, error in failed),
            remedy="no process has moved on: once this is mended, the next publish carries "
            "everything",
            ranks=[rank for rank, _ in failed],
        )


def lead(group: Group, step: str, action: Callable[[], T]) -> T:
    """What rank 0's action has come to, on every process. Raises what it raised."""
    own: list[Outcome[T]] = []

    def answer(_: list[object]) -> Outcome[T]:
        own.append(Outcome.of(action))
        return own[0].told()

    told = group.exchange(step, None, answer)
    return own[0].get() if own else told.get()


def _travels(error: Exception) -> bool:
    """Whether it comes out of a message as what it was."""
    if not isinstance(error, PlaitError):
        return False
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception as untold:  # noqa: BLE001 (any class may have its own way to fail)
        logger.debug("%r is told in words: %s", error, untold)
        return False


def _in_words(error: Exception) -> str:
    return error.message if isinstance(error, PlaitError) else str(error)
