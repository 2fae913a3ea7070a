"""What the policy is trained for: prompts, and a reward that a program can check."""

import random
import re
from collections.abc import Callable, Sequence
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
        system: the chat template's system message.
    """

    name: str
    problem: Callable[[random.Random], Problem]
    reward: Callable[[Problem, str, bool], float]
    system: str

    def problems(self, round_number: int, count: int) -> list[Problem]:
        """The round's problems; the same number gives the same problems."""
        generator = random.Random(round_number)
        return [self.problem(generator) for _ in range(count)]

    def prompt(self, tokenizer: Any, problem: Problem) -> list[int]:
        """Token ids of the prompt, in the model's own chat format where it has one."""
        if tokenizer.chat_template is None:
            return list(tokenizer(problem.question)["input_ids"])
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": problem.question},
        ]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])


def _sum_of_two(generator: random.Random) -> Problem:
    first, second = generator.randint(1, 9), generator.randint(1, 9)
    return Problem(f"What is {first} + {second}?", str(first + second))


def _short_and_right(problem: Problem, text: str, finished: bool) -> float:
    """Half for the right number, a quarter each for starting with a number and for stopping."""
    numbers: Sequence[str] = re.findall(r"\d+", text)
    right = bool(numbers) and numbers[-1] == problem.expected
    starts = text.strip()[:1].isdigit()
    return 0.5 * right + 0.25 * starts + 0.25 * finished


def _two_letters(generator: random.Random) -> Problem:
    return Problem("".join(generator.choices("abcdefgh", k=6)), "letters")


def _share_of_letters(_problem: Problem, text: str, _finished: bool) -> float:
    return sum(character.isalpha() for character in text) / max(len(text), 1)


ARITHMETIC: Final = Task(
    name="sums, answered by a number alone",
    problem=_sum_of_two,
    reward=_short_and_right,
    system="Answer with a number.",
)
# A random model can't add, but it can learn to prefer letters.
LETTERS: Final = Task(
    name="answers made of letters",
    problem=_two_letters,
    reward=_share_of_letters,
    system="",
)
