"""What helps against a refusal, in words of what is at hand: a publisher, a loop or a callback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from plait.errors import ConflictError, HeadMoved, UnknownBase
from plait_trainer.standing import Standing

Refusal: TypeAlias = HeadMoved | UnknownBase
Remedy: TypeAlias = Callable[[Refusal], str]


@contextmanager
def told(remedy: Remedy) -> Iterator[None]:
    """Refusals that are raised within say what helps."""
    try:
        yield
    except (HeadMoved, UnknownBase) as error:
        error.remedy = remedy(error)
        raise


def beginning_a_loop(error: Refusal) -> str:
    """Where a `PublishingLoop` is constructed."""
    if isinstance(error, HeadMoved):
        return f"load version {error.details['head']} before, or {_rebase(error)}"
    return (
        f"{_hint(error)}load a committed version before; or construct it with attach=False and "
        "call loop.publisher.attach(base=…) with the weights of one, to publish the difference to "
        "it; or new_anchor=True to start a new line"
    )


def beginning_training(error: Refusal) -> str:
    """Where a trainer begins with a `PlaitCallback`."""
    if isinstance(error, HeadMoved) and "held" in error.details:
        return (
            f"begin with the weights of version {error.details['head']}, or {_rebase(error)}: "
            "it is an option of PlaitCallback"
        )
    if isinstance(error, HeadMoved):
        return in_training(error)
    return (
        f"{_hint(error)}begin with the weights of a committed version, or resume from a checkpoint "
        "that the callback has left its file in; or pass new_anchor=True to PlaitCallback to start "
        "a new line"
    )


def in_training(error: Refusal) -> str:
    """Where a `PlaitCallback` publishes."""
    if isinstance(error, HeadMoved):
        return (
            "begin with the weights of the channel's version; or resume from the last checkpoint "
            "with PlaitCallback(rebase=True), to continue from its version all the same"
        )
    return error.remedy


def after_a_move(error: ConflictError, standing: Standing) -> str:
    """Where a publisher's commit is refused, since the channel isn't where it stands."""
    if standing.parent is None:
        return f"{error.remedy}; then attach again"
    seq = standing.parent.seq
    return (
        "load the channel's version and publisher.rebase(), or "
        f"publisher.rebase(to={seq}) to continue from version {seq} all the same"
    )


def _rebase(error: HeadMoved) -> str:
    return f"pass rebase=True to continue from version {error.details['held']} all the same"


def _hint(error: UnknownBase) -> str:
    hint: str = error.details.get("hint", "")
    return hint
