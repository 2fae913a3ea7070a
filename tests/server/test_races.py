"""Two trainers, two registry processes, one database: exactly one wins."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.server.lines import Line, Parts, code_of, grown_line
from tests.server.processes import RegistryProcess

ROUNDS = 15


def test_of_two_trainers_exactly_one_wins_each_round_and_the_other_loses_nothing(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    first, second = two
    with ThreadPoolExecutor(2) as pool:
        one = grown_line(first.http, 0)
        other = Line(second.http, policy=one.policy, actor="trainer-2")
        other.stand_on(one.seen[0])
        trainers = (one, other)
        for number in range(ROUNDS):
            parts = [trainer.delta() for trainer in trainers]
            barrier = Barrier(2)

            def race(trainer: Line, mine: Parts, start: Barrier = barrier) -> tuple[int, Line]:
                trainer.send(mine)
                start.wait(60)
                answer = trainer.post(mine)
                if answer.status_code == 201:
                    trainer.stand_on(answer.json())
                    return 201, trainer
                assert code_of(answer) == "head_moved"
                head = answer.json()["details"]["head"]
                assert head["actor"] != trainer.actor
                trainer.stand_on(head)
                return answer.status_code, trainer

            results = list(pool.map(race, trainers, parts))
            assert sorted(status for status, _ in results) == [201, 409]
            assert one.head == other.head
            assert one.seen[-1]["seq"] == number + 2


def test_eight_writers_get_distinct_consecutive_numbers(
    two: tuple[RegistryProcess, RegistryProcess],
) -> None:
    first, _ = two
    with ThreadPoolExecutor(8) as pool:
        root = grown_line(first.http, 0)

        def write(number: int) -> list[int]:
            line = Line(two[number % 2].http, policy=root.policy)
            line.channel = f"writer-{number}"
            line.stand_on(root.seen[0])
            line.head, line.generation = None, 0
            return [line.commit(line.delta())["seq"] for _ in range(6)]

        numbers = list(itertools.chain.from_iterable(pool.map(write, range(8))))
        assert sorted(numbers) == list(range(2, 50))
        events = first.http.get("/v1/events", params={"policy": root.policy}).json()["events"]
        revisions = [event["revision"] for event in events]
        assert revisions == list(range(revisions[0], revisions[0] + 1 + 2 * 49))
