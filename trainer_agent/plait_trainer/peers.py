"""A process among those that publish with it: what they do together, on a thread of its own.

The training thread works; what came of it is exchanged by the keeper, which Ctrl-C can't reach. So
a process that is interrupted still tells the others that it won't come along.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from plait.errors import PublisherClosed, PublishError
from plait_trainer.group import Group, Outcome, agree, lead
from plait_trainer.lanes import Lanes
from plait_trainer.worker import Worker

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")


class Peers:
    """The processes that publish one policy together.

    Args:
        open_lanes: to the others; called once, by `open`.
    """

    def __init__(self, open_lanes: Callable[[], Lanes]) -> None:
        self._open_lanes = open_lanes
        self._lanes: Lanes | None = None
        self.keeper = Worker("plait-keep")

    def open(self) -> None:
        """Finds the others, who do the same; before anything else."""
        if self._lanes is None:
            self._lanes = self._open_lanes()

    @property
    def rank(self) -> int:
        return self._captures.rank

    @property
    def commits(self) -> Group:
        """For the worker, whose exchanges run beside the others."""
        return self._opened.commits

    def attempt(self, step: str, action: Callable[[], T]) -> Outcome[T]:
        """What this process's action comes to, for a later `agree` on the step.

        An interrupt is told to the others in its stead, without waiting for them.
        """
        try:
            return Outcome.of(action)
        except BaseException:
            self._give_up(step)
            raise

    def vote(self, step: str, mine: Outcome[T]) -> list[T]:
        """What every process's attempt has come to. On the keeper only.

        Raises:
            PublishError: another's failed, and is named; whose own failed raises its own error.
        """
        return agree(self._captures, step, mine)

    def agree(self, step: str, action: Callable[[], T]) -> list[T]:
        """What every process's action comes to; raises as `vote` does."""
        mine = self.attempt(step, action)
        return self.keeper.run(lambda: self.vote(step, mine))

    def lead(self, step: str, action: Callable[[], T]) -> T:
        """What rank 0's action comes to. Raises what it raises, on every process."""
        return self.keeper.run(lambda: lead(self._captures, step, action))

    def close(self, *, within: float | None = None) -> None:
        """Lets go of the others, once they have come as far. May be repeated."""
        if (lanes := self._lanes) is not None:
            try:
                self.keeper.run(lambda: lanes.close(within=within))
            except PublisherClosed:
                # The keeper has ended, with the program say: nobody else speaks to them any more.
                lanes.close(within=within)
        self.keeper.stop()

    def _give_up(self, step: str) -> None:
        given_up: Outcome[object] = Outcome(error=PublishError("it was interrupted"))
        try:
            self.keeper.start(lambda: self.vote(step, given_up))
        except PublisherClosed:
            # The interrupt itself has closed the publisher (a signal's handler): the others know.
            logger.debug("nobody is told that %r was interrupted: the publisher is closed", step)

    @property
    def _captures(self) -> Group:
        return self._opened.captures

    @property
    def _opened(self) -> Lanes:
        if self._lanes is None:
            raise PublishError("the publisher isn't attached", remedy="call attach() first")
        return self._lanes
