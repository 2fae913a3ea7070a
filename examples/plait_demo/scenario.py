"""The demo, act by act: a policy is trained, followed, taken back, lost, found and continued."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, ServiceError
from plait.wire import ChannelDocument, VersionDocument
from plait_client.checkpoint import CheckpointFolder
from plait_client.registry import RegistryClient
from plait_demo.fleet import Fleet
from plait_demo.processes import run_plait
from plait_demo.proofs import Claim, Proofs, differing_tensors, same_answers
from plait_demo.rollouts import Answer, Sample, collect
from plait_demo.settings import POLICY, ROLLBACK, Settings
from plait_demo.table import Show, VersionRow
from plait_demo.trainer import Trainer

_PUBLISH_WITHIN_S = 300.0
_CHANNEL = "main"
# The same problems in every round: so few steps show what they do only on like prompts.
_TRAINING_SEED, _PROBE_SEED = 1, 2


@dataclass
class Scenario:
    """What the acts share.

    Attributes:
        recorded: greedy answers by version and engine.
        base: folder of the base model.
    """

    settings: Settings
    client: RegistryClient
    fleet: Fleet
    show: Show
    proofs: Proofs
    base: Path
    tokenizer: Any
    recorded: dict[int, dict[str, tuple[Answer, ...]]] = field(default_factory=dict)

    def play(self) -> None:
        """All acts. Raises PlaitError where one can't go on."""
        # Two functions, so that the first trainer is gone before the second one loads its weights.
        checkpoint = self._first_trainer()
        self._second_trainer(checkpoint)

    def _first_trainer(self) -> Path:
        """From the base model to the trainer's own checkpoint, which it returns."""
        self.show.step("the trainer attaches, and commits the base model as version 1")
        with Trainer(self.settings, self.client, self.base) as trainer:
            self._publish(trainer, reward=None)
            self.fleet.start_followers()
            self._follow_base()
            self._train(trainer, self.settings.steps)
            self._roll_back_and_forward()
            self._lose_an_engine()
            self.show.step("the trainer saves its own checkpoint and ends")
            checkpoint = self.settings.home / "trainer.pt"
            trainer.save(checkpoint)
        return checkpoint

    def _second_trainer(self, checkpoint: Path) -> None:
        self.show.step("a new one starts from it")
        with Trainer(self.settings, self.client, self.base, checkpoint) as trainer:
            checkpoint.unlink()
            self._train(trainer, self.settings.steps_after, continued=True)
            self._check_out(trainer)

    # Training -----------------------------------------------------------------------------------

    def _follow_base(self) -> None:
        self.show.step("both engines attach: each re-reads all its weights, and finds version 1")
        head = self._head()
        self.fleet.await_proven(head)
        self._record(head)

    def _train(self, trainer: Trainer, steps: int, *, continued: bool = False) -> None:
        words = "goes on" if continued else f"trains: {self.settings.task.name}"
        self.show.step(f"the policy {words}; {steps} steps, each one published and followed")
        with self.show.table():
            for step in range(steps):
                newest = max(self.recorded)
                samples = self._sample()
                trainer.learner.step(samples)
                reward = sum(sample.reward for sample in samples) / len(samples)
                version = self._publish(trainer, reward=reward)
                if continued and step == 0:
                    self._check_continued(newest, version)

    def _sample(self) -> list[Sample]:
        settings = self.settings
        problems = settings.task.problems(_TRAINING_SEED, settings.prompts)
        prompts = [(p, settings.task.prompt(self.tokenizer, p)) for p in problems]
        samples = collect(
            self.fleet.samplers, settings.task, prompts,
            group_size=settings.group_size, max_new_tokens=settings.max_new_tokens,
        )  # fmt: skip
        head = self._head()
        stamp = f"{POLICY}@{head.seq}#{head.generation}"
        for sample in samples:
            found = sample.answer.version
            self.proofs.check(Claim.STAMPED, found == stamp, f"{found!r} instead of {stamp!r}")
        return samples

    def _publish(self, trainer: Trainer, *, reward: float | None) -> VersionDocument:
        facts = {"step": trainer.learner.steps} | ({} if reward is None else {"reward": reward})
        started = time.perf_counter()
        version = trainer.publisher.publish(facts).result(_PUBLISH_WITHIN_S)
        published = time.perf_counter() - started
        if reward is None:
            return version
        head = self._head()
        reports = self.fleet.await_proven(head)
        proven = time.perf_counter() - started
        self.proofs.check(Claim.PROVEN, head.seq == version.seq, f"the head is {head.seq}")
        self.show.add(
            VersionRow(
                seq=version.seq,
                reward=reward,
                density=version.changed_elements / version.total_elements,
                payload_bytes=version.payload_bytes,
                dense_bytes=version.dense_bytes,
                publish_seconds=published,
                proven_seconds=proven,
                pause_seconds=max(r.durations.get("pause", 0.0) for r in reports.values()),
            )
        )
        self._record(head)
        return version

    # Back and forward ---------------------------------------------------------------------------

    def _roll_back_and_forward(self) -> None:
        newest = self._head().seq
        self.show.step(f"an operator rolls back from version {newest} to {newest - ROLLBACK}")
        self._plait(
            "rollback", POLICY, "--to", f"{_CHANNEL}~{ROLLBACK}", "--reason", "a demonstration"
        )
        back = self._head()
        self.fleet.await_proven(back)
        self._compare(Claim.BACK, back.seq)
        for name, answers in self.recorded[newest].items():
            differ = not same_answers(answers, self.recorded[back.seq][name])
            self.proofs.check(Claim.DIFFERENT, differ, f"{name}: {newest} answers as {back.seq}")

        self.show.step(f"and forward again to version {newest}")
        self._plait("channel", "move", POLICY, _CHANNEL, "--to", str(newest))
        self.fleet.await_proven(self._head())
        self._compare(Claim.FORWARD, newest)

    def _lose_an_engine(self) -> None:
        lost = self.fleet.hosts[0]
        self.show.step(f"{lost.name} is killed (SIGKILL), and restarted from the base model")
        lost.kill_engine()
        lost.start_engine()
        head = self._head()
        self.fleet.await_proven(head)
        self._compare(Claim.RESTARTED, head.seq)

    # The trainer --------------------------------------------------------------------------------

    def _check_continued(self, newest: int, version: VersionDocument) -> None:
        found = (version.kind, version.parent, version.seq)
        expected = ("delta", newest, newest + 1)
        self.proofs.check(Claim.CONTINUED, found == expected, f"{found} instead of {expected}")

    def _check_out(self, trainer: Trainer) -> None:
        folder = self.settings.home / "checkout"
        self.show.step(f"`plait checkout` of the newest version into {folder}")
        self._plait("checkout", POLICY, str(folder), "--base", str(self.base))
        differing = differing_tensors(CheckpointFolder(folder), trainer.learner.model)
        self.proofs.check(Claim.CHECKOUT, not differing, f"differing tensors: {differing[:5]}")
        self.show.step("`plait verify` re-reads everything that is stored")
        verified = run_plait("verify", POLICY, "--json", environment=self._environment)
        self.proofs.check(Claim.VERIFIED, verified.returncode == 0, verified.stderr.strip()[-500:])

    # --------------------------------------------------------------------------------------------

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PLAIT_URL": self.client.url,
            "PLAIT_CACHE": str(self.settings.home / "operator-cache"),
        }

    def _head(self) -> ChannelDocument:
        return self.client.channel(POLICY, _CHANNEL)

    @property
    def _prompts(self) -> Sequence[Sequence[int]]:
        problems = self.settings.task.problems(_PROBE_SEED, self.settings.probes)
        return [self.settings.task.prompt(self.tokenizer, problem) for problem in problems]

    def _record(self, head: ChannelDocument) -> None:
        answers = self.recorded[head.seq] = self.fleet.probe(self._prompts)
        one, other = answers.values()
        self.proofs.check(Claim.AGREE, same_answers(one, other), f"version {head.seq}: they differ")

    def _compare(self, claim: Claim, seq: int) -> None:
        for name, answers in self.fleet.probe(self._prompts).items():
            same = same_answers(answers, self.recorded[seq][name])
            self.proofs.check(claim, same, f"{name} at version {seq}: not what was recorded")

    def _plait(self, *arguments: str) -> dict[str, Any]:
        """One `plait` command of an operator, and its answer.

        Raises:
            ServiceError: it failed.
        """
        done = run_plait(*arguments, "--json", environment=self._environment)
        if done.returncode != 0:
            raise ServiceError(f"`plait {' '.join(arguments)}` failed: {done.stderr.strip()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def play(scenario: Scenario) -> None:
    """Plays all acts; one that can't go on is a failed proof."""
    try:
        scenario.play()
    except (PlaitError, TimeoutError) as error:
        scenario.proofs.check(Claim.FINISHED, False, f"{type(error).__name__}: {error}")
    else:
        scenario.proofs.check(Claim.FINISHED, True, "")
