"""A real transformers Trainer with the callback: its checkpoints are versions, and runs resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from plait.errors import HeadMoved, PublisherClosed, UnknownBase, UsageError
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_trainer.callback import STATE_FILE, PlaitCallback
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.test_publish_faults import move

ROOT = Path(__file__).parents[2]


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) * (index + 1) % 32
        return {"input_ids": tokens, "labels": tokens}


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


def trainer_of(folder: Path, callback: PlaitCallback, *, steps: int, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3,
        save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        **options,
    )  # fmt: skip
    return Trainer(
        model=tiny_model(), args=arguments, train_dataset=Lines(), eval_dataset=Lines(),
        callbacks=[callback],
    )  # fmt: skip


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def test_checkpoints_are_versions_and_a_resumed_run_continues_the_line(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    callback = PlaitCallback(policy=policy, every=2, client=client)
    trainer = trainer_of(tmp_path / "run", callback, steps=5)
    trainer.train()
    versions = client.versions(policy).versions
    assert [version.metadata["step"] for version in versions] == [5, 4, 3, 2, 0]
    assert versions[0].metadata["learning_rate"] >= 0
    assert_bits_equal(weights_at(client, policy, "main"), published(trainer.model))

    saved = torch.load(tmp_path / "run" / "checkpoint-5" / STATE_FILE.format(rank=0))
    assert saved["steps"] == 5

    again = PlaitCallback(policy=policy, every=2, client=client)
    resumed = trainer_of(tmp_path / "run", again, steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    steps = [version.metadata["step"] for version in client.versions(policy).versions]
    assert steps == [8, 6, 5, 4, 3, 2, 0]
    assert_bits_equal(weights_at(client, policy, "main"), published(resumed.model))


def test_the_best_model_that_a_trainer_loads_at_the_end_is_the_last_version(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    trainer = trainer_of(
        tmp_path / "run", PlaitCallback(policy=policy, client=client), steps=6,
        load_best_model_at_end=True, eval_strategy="steps", eval_steps=3,
        metric_for_best_model="eval_loss", greater_is_better=True,  # the loss falls: the first
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 3
    steps = [version.metadata["step"] for version in client.versions(policy).versions]
    assert steps == [3, 6, 5, 4, 3, 2, 1, 0]
    assert_bits_equal(weights_at(client, policy, "main"), published(trainer.model))


def test_the_processes_of_a_ddp_job_publish_together(
    client: RegistryClient, policy: str, shared_registry: RegistryProcess, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.trainer_agent.transformers_program", shared_registry.url, policy),
        str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert job.returncode == 0, job.stderr
    steps = [version.metadata["step"] for version in client.versions(policy).versions]
    assert steps == [4, 3, 2, 1, 0]
    assert_bits_equal(weights_at(client, policy, "main"), torch.load(tmp_path / "trained.pt"))


def test_config_and_tokenizer_travel_with_the_anchor(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    callback = PlaitCallback(policy=policy, every=10, client=client)
    trainer_of(tmp_path / "run", callback, steps=2).train()
    checkout(client, policy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 16
    assert CheckpointFolder(tmp_path / "out").layout.total_elements > 0


class Failing(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Fails once, after a number of steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_held: Any) -> None:
        if state.global_step == self._after:
            self._after = -1
            raise ZeroDivisionError


def test_training_that_failed_is_let_go_of_when_it_begins_again(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    callback = PlaitCallback(policy=policy, client=client, detector="reconstruction")
    trainer = trainer_of(tmp_path / "run", callback, steps=4)
    trainer.add_callback(Failing(2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    first, hooks = callback.loop, trainer.optimizer.optimizer._optimizer_step_pre_hooks
    assert len(hooks) == 1
    trainer.train()
    with pytest.raises(PublisherClosed):
        first.publish()
    assert not hooks
    steps = [version.metadata["step"] for version in client.versions(policy).versions]
    assert steps == [4, 3, 2, 1, 2, 1, 0]
    assert_bits_equal(weights_at(client, policy, "main"), published(trainer.model))


def test_a_failure_that_was_told_is_not_told_again_when_training_begins_again(
    client: RegistryClient, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = PlaitCallback(policy=policy, client=client)

    class Operator(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_held: Any) -> None:
            if state.global_step in (2, 3):
                callback.loop.publisher.flush()  # raises what the last publish failed with
                move(client, policy, to=1)

    trainer = trainer_of(tmp_path / "run", callback, steps=4)
    trainer.add_callback(Operator())
    with pytest.raises(HeadMoved):
        trainer.train()
    with pytest.raises(UnknownBase):  # what the weights are now
        trainer.train()
    assert "the training before left a publish that failed" in caplog.text


def test_outside_of_training_there_is_no_loop(client: RegistryClient, policy: str) -> None:
    with pytest.raises(UsageError, match="no training goes on"):
        _ = PlaitCallback(policy=policy, client=client).loop
