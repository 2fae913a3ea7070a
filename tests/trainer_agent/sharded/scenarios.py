"""What the processes of the test jobs do. All ranks of a job run the same scenario."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from plait.errors import PlaitError
from plait.tensors import StateDictWeights, layout_of_tensors
from plait.wire import MoveRequest
from plait_client.registry import RegistryClient
from plait_trainer import Capture, Publisher, SnapshotDetector
from plait_trainer.choice import DetectorName, detector_of
from plait_trainer.detector import LiveTensors
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.resumable import HeldClient
from tests.trainer_agent.sharded.models import KINDS, VOCABULARY, TinyTransformer, gathered


class Process:
    """One process of a job.

    Attributes:
        folder: of the job.
        said: what it reports at the end, as JSON.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.said: dict[str, Any] = {}

    def model(self, kind: str, bumps: int = 0) -> nn.Module:
        inner = TinyTransformer()
        start = self.folder / "weights.pt"
        if start.exists():
            inner.load_state_dict(torch.load(start))
        model = KINDS[kind](inner)
        for _ in range(bumps):
            bump(model)
        return model

    def keep(self, model: nn.Module, seq: int) -> None:
        """What a version must be, and what a checkpoint holds; rank 0 writes it."""
        published, whole = gathered(model, torch.bfloat16), gathered(model, None)
        if self.rank == 0:
            torch.save(published, self.folder / f"expected-{seq}.pt")
            torch.save({**whole, "head.weight": whole["embed.weight"]}, self.folder / "weights.pt")

    def refused(self, name: str, action: Callable[[], object]) -> None:
        """Reports the typed error that an action ends with."""
        try:
            action()
        except PlaitError as error:
            self.said[name] = [error.code, str(error)]
        else:
            self.said[name] = None


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimizer step; the same data on all ranks, however many they are."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=noise)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def bump(model: nn.Module) -> None:
    """Changes every weight, without any collective."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local += 0.01


def steps(
    process: Process, url: str, policy: str, kind: str, count: int = 3,
    detector: DetectorName = "snapshot", resumes: bool = False,
) -> None:  # fmt: skip
    """Publishes the model as it starts, unless it resumes, and after each of `count` steps."""
    model = process.model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        RegistryClient(url) as client,
        Publisher(
            model, optimizer, client=client, policy=policy, detector=detector_of(detector),
            attach=not resumes,
        ) as out,
    ):  # fmt: skip
        if resumes:
            out.load_state_dict(torch.load(process.folder / "state.pt"))
        process.said["found"] = first = None if out.version is None else out.version.seq
        if first is None:
            first = out.publish({"rank": process.rank}).version.seq
            process.keep(model, first)
        futures = []
        for number in range(count):
            step(model, optimizer, number)
            futures.append(out.publish({"rank": process.rank, "step": number}))
            process.keep(model, first + number + 1)
        process.said["seqs"] = [future.version.seq for future in futures]
        process.said["state"] = {
            name: value for name, value in out.state_dict().items() if "changes" not in name
        }
        if process.rank == 0:
            torch.save(out.state_dict(), process.folder / "state.pt")
        process.said["payload"] = [future.metrics.payload_bytes for future in futures]


def bumps(process: Process, url: str, policy: str, count: int, before: int = 0) -> None:
    """Publishes and waits, `count` times; the weights change between. No other collectives.

    Args:
        before: changes that the checkpoint had seen.
    """
    model = process.model("fsdp", before)
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        process.said["found"] = None if out.version is None else out.version.seq
        for number in range(count):
            if number or out.version is not None:
                bump(model)
            out.publish({"bumps": before + number}).result()


def with_one_upload_failing(process: Process, url: str, policy: str, port: int) -> None:
    """The last rank's second upload is lost on its way."""
    model = process.model("fsdp")
    failing = process.rank == process.size - 1
    with contextlib.ExitStack() as held:
        proxy = Proxy(port)
        held.callback(proxy.close)
        client = held.enter_context(
            RegistryClient(proxy.url, attempts=1) if failing else RegistryClient(url)
        )
        out = held.enter_context(Publisher(model, client=client, policy=policy, patience=0.0))
        out.publish().result()
        for name in ("first", "second"):
            if failing:
                proxy.lose("POST /v1/chunks:missing", "cut")
            bump(model)
            process.refused(name, out.publish().result)
            assert out.version is not None
            process.said[f"{name} version"] = out.version.seq
        bump(model)
        process.said["seq"] = out.publish().version.seq


