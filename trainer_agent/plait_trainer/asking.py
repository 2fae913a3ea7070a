"""Questions to the registry that one process asks for all, for as long as patience lasts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from plait.errors import PlaitError
from plait_trainer.patience import Patience, Waiting
from plait_trainer.peers import Peers

T = TypeVar("T")


@dataclass(frozen=True)
class _Again:
    """No answer yet.

    Attributes:
        seconds: to wait before the next try.
    """

    seconds: float


def ask(peers: Peers, patience: Patience, step: str, question: Callable[[], T]) -> T:
    """What rank 0's question comes to, on every process.

    Rank 0's patience is everybody's. Each try is an exchange of its own, so that the pauses between
    them are the caller's, which Ctrl-C ends and `patience.stopping` too.

    Args:
        question: changes nothing, and may be repeated.
    Raises:
        PlaitError: what the last try raised.
    """
    tries = _Tries(question, patience)
    while True:
        answer = peers.lead(step, tries.next)
        if not isinstance(answer, _Again):
            return answer
        patience.stopping.wait(answer.seconds)


class _Tries(Generic[T]):
    def __init__(self, question: Callable[[], T], patience: Patience) -> None:
        self._question, self._patience = question, patience
        self._waiting = Waiting(patience)
        self._last: PlaitError | None = None

    def next(self) -> T | _Again:
        if self._last is not None and self._patience.stopping.is_set():
            raise self._last
        try:
            return self._question()
        except PlaitError as error:
            self._last = error
            return _Again(self._waiting.pause_after(error))
