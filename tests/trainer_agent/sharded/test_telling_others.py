"""What came of an action, as it is told to other processes."""

import pickle

import pytest

from plait.errors import HeadMoved, PlaitError, PublishError
from plait_trainer.group import Outcome


class Peculiar(PublishError):
    """An error of somebody's own, which is made from other words than it says."""

    code = "peculiar"

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(f"{name} is beyond {limit}")


def told(error: Exception) -> Exception:
    outcome: Outcome[None] = pickle.loads(pickle.dumps(Outcome[None](error=error).told()))
    assert outcome.error is not None
    return outcome.error


def test_an_error_of_the_tree_is_told_with_all_that_it_says() -> None:
    found = told(HeadMoved("moved", remedy="rebase", held=1))
    assert isinstance(found, HeadMoved)
    assert (found.message, found.remedy, found.details) == ("moved", "rebase", {"held": 1})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (Peculiar("rank", 3), "Peculiar: rank is beyond 3"),
        (PublishError("held", by=lambda: None), "PublishError: held"),
    ],
    ids=["another library's", "can't be made again", "can't be sent"],
)
def test_whatever_cannot_be_sent_is_told_in_words(error: Exception, words: str) -> None:
    """Nobody is left waiting because the message broke on its way."""
    found = told(error)
    assert type(found) is PublishError
    assert isinstance(found, PlaitError)
    assert found.message == words


def test_a_result_is_told_as_it_is() -> None:
    outcome = Outcome(value=3)
    assert outcome.told() is outcome
