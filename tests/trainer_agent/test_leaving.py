"""Trainers that leave without ceremony, and calls that come from where they must not."""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from plait.errors import PublisherClosed, UsageError
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.worker import Worker
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.tiny_models import Run

ROOT = Path(__file__).parents[2]


def leave(
    registry: RegistryProcess, policy: str, how: str, code: int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.trainer_agent.leaving_program", registry.url, policy]
    done = subprocess.run(
        [*command, how], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("how", ["leave_open", "close_at_exit"])
def test_a_program_that_ends_without_closing_is_told_what_it_lost(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, how: str
) -> None:
    done = leave(shared_registry, policy, how, 0)
    assert "the program ended before this publish was committed" in done.stderr
    assert "use it in a with statement" in done.stderr
    assert client.version(policy, "main").seq == 1


def test_what_was_published_before_an_error_is_committed(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str
) -> None:
    assert "a loss exploded" in leave(shared_registry, policy, "fail_inside", 1).stderr
    assert client.version(policy, "main").seq == 2


def test_a_signal_that_closes_and_exits_amid_a_capture_does_just_that(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str
) -> None:
    done = leave(shared_registry, policy, "close_when_terminated", 3)
    assert "Traceback" not in done.stderr
    assert client.version(policy, "main").seq == 2  # what was captured before; not the half


def test_a_forked_process_is_refused_and_its_parent_goes_on(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str
) -> None:
    leave(shared_registry, policy, "fork", 0)
    assert client.version(policy, "main").seq == 2


@pytest.mark.parametrize("call", ["publish", "flush", "attach", "state_dict", "close"])
def test_a_callback_of_a_future_is_refused_and_does_not_wait_for_itself(
    client: RegistryClient, policy: str, call: str
) -> None:
    run, told = Run(), Future[BaseException]()
    with Publisher(run.model, client=client, policy=policy) as publisher:

        def again(_: object) -> None:
            with pytest.raises(UsageError, match="callback") as refused:
                getattr(publisher, call)()
            told.set_result(refused.value)

        publisher.publish().add_done_callback(again)
        assert isinstance(told.result(60), UsageError)
        run.step()
        assert publisher.publish().version.seq == 2


class InterruptingClient(RegistryClient):
    """Ctrl-C comes while the main thread closes the publisher, which waits for this upload."""

    armed = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.closing, self.gate = threading.Event(), threading.Event()

    def missing_chunks(self, digests: Sequence[str]) -> list[str]:
        if self.armed:
            self.armed = False
            assert self.closing.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.gate.wait(60)
        return super().missing_chunks(digests)


@pytest.mark.usefixtures("ctrl_c")
def test_closing_goes_on_where_ctrl_c_ended_it(
    shared_registry: RegistryProcess, policy: str
) -> None:
    run = Run()
    with InterruptingClient(shared_registry.url) as client:
        publisher = Publisher(run.model, client=client, policy=policy)
        publisher.publish().result()
        run.step()
        client.armed = True
        future = publisher.publish()

        def close() -> None:
            client.closing.set()
            publisher.close()

        with pytest.raises(KeyboardInterrupt):
            close()
        assert not future.done()
        with pytest.raises(PublisherClosed):
            publisher.publish()
        client.gate.set()
        publisher.close()
        assert future.done()
        assert future.version.seq == 2
        assert_bits_equal(weights_at(client, policy, 2), run.expected())
        publisher.close()


def test_a_worker_that_was_stopped_waits_for_what_it_was_given() -> None:
    worker, gate, done = Worker("test"), threading.Event(), list[int]()
    worker.start(lambda: done.append(gate.wait(60)))
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    while not worker._stopped:
        wait([], timeout=0)
    gate.set()
    worker.await_idle()
    assert done == [True]
    stopping.join()
    for call in (worker.start, worker.run):
        with pytest.raises(PublisherClosed, match="closed"):
            call(lambda: None)


def test_a_client_that_is_closed_first_is_named(
    shared_registry: RegistryProcess, policy: str
) -> None:
    run = Run()
    with RegistryClient(shared_registry.url) as client:
        publisher = Publisher(run.model, client=client, policy=policy)
        publisher.publish().result()
    run.step()
    with pytest.raises(UsageError, match="is closed"):
        publisher.publish().result()
    with pytest.raises(UsageError, match="is closed"):
        publisher.close()
