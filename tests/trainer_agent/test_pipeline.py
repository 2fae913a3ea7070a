"""Capture is all that the training thread does; the rest follows behind it, in order."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from plait.errors import PlaitError, PublisherClosed
from plait_client.registry import RegistryClient
from plait_trainer import Capture, Publisher, SnapshotDetector
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.tiny_models import Run


class HeldClient(RegistryClient):
    """A client whose uploads wait until the test opens the gate."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def missing_chunks(self, digests: Sequence[str]) -> list[str]:
        self.reached.set()
        assert self.gate.wait(60)
        return super().missing_chunks(digests)


@pytest.fixture
def held(shared_registry: RegistryProcess) -> Iterator[HeldClient]:
    with HeldClient(shared_registry.url) as client:
        yield client


def test_publish_returns_while_the_worker_is_blocked(held: HeldClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=held, policy=policy) as publisher:
        publisher.publish().result()
        held.gate.clear()
        run.step()
        captured = run.expected()
        future = publisher.publish()  # returns although no upload can end
        run.step()  # and what happens to the weights now is none of its business
        later = publisher.publish()
        assert not future.done()
        assert not later.done()
        # Nothing of it shows before it is committed.
        assert held.version(policy, "main").seq == 1
        held.gate.set()
        assert (future.version.seq, later.version.seq) == (2, 3)
    assert_bits_equal(weights_at(held, policy, 2), captured)
    assert_bits_equal(weights_at(held, policy, 3), run.expected())


def test_a_full_queue_holds_the_trainer_back(held: HeldClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=held, policy=policy, queue_size=1) as publisher:
        publisher.publish().result()
        held.gate.clear()
        held.reached.clear()
        run.step()
        publisher.publish()
        assert held.reached.wait(60)  # the worker has it
        run.step()
        publisher.publish()  # and this one fills the queue
        run.step()
        third = threading.Event()

        def publish() -> None:
            publisher.publish()
            third.set()

        thread = threading.Thread(target=publish)
        thread.start()
        assert not third.is_set()
        held.gate.set()
        assert third.wait(60)
        thread.join()
        publisher.flush()
    assert held.version(policy, "main").seq == 4
    assert_bits_equal(weights_at(held, policy, 4), run.expected())


def test_a_full_queue_that_merges_publishes_the_sum(held: HeldClient, policy: str) -> None:
    run = Run()
    options = {"queue_size": 1, "when_full": "merge"}
    with Publisher(run.model, client=held, policy=policy, **options) as publisher:  # type: ignore[arg-type]
        publisher.publish().result()
        held.gate.clear()
        held.reached.clear()
        run.step()
        first = publisher.publish()
        assert held.reached.wait(60)
        rest = []
        for step in range(4):
            run.step()
            rest.append(publisher.publish({"step": step}))
        held.gate.set()
        assert first.version.seq == 2
        assert {future.version.seq for future in rest} == {3}
        assert rest[0].version.metadata == {"step": 3}
    assert_bits_equal(weights_at(held, policy, "main"), run.expected())


def test_closing_while_a_publish_waits_for_room_lets_it_go(held: HeldClient, policy: str) -> None:
    run = Run()
    publisher = Publisher(run.model, client=held, policy=policy, queue_size=1)
    publisher.publish().result()
    held.gate.clear()
    held.reached.clear()
    run.step()
    publisher.publish()
    assert held.reached.wait(60)
    run.step()
    publisher.publish()
    refused, waiting = threading.Event(), threading.Event()

    def publish() -> None:
        run.step()
        waiting.set()
        with pytest.raises(PublisherClosed):
            publisher.publish()
        refused.set()

    threads = [threading.Thread(target=publish)]
    threads[0].start()
    assert waiting.wait(60)
    threads.append(threading.Thread(target=publisher.close))
    threads[1].start()
    assert refused.wait(60)
    held.gate.set()
    for thread in threads:
        thread.join(60)
    assert held.version(policy, "main").seq == 3


def test_an_error_in_the_body_is_the_one_that_is_told(client: RegistryClient, policy: str) -> None:
    def failing_run() -> None:
        with Publisher(Run().model, client=client, policy=policy) as publisher:
            publisher.publish()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_run()
    assert client.version(policy, "main").seq == 1


class Interrupted(SnapshotDetector):
    """Ctrl-C at the worst moment: once, when the capture is taken over."""

    armed = False

    def keep(self, capture: Capture) -> None:
        if self.armed:
            self.armed = False
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        super().keep(capture)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_a_publish_on_its_way(client: RegistryClient, policy: str) -> None:
    run, detector = Run(), Interrupted()
    with Publisher(run.model, client=client, policy=policy, detector=detector) as publisher:
        publisher.publish().result()
        run.step()
        interrupted = run.expected()
        detector.armed = True
        with pytest.raises(KeyboardInterrupt):
            publisher.publish({"step": 1})
        run.step()
        assert publisher.publish({"step": 2}).version.seq == 3
    assert client.version(policy, "2").metadata == {"step": 1}
    assert_bits_equal(weights_at(client, policy, 2), interrupted)
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_metadata_is_what_it_was_when_the_publish_was_called(held: HeldClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=held, policy=policy) as publisher:
        held.gate.clear()
        facts = {"rewards": [1, 2]}
        future = publisher.publish(facts)
        facts["rewards"].append(3)
        held.gate.set()
        assert future.version.metadata == {"rewards": [1, 2]}


def test_flush_and_close_tell_of_a_publish_that_failed(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    publisher = Publisher(
        Run().model, client=client, policy=policy, side_files=tmp_path / "nowhere"
    )
    publisher.publish()
    with pytest.raises(PlaitError, match="side files come from a folder"):
        publisher.flush()
    with pytest.raises(PlaitError, match="side files come from a folder"):
        publisher.close()


def test_memory_and_descriptors_stay_flat_over_many_publishes(
    client: RegistryClient, policy: str
) -> None:
    weight = torch.zeros(1 << 18, dtype=torch.bfloat16)
    # A delta of this model takes 1.5 MiB: kept by mistake, seventy of them would show.
    flat_mib, publishes = 48, 110
    measured = {}
    with Publisher({"w": weight}, client=client, policy=policy) as publisher:
        for number in range(publishes):
            weight.view(torch.int16).add_(1)
            future = publisher.publish()
            if number in (40, publishes - 1):
                future.result()
                measured[number] = resident_mib(), len(list(Path("/proc/self/fd").iterdir()))
    (early, early_files), (late, late_files) = measured[40], measured[publishes - 1]
    assert late - early < flat_mib, measured
    assert late_files <= early_files + 2, measured


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