def with_one_capture_failing(process: Process, url: str, policy: str) -> None:
    """Rank 1 can't publish its second version: its metadata are too large."""
    model = process.model("fsdp")
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        out.publish().result()
        bump(model)
        text = "x" * (1 << 17 if process.rank == 1 else 1)
        process.refused("failed", lambda: out.publish({"text": text}))
        bump(model)
        process.said["seq"] = out.publish().version.seq


class Interrupted(SnapshotDetector):
    """Its third capture meets a Ctrl-C."""

    captures = 0

    def capture(self, live: LiveTensors) -> Capture:
        self.captures += 1
        if self.captures == 3:
            raise KeyboardInterrupt
        return super().capture(live)


def with_an_interrupt(process: Process, url: str, policy: str) -> None:
    """Ctrl-C reaches rank 1 during its capture, and rank 2 nothing."""
    model = process.model("fsdp")
    detector = Interrupted() if process.rank == 1 else SnapshotDetector()
    with (
        RegistryClient(url) as client,
        Publisher(model, client=client, policy=policy, detector=detector) as out,
    ):
        for _ in range(2):
            out.publish().result()
            bump(model)
        try:
            process.refused("failed", out.publish)
        except KeyboardInterrupt:
            process.said["failed"] = "interrupted"
        process.said["seq"] = out.publish().version.seq


def with_an_unknown_commit(process: Process, port: int, policy: str) -> None:
    """Rank 0 gets no answer to its second commit, which happened, and can't ask either."""
    model = process.model("fsdp")
    proxy = Proxy(port)
    with (
        contextlib.closing(proxy),
        RegistryClient(proxy.url, attempts=1) as client,
        Publisher(model, client=client, policy=policy, patience=0.0) as out,
    ):
        out.publish().result()
        if process.rank == 0:
            proxy.lose(f"POST /v1/policies/{policy}/commits", "mute")
            proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=5)
        bump(model)
        process.refused("second", out.publish().result)
        proxy.heal()
        bump(model)
        process.said["seq"] = out.publish().version.seq


def behind_a_rollback(process: Process, url: str, policy: str) -> None:
    """Somebody moves the channel back; the trainer is refused, and goes on from where it stood."""
    model = process.model("fsdp")
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        for _ in range(2):
            out.publish().result()
            bump(model)
        if process.rank == 0:
            move = MoveRequest(
                to="1", expected_generation=client.channel(policy, "main").generation,
                kind="rollback", move_id="0" * 32, reason="it diverged", actor="ops",
            )  # fmt: skip
            client.move_channel(policy, "main", move)
        distributed.barrier()
        process.refused("commit", out.publish().result)
        process.refused("fenced", out.publish)
        process.refused("rebase", out.rebase)
        out.rebase(to=2)
        process.said["seq"] = out.publish().version.seq


def apart(process: Process, url: str, policy: str) -> None:
    """Rank 1 closes its publisher while the others publish."""
    model = process.model("fsdp")
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        out.publish().result()
        if process.rank == 1:
            out.close()
            return
        process.refused("publish", out.publish)
        process.refused("again", out.publish)


def without_an_answer(process: Process, url: str, policy: str) -> None:
    """Rank 1 is alive and doesn't come, until the others have been told."""
    model = process.model("fsdp")
    with (
        RegistryClient(url) as client,
        Publisher(model, client=client, policy=policy, patience=0.0, peer_timeout=3.0) as out,
    ):
        out.publish().result()
        told = [process.folder / f"told-{rank}" for rank in (0, 2)]
        if process.rank == 1:
            while not all(path.exists() for path in told):
                time.sleep(0.05)
        process.refused("publish", out.publish)
        if process.rank != 1:
            (process.folder / f"told-{process.rank}").touch()


def from_a_base(process: Process, url: str, policy: str) -> None:
    """A model that has been trained on from version 1, whose whole weights lie in a file."""
    model = process.model("fsdp", 1)
    whole = torch.load(process.folder / "expected-1.pt")
    base = StateDictWeights(layout_of_tensors(whole), whole)
    with (
        RegistryClient(url) as client,
        Publisher(model, client=client, policy=policy, attach=False) as out,
    ):
        process.refused("unknown", out.attach)
        out.attach(base=base)
        version = out.publish().version
        process.said |= {"seq": version.seq, "parent": version.parent}


