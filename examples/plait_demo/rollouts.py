"""Sampling: the answers that engines generate over HTTP, each stamped with the weights' version."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from plait.errors import EngineUnavailable
from plait_demo.task import Problem, Task

_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer.

    Attributes:
        tokens, logprobs: as generated; log-probabilities are empty unless asked for.
        text: decoded, special tokens left out.
        finished: it ended by itself, not at the length limit.
        version: the engine's stamp, `POLICY@SEQ#GENERATION`, of the weights that made it.
    """

    tokens: tuple[int, ...]
    text: str
    finished: bool
    version: str
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer with its prompt and reward. Samples of one `group` answer the same prompt."""

    group: int
    prompt: tuple[int, ...]
    answer: Answer
    reward: float


class Sampler:
    """The `/generate` side of one engine."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def sample(self, prompt: Sequence[int], count: int, max_new_tokens: int) -> list[Answer]:
        """`count` answers at temperature 1. Raises EngineUnavailable."""
        parameters = {"n": count, "temperature": 1.0, "max_new_tokens": max_new_tokens}
        return self._generate(prompt, parameters, logprobs=False)

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """The answer at temperature 0, with log-probabilities. Raises EngineUnavailable."""
        parameters = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        return self._generate(prompt, parameters, logprobs=True)[0]

    def forget_prompts(self) -> None:
        """Empties the prompt cache: a prompt half cached is computed in other blocks, so its
        log-probabilities may differ in the last bit.
        """
        self._post("/flush_cache", {})

    def version(self) -> str:
        """The engine's own stamp now; empty if it doesn't answer."""
        try:
            found = self._http.get("/model_info").raise_for_status().json()
        except httpx.HTTPError:
            return ""
        return str(found["weight_version"])

    def _generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], *, logprobs: bool
    ) -> list[Answer]:
        body = {
            "input_ids": list(prompt),
            "sampling_params": parameters,
            "return_logprob": logprobs,
        }
        answer = self._post("/generate", body).json()
        return [_answer(row) for row in (answer if isinstance(answer, list) else [answer])]

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return self._http.post(path, json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self._http.base_url}{path}: {error!r}") from error


def _answer(row: dict[str, Any]) -> Answer:
    meta = row["meta_info"]
    return Answer(
        tokens=tuple(row["output_ids"]),
        text=row["text"],
        finished=meta["finish_reason"]["type"] == "stop",
        version=meta["weight_version"],
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
    )


def collect(
    samplers: Sequence[Sampler],
    task: Task,
    prompts: Sequence[tuple[Problem, Sequence[int]]],
    *,
    group_size: int,
    max_new_tokens: int,
) -> list[Sample]:
    """`group_size` rewarded answers to each prompt, the prompts dealt out over the engines.

    Raises:
        EngineUnavailable: one of the engines doesn't answer.
    """

    def answer(group: int) -> list[Sample]:
        problem, prompt = prompts[group]
        answers = samplers[group % len(samplers)].sample(prompt, group_size, max_new_tokens)
        return [
            Sample(group, tuple(prompt), a, task.reward(problem, a.text, a.finished))
            for a in answers
        ]

    # All at once: the engines batch what they get.
    with ThreadPoolExecutor(max_workers=max(len(prompts), 1)) as pool:
        return [sample for group in pool.map(answer, range(len(prompts))) for sample in group]
