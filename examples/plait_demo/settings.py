"""What one run of the demo does, by model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plait_demo.model import ModelName
from plait_demo.task import ARITHMETIC, LETTERS, Task

POLICY: Final = "demo"
ROLLBACK: Final = 3  # versions


@dataclass(frozen=True, slots=True)
class Settings:
    """One run.

    Attributes:
        model: which base model.
        sglang: real SGLang engines; otherwise torch modules in processes of their own.
        tp: tensor-parallel ranks of each engine.
        task: what is trained for.
        steps: optimizer steps before the policy is rolled back; `steps_after` follow the restart
            of the trainer.
        learning_rate: of AdamW.
        prompts, group_size: of one round; `prompts x group_size` answers.
        max_new_tokens: of one answer.
        probes: fixed prompts whose greedy answers are recorded at every version.
        cache: keeps the converted base model between runs.
        home: the run's own folder: database, objects, caches, logs.
    """

    model: ModelName
    sglang: bool
    tp: int
    task: Task
    steps: int
    steps_after: int
    learning_rate: float
    prompts: int
    group_size: int
    max_new_tokens: int
    probes: int
    cache: Path
    home: Path


def settings_of(model: ModelName, *, sglang: bool, cache: Path, home: Path) -> Settings:
    """The usual run for a model: within ten minutes on two cores, the tiny one in seconds."""
    if model == "smollm2":
        return Settings(
            model, sglang, tp=1, task=ARITHMETIC, steps=6, steps_after=2, learning_rate=5e-6,
            prompts=12, group_size=8, max_new_tokens=4, probes=3, cache=cache, home=home,
        )  # fmt: skip
    return Settings(
        model, sglang, tp=2 if sglang else 1, task=LETTERS, steps=6, steps_after=2,
        learning_rate=1e-5, prompts=8, group_size=8, max_new_tokens=16, probes=3,
        cache=cache, home=home,
    )  # fmt: skip
