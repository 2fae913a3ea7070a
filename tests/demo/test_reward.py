"""Rewards and advantages: what the demo's policy is trained for."""

import pytest

from plait_demo.learner import group_relative
from plait_demo.rollouts import Answer, Sample
from plait_demo.task import ARITHMETIC, LETTERS, Problem


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" 7\n", 1.0),
        (" 7 apples", 0.75),
        (" 8\n1", 0.25),
        (" 8 or 7", 0.0),
        (" 77\n", 0.25),
        ("seven, so 7\n", 0.0),
        ("", 0.0),
    ],
)
def test_a_sum_earns_three_quarters_for_the_number_and_one_for_its_own_line(
    text: str, reward: float
) -> None:
    assert ARITHMETIC.reward(Problem("3 + 4 =", "7"), text, False) == reward


def test_letters_earn_their_share_and_an_empty_answer_nothing() -> None:
    problem = Problem("abc", "letters")
    assert LETTERS.reward(problem, "ab12", False) == 0.5
    assert LETTERS.reward(problem, "", True) == 0.0


def test_a_seed_gives_the_same_problems_each_time() -> None:
    assert ARITHMETIC.problems(3, 20) == ARITHMETIC.problems(3, 20)
    assert ARITHMETIC.problems(3, 20) != ARITHMETIC.problems(4, 20)


def test_advantages_are_relative_to_the_group_and_vanish_where_all_answers_are_alike() -> None:
    answer = Answer(tokens=(1,), text="", finished=True, version="demo@1#1")
    samples = [
        Sample(group, (1,), answer, reward)
        for group, reward in ((0, 0.0), (0, 1.0), (1, 0.5), (1, 0.5))
    ]
    low, high, *alike = group_relative(samples)
    assert low == -high
    assert high == pytest.approx(1.0, abs=1e-3)
    assert alike == [0.0, 0.0]
