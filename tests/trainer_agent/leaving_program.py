"""Trainers that leave in a hurry: `python -m tests.trainer_agent.leaving_program URL POLICY HOW`.

Each has committed version 1, and has the next publish on its way as it leaves; the way waits until
the main thread is done, where HOW says that it ends without closing.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from plait.errors import UsageError
from plait_client.registry import RegistryClient
from plait_trainer import Capture, Publisher, SnapshotDetector
from plait_trainer.detector import LiveTensors
from tests.trainer_agent.tiny_models import Run


class LateClient(RegistryClient):
    """Its second publish and those behind it reach it once the main thread is done."""

    late = False

    def missing_chunks(self, digests: Sequence[str]) -> list[str]:
        if self.late:
            _await_the_end()
        return super().missing_chunks(digests)


def _await_the_end() -> None:
    """Until threads take no more work, which is how a program begins to end."""
    with ThreadPoolExecutor(1) as pool, contextlib.suppress(RuntimeError):
        while True:
            pool.submit(time.sleep, 0.01).result()


class Terminated(SnapshotDetector):
    """SIGTERM comes in the middle of a capture."""

    armed = False

    def capture(self, live: LiveTensors) -> Capture:
        if self.armed:
            signal.raise_signal(signal.SIGTERM)
        return super().capture(live)


def leave_open(client: LateClient, policy: str) -> None:
    run = Run()
    publisher = Publisher(run.model, client=client, policy=policy)
    publisher.publish().result()
    client.late = True
    for _ in range(2):
        run.step()
        publisher.publish()


def close_at_exit(client: LateClient, policy: str) -> None:
    run = Run()
    publisher = Publisher(run.model, client=client, policy=policy)
    atexit.register(publisher.close)
    publisher.publish().result()
    client.late = True
    run.step()
    publisher.publish()


def fail_inside(client: LateClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        run.step()
        publisher.publish()
        raise ValueError("a loss exploded")


def close_when_terminated(client: LateClient, policy: str) -> None:
    run, detector = Run(), Terminated()
    publisher = Publisher(run.model, client=client, policy=policy, detector=detector)

    def leave(*_: object) -> NoReturn:
        publisher.close()
        sys.exit(3)

    signal.signal(signal.SIGTERM, leave)
    publisher.publish().result()
    run.step()
    publisher.publish()
    run.step()
    detector.armed = True
    publisher.publish()


def fork(client: LateClient, policy: str) -> None:
    run = Run()
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        child = os.fork()
        if child == 0:
            os._exit(_refusals(publisher))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        run.step()
        publisher.publish().result()


def _refusals(publisher: Publisher) -> int:
    """How many calls are refused in a forked process."""
    calls: tuple[Callable[[], object], ...] = (
        publisher.publish, publisher.flush, publisher.state_dict, publisher.close,
    )  # fmt: skip
    refused = 0
    for call in calls:
        try:
            call()
        except UsageError as error:
            refused += "forked" in str(error)
    return refused


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    ways = {way.__name__: way for way in (
        leave_open, close_at_exit, fail_inside, close_when_terminated, fork,
    )}  # fmt: skip
    ways[sys.argv[3]](LateClient(sys.argv[1]), sys.argv[2])
