"""What isn't committed travels in the trainer's own checkpoint, and nothing of it is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import canonical
from plait.errors import (
    CommitUnknown,
    DigestMismatch,
    DocumentInvalid,
    HeadMoved,
    PlaitError,
    PublisherClosed,
    PublishError,
    RegistryUnavailable,
    SizeMismatch,
    UnknownBase,
    UnsupportedFormat,
    UsageError,
)
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer import Publisher, PublishingLoop, ReconstructionDetector
from plait_trainer.saved_changes import SavedChanges
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.resumable import DETECTORS, HeldClient, NoChunks, Resumable
from tests.trainer_agent.test_publish_faults import CHUNK_PUT, move

ROOT = Path(__file__).parents[2]


@pytest.fixture
def blind(shared_registry: RegistryProcess) -> Iterator[RegistryClient]:
    """A client that no weights can be fetched with."""
    with NoChunks(shared_registry.url) as client:
        yield client


def resumed(
    kind: str, path: Path, client: RegistryClient, policy: str
) -> tuple[Resumable, Publisher]:
    run, state = Resumable.load(kind, path)
    publisher = run.publisher(client, policy, attach=False)
    try:
        publisher.load_state_dict(state)
    except BaseException:
        publisher.close()
        raise
    return run, publisher


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    """Elements of which a bit differs; of weights without NaN and negative zeros."""
    return sum(int((before[name] != after[name]).sum()) for name in before)


def payload_of(client: RegistryClient, version: VersionDocument) -> list[str]:
    return [chunk.digest for chunk in client.manifest(version.manifest_digest).chunks]


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_since_the_last_publish_are_published_as_if_nothing_had_happened(
    kind: str, steps: int, client: RegistryClient, blind: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = Resumable(kind)
    publisher = run.publisher(client, f"{policy}-whole")
    with publisher:
        publisher.publish().result()
        for number in range(steps):
            run.step(number)
        run.step(99)
        whole = publisher.publish().version

    run = Resumable(kind)
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        for number in range(steps):
            run.step(number)
        run.save(tmp_path / "checkpoint.pt", publisher)

    run, publisher = resumed(kind, tmp_path / "checkpoint.pt", blind, policy)
    with publisher:
        assert publisher.version is not None
        assert (publisher.version.seq, publisher.holds_version) == (1, False)
        run.step(99)
        version = publisher.publish().version
        assert (version.seq, version.parent, version.kind) == (2, 1, "delta")
        assert version.fingerprint == whole.fingerprint
        assert payload_of(client, version) == payload_of(client, whole)
        run.step(100)
        assert publisher.publish().version.seq == 3
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


@pytest.mark.parametrize(
    ("kind", "failpoint", "head"),
    [
        ("snapshot", "uploaded:2", 1),
        ("snapshot", "committed:2", 2),
        ("snapshot", "committed:3", 3),
        ("reconstruction", "committed:2", 2),
        ("copy-back", "before_commit:2", 1),
    ],
)
def test_publishes_in_flight_may_be_committed_or_lost(
    kind: str, failpoint: str, head: int, shared_registry: RegistryProcess,
    client: RegistryClient, blind: RegistryClient, policy: str, tmp_path: Path,
) -> None:  # fmt: skip
    program = [sys.executable, "-m", "tests.trainer_agent.resumable", shared_registry.url, policy]
    result = subprocess.run(
        [*program, str(tmp_path), kind], cwd=ROOT, timeout=120, check=False,
        env={**os.environ, "PLAIT_FAILPOINT": f"trainer.{failpoint}"},
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL
    assert client.version(policy, "main").seq == head
    before = weights_at(client, policy, head)
    if head > 1:
        assert_bits_equal(before, torch.load(tmp_path / f"expected-{head}.pt"))

    run, publisher = resumed(kind, tmp_path / "checkpoint.pt", blind, policy)
    with publisher:
        version = publisher.publish().version
    assert (version.seq, version.parent, version.kind) == (head + 1, head, "delta")
    assert version.changed_elements == changed(before, run.expected()) > 0
    assert_bits_equal(weights_at(client, policy, head + 1), run.expected())


def test_a_failed_publish_is_in_the_state_too(
    far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("snapshot")
    publisher = run.publisher(far, policy, patience=0.0)
    publisher.publish().result()
    proxy.lose(CHUNK_PUT, "cut", times=2)
    for number in range(2):
        run.step(number)
        with pytest.raises(RegistryUnavailable):
            publisher.publish().result()
    run.step(2)
    run.save(tmp_path / "checkpoint.pt", publisher)
    with pytest.raises(RegistryUnavailable):
        publisher.close()
    run, publisher = resumed("snapshot", tmp_path / "checkpoint.pt", client, policy)
    with publisher:
        assert publisher.publish().version.seq == 2
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


@pytest.mark.parametrize(("fault", "head"), [("mute", 2), ("cut", 1)])
def test_a_commit_that_nobody_knows_of_is_found_by_content(
    fault: Any, head: int, far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = Resumable("reconstruction")
    publisher = run.publisher(far, policy, patience=0.0)
    publisher.publish().result()
    proxy.lose(f"POST /v1/policies/{policy}/commits", fault)
    proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=5)
    run.step(1)
    with pytest.raises(CommitUnknown):
        publisher.publish().result()
    run.step(2)
    run.save(tmp_path / "checkpoint.pt", publisher)
    with pytest.raises(CommitUnknown):
        publisher.close()
    assert client.version(policy, "main").seq == head
    run, publisher = resumed("reconstruction", tmp_path / "checkpoint.pt", client, policy)
    with publisher:
        version = publisher.publish().version
    assert (version.seq, version.parent) == (head + 1, head)
    assert_bits_equal(weights_at(client, policy, head + 1), run.expected())


@pytest.mark.parametrize("publishes", [1, 2])
def test_an_anchor_that_was_in_doubt_is_gone_on_from(
    publishes: int, far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """And so is a publish behind it, which couldn't find out either."""
    run = Resumable("snapshot")
    publisher = run.publisher(far, policy, patience=0.0)
    proxy.lose(f"POST /v1/policies/{policy}/commits", "mute")
    proxy.lose(f"POST /v1/policies/{policy}/commits", "cut", times=99)
    proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=99)
    for number in range(publishes):
        with pytest.raises(CommitUnknown):
            publisher.publish().result()
        run.step(number)
    run.save(tmp_path / "checkpoint.pt", publisher)
    with pytest.raises(CommitUnknown):
        publisher.close()
    run, publisher = resumed("snapshot", tmp_path / "checkpoint.pt", client, policy)
    with publisher:
        version = publisher.publish().version
    assert (version.seq, version.parent, version.kind) == (2, 1, "delta")
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_changes_of_a_commit_that_never_came_are_kept_by_a_rebase(
    far: RegistryClient, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    run = Resumable("reconstruction")
    with run.publisher(far, policy, patience=0.0) as publisher:
        publisher.publish().result()
        run.step(0)
        proxy.lose(f"POST /v1/policies/{policy}/commits", "cut")
        proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=5)
        with pytest.raises(CommitUnknown):
            publisher.publish().result()
        proxy.heal()
        publisher.rebase()
        run.step(1)
        assert publisher.publish().version.seq == 2
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_a_line_that_hadn_t_begun_begins(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("snapshot")
    with run.publisher(client, policy) as publisher:
        run.step(1)
        run.save(tmp_path / "checkpoint.pt", publisher)
    run, publisher = resumed("snapshot", tmp_path / "checkpoint.pt", client, policy)
    with publisher:
        assert publisher.publish().version.kind == "anchor"
    assert_bits_equal(weights_at(client, policy, 1), run.expected())


def test_a_state_can_be_saved_again_and_again_without_a_publish(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("reconstruction")
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        run.step(0)
        run.save(tmp_path / "checkpoint.pt", publisher)
    for number in (1, 2):
        run, publisher = resumed("reconstruction", tmp_path / "checkpoint.pt", client, policy)
        with publisher:
            run.step(number)
            run.save(tmp_path / "checkpoint.pt", publisher)
    run, publisher = resumed("reconstruction", tmp_path / "checkpoint.pt", client, policy)
    with publisher:
        assert publisher.publish().version.seq == 2
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_reconstruction_holds_no_copy_of_the_version_that_it_goes_on_from(
    client: RegistryClient, blind: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("reconstruction")
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        assert isinstance(run.detector, ReconstructionDetector)
        copied = run.detector.report.copied_bytes
        run.step(0)
        run.save(tmp_path / "checkpoint.pt", publisher)
    run, publisher = resumed("reconstruction", tmp_path / "checkpoint.pt", blind, policy)
    with publisher:
        run.step(1)
        publisher.publish().result()
        assert isinstance(run.detector, ReconstructionDetector)
        assert run.detector.report.copied_bytes == copied
        assert run.detector.report.read_back == 0


def test_states_have_the_same_number_whenever_they_are_saved(
    shared_registry: RegistryProcess, policy: str
) -> None:
    """As on two processes, of which one knows of a commit already."""
    run = Resumable("snapshot")

    def saved(publisher: Publisher) -> tuple[int, list[int]]:
        state = publisher.state_dict()
        changes = SavedChanges.read(state["changes"], state["changes_digest"])
        return changes.start, [number for number, _ in changes.steps]

    with HeldClient(shared_registry.url) as held, run.publisher(held, policy) as publisher:
        assert saved(publisher) == (0, [1])
        publisher.publish().result()
        assert saved(publisher) == (1, [2])
        held.gate.clear()
        run.step(1)
        publisher.publish()
        assert saved(publisher) == (1, [2, 3])
        held.gate.set()
        publisher.flush()
        assert saved(publisher) == (2, [3])


# What is refused ------------------------------------------------------------------------------


@pytest.fixture
def saved(client: RegistryClient, policy: str, tmp_path: Path) -> Path:
    """The checkpoint of a run at version 1 and two uncommitted steps."""
    run = Resumable("snapshot")
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        run.step(0)
        run.step(1)
        run.save(tmp_path / "checkpoint.pt", publisher)
    return tmp_path / "checkpoint.pt"


def test_other_weights_than_those_of_the_state_are_refused(
    saved: Path, client: RegistryClient, policy: str
) -> None:
    run, state = Resumable.load("snapshot", saved)
    run.step(2)
    with run.publisher(client, policy, attach=False) as publisher:
        with pytest.raises(UnknownBase, match="no version of") as refusal:
            publisher.load_state_dict(state)
        assert "lead to other weights" in refusal.value.remedy
        assert "base=" in refusal.value.remedy
        with pytest.raises(PublishError, match="isn't attached"):
            publisher.publish()
        with pytest.raises(UnknownBase):
            publisher.attach()
    assert client.version(policy, "main").seq == 1


def test_weights_of_a_version_are_that_version_whatever_the_state_says(
    saved: Path, client: RegistryClient, policy: str
) -> None:
    _, state = Resumable.load("snapshot", saved)
    run = Resumable("snapshot")  # as version 1
    with run.publisher(client, policy, attach=False) as publisher:
        publisher.load_state_dict(state)
        assert publisher.holds_version
        assert publisher.publish().version.changed_elements == 0


def test_a_head_that_others_moved_is_refused_until_it_is_rebased(
    saved: Path, client: RegistryClient, policy: str
) -> None:
    other = Resumable("snapshot")
    with other.publisher(client, policy, actor="somebody") as publisher:
        other.step(7)
        publisher.publish().result()
    run, state = Resumable.load("snapshot", saved)
    with run.publisher(client, policy, attach=False) as publisher:
        with pytest.raises(
            HeadMoved, match=r"trained on from version 1 .* is at version 2: commit by somebody"
        ):
            publisher.load_state_dict(state)
        publisher.rebase(to=1)
        version = publisher.publish().version
    assert (version.seq, version.parent, version.kind) == (3, 1, "delta")
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_a_version_that_was_rolled_back_isn_t_committed_again_unasked(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    """It was in flight when the state was saved; then it was committed, and taken back."""
    run = Resumable("snapshot")
    with run.publisher(client, policy) as publisher:
        publisher.publish().result()
        run.step(0)
        future = publisher.publish()
        run.step(1)
        run.save(tmp_path / "checkpoint.pt", publisher)
        future.result()
    move(client, policy, to=1)
    run, state = Resumable.load("snapshot", tmp_path / "checkpoint.pt")
    with run.publisher(client, policy, attach=False) as publisher:
        with pytest.raises(HeadMoved, match=r"from version 2 .* at version 1: rollback"):
            publisher.load_state_dict(state)
        publisher.rebase(to=2)
        assert publisher.publish().version.parent == 2
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())


def truncated(part: torch.Tensor) -> torch.Tensor:
    return part[: part.numel() // 2].clone()


def flipped(part: torch.Tensor) -> torch.Tensor:
    part = part.clone()
    part[part.numel() // 2] ^= 1
    return part


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], type[PlaitError]]] = {
    "truncated document": (lambda s: (truncated(s["changes"][0]), *s["changes"][1:]),
                           DigestMismatch),
    "truncated chunk": (lambda s: (s["changes"][0], truncated(s["changes"][1])), SizeMismatch),
    "flipped document": (lambda s: (flipped(s["changes"][0]), *s["changes"][1:]), DigestMismatch),
    "flipped chunk": (lambda s: (s["changes"][0], flipped(s["changes"][1])), DigestMismatch),
    "lost chunk": (lambda s: s["changes"][:1], SizeMismatch),
    "one chunk too many": (lambda s: (*s["changes"], s["changes"][1]), SizeMismatch),
    "nothing": (lambda _: (), DocumentInvalid),
    "a list": (lambda s: [part.tolist() for part in s["changes"]], DocumentInvalid),
    "other numbers": (lambda s: tuple(p.int() for p in s["changes"]), DocumentInvalid),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_refused_before_anything_happens(
    name: str, saved: Path, client: RegistryClient, policy: str
) -> None:
    damage, error = DAMAGE[name]
    run, state = Resumable.load("snapshot", saved)
    damaged = {**state, "changes": damage(dict(state))}
    with run.publisher(client, policy, attach=False) as publisher:
        with pytest.raises(error):
            publisher.load_state_dict(damaged)
        publisher.load_state_dict(state)
        # One that is at work goes on.
        with pytest.raises(error):
            publisher.load_state_dict(damaged)
        assert publisher.publish().version.parent == 1


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("changes_digest", "sha256:", DocumentInvalid),
        ("format", "plait-trainer/1", UsageError),
        ("channel", "other", UsageError),
    ],
)
def test_a_state_of_something_else_is_refused(
    field: str, value: str, error: type[PlaitError], saved: Path, client: RegistryClient,
    policy: str,
) -> None:  # fmt: skip
    run, state = Resumable.load("snapshot", saved)
    with run.publisher(client, policy, attach=False) as publisher, pytest.raises(error):
        publisher.load_state_dict({**state, field: value})


def test_changes_of_another_cut_are_not_applied(client: RegistryClient, policy: str) -> None:
    model = {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 16)}
    with Publisher(model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        model["model.layers.0.mlp.up_proj.weight"] += 1
        state = publisher.state_dict()
    with Publisher(
        model, client=client, policy=policy, attach=False, grain=2, kv_heads=1
    ) as publisher:
        with pytest.raises(UnknownBase) as refusal:
            publisher.load_state_dict(state)
        assert "of another share of the model" in refusal.value.remedy
    with Publisher(model, client=client, policy=policy, attach=False) as publisher:
        publisher.load_state_dict(state)
        assert publisher.publish().version.changed_elements == 64 * 16


def test_a_closed_publisher_has_no_state_any_more(client: RegistryClient, policy: str) -> None:
    publisher = Resumable("reconstruction").publisher(client, policy)
    publisher.close()
    with pytest.raises(PublisherClosed):
        publisher.state_dict()


# Loops ------------------------------------------------------------------------------------------


def test_a_loop_continues_its_count_and_publishes_what_was_left(
    client: RegistryClient, policy: str, tmp_path: Path
) -> None:
    run = Resumable("snapshot")
    loop = PublishingLoop(run.model, policy=policy, every=3, client=client)
    loop.begin()
    for number in range(4):
        run.step(number)
        loop.step()
    torch.save({"model": run.model.state_dict(), "loop": loop.state_dict()}, tmp_path / "saved")
    loop.close()
    saved = torch.load(tmp_path / "saved", weights_only=True)
    run = Resumable("snapshot")
    run.model.load_state_dict(saved["model"])
    with PublishingLoop(
        run.model, policy=policy, every=3, client=client, state=saved["loop"]
    ) as loop:
        assert (loop.steps, loop.is_published) == (4, True)
        assert client.version(policy, "main").seq == 3
        for number in range(4, 6):
            run.step(number)
            loop.step()
    steps = [version.metadata["step"] for version in client.versions(policy).versions]
    assert steps == [6, 4, 3, 0]
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())


def test_a_loop_is_not_continued_from_something_else(client: RegistryClient, policy: str) -> None:
    with pytest.raises(UsageError, match="lacks publisher, steps"):
        PublishingLoop({"w": torch.ones(4)}, policy=policy, client=client, state={})


def test_a_document_of_another_format_is_refused() -> None:
    data = canonical.serialize({"format": "plait-trainer-changes/9", "requires": []})
    packed = (torch.frombuffer(bytearray(data), dtype=torch.uint8),)
    with pytest.raises(UnsupportedFormat):
        SavedChanges.read(packed, canonical.digest_of(data))
