"""What the policy is trained for: prompts, and a reward that a program can check."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt. `expected` is what a right answer says."""

    question: str
    expected: str


@dataclass(frozen=True, slots=True)
class Task:
    """A family of problems and how an answer is judged.

    Attributes:
        name: for people.
        problem: makes one problem from a random generator.
        reward: judges (problem, answer text, whether the answer ended by itself): 0 to 1.
    """

    name: str
    problem: Callable[[random.Random], Problem]
    reward: Callable[[Problem, str, bool], float]

    def problems(self, round_number: int, count: int) -> list[Problem]:
        """The round's problems; the same number gives the same problems."""
        generator = random.Random(round_number)
        return [self.problem(generator) for _ in range(count)]

    def prompt(self, tokenizer: Any, problem: Problem) -> list[int]:
        """Token ids of the prompt."""
        return list(tokenizer(problem.question)["input_ids"])


def _sum_of_two(generator: random.Random) -> Problem:
    first, second = generator.randint(1, 9), generator.randint(1, 9)
    return Problem(f"2 + 3 = 5\n4 + 1 = 5\n{first} + {second} =", str(first + second))


def _right_and_alone(problem: Problem, text: str, _finished: bool) -> float:
    """Three quarters for the right number, a quarter for nothing else on its line."""
    number = re.match(r"\s*(\d+)", text)
    if number is None:
        return 0.0
    return 0.75 * (number[1] == problem.expected) + 0.25 * text[number.end() :].startswith("\n")


def _two_letters(generator: random.Random) -> Problem:
    return Problem("".join(generator.choices("abcdefgh", k=6)), "letters")


def _share_of_letters(_problem: Problem, text: str, _finished: bool) -> float:
    return sum(character.isalpha() for character in text) / max(len(text), 1)


ARITHMETIC: Final = Task(
    name="sums, answered by the right number alone",
    problem=_sum_of_two,
    reward=_right_and_alone,
)
# A random model can't add, but it can learn to prefer letters.
LETTERS: Final = Task(
    name="answers made of letters",
    problem=_two_letters,
    reward=_share_of_letters,
)
