"""Waiting for a registry that is away: for as long as asked, and no longer."""

import threading
from typing import Any

import pytest

from plait.errors import HeadMoved, RegistryUnavailable
from plait_trainer.patience import Patience


class Never(threading.Event):
    """Waits for no time at all, and remembers how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        return self.is_set()


def away_for(times: int) -> Any:
    left = [times]

    def action() -> str:
        if left[0] == 0:
            return "done"
        left[0] -= 1
        raise RegistryUnavailable("away")

    return action


def test_a_registry_may_be_away_for_thousands_of_attempts() -> None:
    stopping = Never()
    assert Patience(1e9, stopping).get(away_for(3000)) == "done"
    assert len(stopping.pauses) == 3000
    assert 0 < min(stopping.pauses) <= max(stopping.pauses) <= 4


def test_what_isnt_absence_is_raised_at_once() -> None:
    stopping = Never()

    def action() -> None:
        raise HeadMoved("moved")

    with pytest.raises(HeadMoved):
        Patience(1e9, stopping).get(action)
    assert stopping.pauses == []


def test_without_patience_the_first_absence_is_told() -> None:
    with pytest.raises(RegistryUnavailable):
        Patience(0.0).get(away_for(1))
