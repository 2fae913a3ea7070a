"""The queue between the training thread and the worker."""

import threading

import numpy as np
import pytest

from plait.codec.algebra import FrameDelta
from plait.errors import PublisherClosed, UsageError
from plait.fingerprint import Fingerprint
from plait_trainer.deltas import add_up
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.outbox import Outbox, Publish
from plait_trainer.steps import Step


def delta(position: int, difference: int, increment: int) -> FrameDelta:
    return FrameDelta(
        2, np.array([position], np.uint32), np.array([difference], np.uint16),
        Fingerprint(increment, increment),
    )  # fmt: skip


def publish(number: int) -> Publish:
    metrics = PublishMetrics(detect_seconds=1.0)
    step = Step(number, {0: delta(number, 1, number)})
    return Publish(
        step, Fingerprint(number), "full", {"step": number}, metrics,
        [PublishFuture(metrics)],
    )  # fmt: skip


def test_publishes_leave_in_the_order_in_which_they_came() -> None:
    outbox = Outbox(3, "wait")
    for number in range(3):
        outbox.await_room()
        assert outbox.put(publish(number))
    assert [outbox.take().metadata["step"] for _ in range(3)] == [0, 1, 2]


def test_a_full_queue_waits_until_the_worker_takes_one() -> None:
    outbox = Outbox(1, "wait")
    outbox.put(publish(0))
    waiting, through = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        outbox.await_room()
        through.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30)
    assert not through.is_set()
    outbox.take()
    assert through.wait(30)
    thread.join()


def test_a_full_queue_that_merges_adds_to_the_last_one() -> None:
    outbox = Outbox(1, "merge")
    assert outbox.put(publish(1))
    outbox.await_room()
    assert not outbox.put(publish(2))
    merged = outbox.take()
    assert merged.step.deltas[0].positions.tolist() == [1, 2]
    assert merged.step.deltas[0].increment == Fingerprint(3, 3)
    assert merged.fingerprint == Fingerprint(2)
    assert merged.metadata == {"step": 2}
    assert len(merged.futures) == 2
    assert all(future.metrics is merged.metrics for future in merged.futures)
    assert merged.metrics.detect_seconds == 2.0


def test_closing_wakes_whoever_waits_for_room() -> None:
    outbox = Outbox(1, "wait")
    outbox.put(publish(0))
    refused = threading.Event()

    def wait() -> None:
        with pytest.raises(PublisherClosed):
            outbox.await_room()
        refused.set()

    thread = threading.Thread(target=wait)
    thread.start()
    outbox.close()
    assert refused.wait(30)
    thread.join()
    assert outbox.take().metadata == {"step": 0}


@pytest.mark.parametrize(("size", "when_full"), [(0, "wait"), (1, "drop")])
def test_a_queue_that_there_is_not_is_refused(size: int, when_full: str) -> None:
    with pytest.raises(UsageError, match=r"queue_size is 0|when_full is 'drop'"):
        Outbox(size, when_full)  # type: ignore[arg-type]


def test_changes_that_go_back_leave_nothing_behind() -> None:
    there, back = {0: delta(3, 5, 9), 1: delta(0, 1, 1)}, {0: delta(3, 0x10000 - 5, -9)}
    assert list(add_up(there, back)) == [1]
    assert add_up({}, there) is there
    assert add_up(there, {}) is there


def test_a_publish_cannot_be_cancelled() -> None:
    future = PublishFuture(PublishMetrics())
    assert not future.cancel()
    assert not future.cancelled()
