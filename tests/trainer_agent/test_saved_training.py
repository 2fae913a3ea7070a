"""Uncommitted changes travel in checkpoints of a transformers Trainer, of a grain, and merged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from plait.errors import RegistryUnavailable
from plait.fingerprint import Fingerprint
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.callback import PlaitCallback
from plait_trainer.resume import Claim, Origins
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.resumable import HeldClient, NoChunks, Resumable
from tests.trainer_agent.test_callback import published, trainer_of
from tests.trainer_agent.test_publish_faults import CHUNK_PUT


class CutOff(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """From the first step on no chunk reaches the registry."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_held: Any) -> None:
        if state.global_step == 0:
            self._proxy.lose(CHUNK_PUT, "cut", times=1000)


def test_a_checkpoint_whose_version_never_came_is_published_by_the_run_that_resumes(
    far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    callback = PlaitCallback(policy=policy, every=10, client=far, patience=0.0)
    trainer = trainer_of(tmp_path / "run", callback, steps=5)
    trainer.add_callback(CutOff(proxy))
    with pytest.raises(RegistryUnavailable):
        trainer.train()
    assert client.version(policy, "main").seq == 1

    again = PlaitCallback(policy=policy, every=10, client=client)
    resumed = trainer_of(tmp_path / "run", again, steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    versions = client.versions(policy).versions
    assert [version.metadata["step"] for version in versions] == [4, 3, 0]
    assert [version.kind for version in versions] == ["delta", "delta", "anchor"]
    assert_bits_equal(weights_at(client, policy, "main"), published(resumed.model))


def test_changes_along_a_grain_are_taken_back_by_rows_and_columns(
    client: RegistryClient, shared_registry: RegistryProcess, policy: str
) -> None:
    torch.manual_seed(6)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate", "down")]
    model = {name: torch.randn(64, 64) for name in names}
    options: dict[str, Any] = {"policy": policy, "grain": 4, "kv_heads": 4}
    with Publisher(model, client=client, **options) as publisher:
        publisher.publish().result()
        for tensor in model.values():
            tensor += (torch.rand_like(tensor) < 0.2) * 0.5
        state = publisher.state_dict()
    with NoChunks(shared_registry.url) as blind:
        publisher = Publisher(model, client=blind, attach=False, **options)
        with publisher:
            publisher.load_state_dict(state)
            version = publisher.publish().version
    slots = {chunk.slot for chunk in client.manifest(version.manifest_digest).chunks}
    assert (version.seq, version.parent, len(slots)) == (2, 1, 4)
    assert_bits_equal(weights_at(client, policy, 2), {n: t.bfloat16() for n, t in model.items()})


def test_publishes_that_were_merged_are_one_state(
    shared_registry: RegistryProcess, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("snapshot")
    with (
        HeldClient(shared_registry.url) as held,
        run.publisher(held, policy, queue_size=1, when_full="merge") as publisher,
    ):
        publisher.publish().result()
        held.gate.clear()
        for number in range(4):
            run.step(number)
            publisher.publish()
        run.step(4)
        run.save(tmp_path / "checkpoint.pt", publisher)
        held.gate.set()
        publisher.flush()
    head = client.version(policy, "main").seq
    run, state = Resumable.load("snapshot", tmp_path / "checkpoint.pt")
    before = weights_at(client, policy, head)
    with run.publisher(client, policy, attach=False) as publisher:
        publisher.load_state_dict(state)
        version = publisher.publish().version
    now = run.expected()
    changed = sum(int((before[name] != now[name]).sum()) for name in now)
    assert (version.parent, version.changed_elements) == (head, changed)
    assert_bits_equal(weights_at(client, policy, "main"), now)


def test_states_of_different_moments_say_nothing_of_where_the_weights_come_from() -> None:
    proven: Any = SimpleNamespace(fingerprint=Fingerprint(7))
    one, other = (
        Claim({number: Fingerprint(number) for number in states})
        for states in ((1, 2, 4), (2, 3, 4))
    )
    assert [number for number, _ in Origins.of(proven, None, [one, other]).states] == [4, 2]
    assert Origins.of(proven, None, [one, other]).fingerprints == [Fingerprint(8), Fingerprint(4)]
    later = Claim({2: Fingerprint(2), 5: Fingerprint(5)})
    apart = Origins.of(proven, None, [one, later])
    assert apart.fingerprints == [Fingerprint(7)]
    assert "saved at different moments" in apart.hint