def external(process: Process, url: str, policy: str) -> None:
    """A line whose first weights everybody holds; the config travels along."""
    model = process.model("fsdp")
    side_files = process.folder / "side"
    if process.rank == 0:
        side_files.mkdir()
        (side_files / "config.json").write_text("{}")
    process.keep(model, 1)
    distributed.barrier()
    with (
        RegistryClient(url) as client,
        Publisher(
            model, client=client, policy=policy, external=True, side_files=side_files
        ) as out,
    ):  # fmt: skip
        if process.rank == 1:
            bump(model)
        process.refused("changed", out.publish)
        if process.rank == 1:
            with torch.no_grad():
                for parameter, first in zip(
                    model.parameters(), process.model("fsdp").parameters(), strict=True
                ):
                    parameter.copy_(first)
        else:
            process.model("fsdp")
        process.said["kind"] = out.publish().version.kind
        bump(model)
        out.publish().result()
        process.keep(model, 2)


def choices(process: Process, url: str, policy: str) -> None:
    """Who publishes with whom."""
    model = process.model("fsdp")
    with RegistryClient(url) as client:
        process.refused("grain", lambda: Publisher(model, client=client, policy=policy, grain=8))
        process.refused(
            "merge", lambda: Publisher(model, client=client, policy=policy, when_full="merge")
        )
        process.refused(
            "alone", lambda: Publisher(model, client=client, policy=policy, group=False)
        )
        # A whole model beside others: each process has its own line.
        mine = f"{policy}-{process.rank}"
        with Publisher(TinyTransformer(), client=client, policy=mine) as out:
            out.publish().result()
        # Two of three, which hold whole copies.
        pair = distributed.new_group([0, 2])
        if process.rank != 1:
            for _ in range(2):
                with Publisher(
                    TinyTransformer(), client=client, policy=policy, group=pair
                ) as out:  # fmt: skip
                    process.said["seq"] = out.publish().version.seq
        # All, though nothing says so.
        with Publisher(
            TinyTransformer(), client=client, policy=policy, channel="copies", group=True,
            new_anchor=True,
        ) as out:  # fmt: skip
            process.said["all"] = out.publish().version.seq


def saved_in_flight(process: Process, url: str, policy: str, saver: str) -> None:
    """Publishes the model, changes it, captures it, changes it again, and saves its state while the
    capture is on its way. Then everything goes its way."""
    model = process.model("fsdp")
    with HeldClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        out.publish().result()
        client.gate.clear()
        bump(model)
        future = out.publish()
        bump(model)
        own = f"publisher-{process.rank}"
        if saver == "dcp":
            checkpoint.save({own: out}, checkpoint_id=process.folder / "checkpoint")
        else:
            torch.save(out.state_dict(), process.folder / own)
        distributed.barrier()
        client.gate.set()
        future.result()


def continued(
    process: Process, url: str, policy: str, saver: str, bumps: int = 2, whose: int | None = None
) -> None:
    """Goes on from the state of `saved_in_flight`.

    Args:
        bumps: changes that the weights have seen.
        whose: state is loaded; None: each process loads its own.
    """
    model = process.model("fsdp", bumps)
    own = f"publisher-{process.rank if whose is None else whose}"
    with (
        RegistryClient(url) as client,
        Publisher(model, client=client, policy=policy, attach=False) as out,
    ):
        if saver == "dcp":
            checkpoint.load({own: out}, checkpoint_id=process.folder / "checkpoint")
        else:
            out.load_state_dict(torch.load(process.folder / own))
        assert out.version is not None
        process.said["found"] = out.version.seq
        version = out.publish().version
        process.said |= {"seq": version.seq, "parent": version.parent}


def with_a_damaged_state(process: Process, url: str, policy: str) -> None:
    """Rank 1's state is damaged; then it isn't."""
    model = process.model("fsdp")
    with RegistryClient(url) as client, Publisher(model, client=client, policy=policy) as out:
        out.publish().result()
        bump(model)
        state = out.state_dict()
        damaged = {**state, "changes": state["changes"][:1]} if process.rank == 1 else state
        process.refused("damaged", lambda: out.load_state_dict(damaged))
        out.load_state_dict(state)
        process.said["seq"] = out.publish().version.seq


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        steps, bumps, with_one_upload_failing, with_one_capture_failing, with_an_interrupt,
        with_an_unknown_commit, without_an_answer, behind_a_rollback, apart, from_a_base,
        external, choices, saved_in_flight, continued, with_a_damaged_state,
    )
}  # fmt: skip
