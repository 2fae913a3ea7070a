"""The codec's threads: where they run, what they return, and what they leave alone."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from plait import workers
from plait.errors import UsageError
from plait.workers import Workers, allowed_cpus

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def four() -> Iterator[Workers]:
    with Workers(4) as pool:
        yield pool


def masks_of(pool: Workers) -> list[set[int]]:
    """Each worker's mask: a barrier holds every worker until all have one item."""
    barrier = threading.Barrier(pool.size, timeout=120)

    def mask(_: int) -> set[int]:
        barrier.wait()
        return os.sched_getaffinity(0)

    return pool.map(mask, range(pool.size))


def in_a_process(code: str, **variables: str) -> str:
    command = [sys.executable, "-c", code]
    environment = os.environ | variables
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, timeout=300
    ).stdout.strip()


def test_there_is_a_worker_for_each_cpu_and_each_has_its_own() -> None:
    with Workers() as pool:
        assert pool.size == len(CPUS)
        if len(CPUS) > 1:
            assert sorted(masks_of(pool), key=min) == [{cpu} for cpu in CPUS]


def test_more_workers_than_cpus_share_them_evenly() -> None:
    with Workers(2 * len(CPUS)) as pool:
        masks = masks_of(pool)
    if len(CPUS) > 1:
        assert sorted(masks, key=min) == [{cpu} for cpu in CPUS for _ in range(2)]


def test_pins_stay_within_the_process_s_own_mask() -> None:
    code = (
        "import os, threading; os.sched_setaffinity(0, {%d})\n"
        "from plait.workers import Workers, allowed_cpus, shared\n"
        "print(allowed_cpus(), shared().size)\n"
        "print(Workers(3).map(lambda _: os.sched_getaffinity(0), range(3)))"
    )
    cpu = CPUS[-1]
    assert in_a_process(code % cpu).splitlines() == [f"({cpu},) 1", str([{cpu}] * 3)]


def test_workers_may_be_left_unpinned() -> None:
    with Workers(2, pinned=False) as pool:
        assert masks_of(pool) == [set(CPUS)] * 2


def test_a_single_worker_is_left_unpinned() -> None:
    with Workers(1) as pool:
        assert pool.submit(os.sched_getaffinity, 0).result(timeout=120) == set(CPUS)


def test_a_pin_reaches_neither_the_caller_nor_what_others_start(four: Workers) -> None:
    masks_of(four)
    assert os.sched_getaffinity(0) == set(CPUS)
    child = in_a_process("import os; print(sorted(os.sched_getaffinity(0)))")
    assert child == str(CPUS)
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert seen == [set(CPUS)]


def test_a_worker_sees_the_cpus_of_the_process(four: Workers) -> None:
    assert four.map(lambda _: allowed_cpus(), range(8)) == [tuple(CPUS)] * 8


def test_a_cpu_that_can_t_be_had_costs_the_pin_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "allowed_cpus", lambda: (4000, 4001))
    with Workers(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
    assert "isn't pinned to CPU 400" in caplog.text


def test_results_come_in_the_order_of_the_items(four: Workers) -> None:
    assert four.map(lambda number: number * number, range(1000)) == [n * n for n in range(1000)]
    assert four.map(abs, []) == []


def test_no_more_take_part_than_were_asked_for(four: Workers) -> None:
    names = four.map(lambda _: threading.current_thread().name, range(200), at_once=2)
    assert len(set(names)) <= 2
    names = four.map(lambda _: threading.current_thread().name, range(5), at_once=1)
    assert set(names) == {threading.current_thread().name}


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_item_that_fails_is_the_one_that_is_told(count: int) -> None:
    def work(number: int) -> int:
        if number in (50, 51, 900):
            raise ValueError(number)
        return number

    with Workers(count) as pool:
        with pytest.raises(ValueError, match=r"^50$"):
            pool.map(work, range(1000))
        assert pool.map(work, range(10)) == list(range(10))


def test_work_that_shares_out_work_doesn_t_wait_for_itself() -> None:
    with Workers(2) as outer, Workers(2) as inner:
        for pool in (outer, inner):
            found = outer.map(lambda n, pool=pool: sum(pool.map(abs, range(n))), range(50))  # type: ignore[misc]
            assert found == [sum(range(n)) for n in range(50)]


def test_many_callers_share_the_process_s_workers() -> None:
    found: dict[int, list[int]] = {}

    def call(caller: int) -> None:
        found[caller] = workers.shared().map(lambda n: n + caller, range(200))

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert found == {caller: list(range(caller, caller + 200)) for caller in range(8)}


def test_a_forked_child_has_workers_of_its_own() -> None:
    code = (
        "import os, signal, warnings; from plait.workers import shared\n"
        "warnings.simplefilter('ignore')\n"
        "before = shared(); before.map(abs, range(100))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(120)\n"
        "    fine = shared() is not before and shared().map(abs, [-1, -2, -3]) == [1, 2, 3]\n"
        "    os._exit(0 if fine else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert in_a_process(code) == "0"


def test_a_setting_says_how_many_the_process_has() -> None:
    code = "from plait.workers import shared; print(shared().size)"
    assert in_a_process(code, PLAIT_WORKERS="3") == "3"
    assert in_a_process(code, PLAIT_WORKERS="") == str(len(CPUS))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_setting_that_is_no_number_of_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(workers, "_shared", None)
    monkeypatch.setenv(workers.VARIABLE, text)
    with pytest.raises(UsageError, match=r"PLAIT_WORKERS is .*; expected a number from 1 up"):
        workers.shared()


def test_there_is_at_least_one_worker() -> None:
    with pytest.raises(UsageError, match="0 workers"):
        Workers(0)
