"""The generation gate: many readers generate, or one writer changes weights; never both."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from plait.errors import EngineRefused, ReplicaUnproven


class GenerationGate:
    """Readers pass while it is open. Closing waits for those inside and holds new ones back.

    A gate that was condemned stays closed: weights that aren't proven are not to be read.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False
        self._condemned = ""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around one read of the weights. Not to be nested: a closing gate would wait for ever.

        Raises:
            ReplicaUnproven: the weights behind it are not proven.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._closed or bool(self._condemned))
            if self._condemned:
                raise ReplicaUnproven(self._condemned, remedy="attach the engine again")
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def close(self, *, within_seconds: float) -> None:
        """Holds new readers back, and returns when none is inside.

        Raises:
            EngineRefused: one stayed inside for too long; the gate is as it was.
        """
        with self._condition:
            was_closed = self._closed
            self._closed = True
            if not self._condition.wait_for(lambda: self._inside == 0, timeout=within_seconds):
                self._closed = was_closed
                self._condition.notify_all()
                raise EngineRefused(
                    f"{self._inside} readers did not finish within {within_seconds} s",
                    remedy="generate in shorter turns, or allow a longer pause",
                )

    def open(self) -> None:
        """Lets readers in: what is behind it is proven."""
        with self._condition:
            self._closed, self._condemned = False, ""
            self._condition.notify_all()

    @property
    def condemned(self) -> bool:
        return bool(self._condemned)

    def condemn(self, why: str) -> None:
        """Turns readers away until it is opened again."""
        with self._condition:
            self._closed, self._condemned = True, why
            self._condition.notify_all()
