"""Faults on the way of a publish: nothing lost, nothing twice, and only commits move the base."""

import contextlib
import threading
import traceback
import uuid
import zlib
from collections.abc import Iterator

import pytest
import torch

from plait.errors import (
    BaseMismatch,
    CommitUnknown,
    HeadMoved,
    PlaitError,
    RegistryUnavailable,
)
from plait.wire import ChannelDocument, MoveRequest
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.registry_process import RegistryProcess
from tests.trainer_agent.tiny_models import Run

CHUNK_PUT = "PUT /v1/chunks/"


def seqs(client: RegistryClient, policy: str) -> list[int]:
    return [version.seq for version in client.all_versions(policy)][::-1]


def move(client: RegistryClient, policy: str, to: int, kind: str = "rollback") -> ChannelDocument:
    request = MoveRequest(
        to=str(to), expected_generation=client.channel(policy, "main").generation,
        kind=kind, move_id=uuid.uuid4().hex, reason="it diverged", actor="ops",
    )  # type: ignore[arg-type]  # fmt: skip
    return client.move_channel(policy, "main", request)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    # Every test has weights of its own: a chunk that another one uploaded isn't sent again.
    return Run(seed=zlib.crc32(request.node.name.encode()))


@pytest.fixture
def fragile(far: RegistryClient, run: Run, policy: str) -> Iterator[Publisher]:
    """At version 1, behind the proxy, and without any patience."""
    publisher = Publisher(run.model, run.optimizer, client=far, policy=policy, patience=0.0)
    publisher.publish().result()
    yield publisher
    publisher.close(abandon=True)


def test_a_failed_upload_leaves_its_changes_to_the_next_publish(
    fragile: Publisher, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    proxy.lose(CHUNK_PUT, "cut", times=2)
    for _ in range(2):
        run.step()
        with pytest.raises(RegistryUnavailable):
            fragile.publish().result()
        assert client.version(policy, "main").seq == 1
        assert fragile.version is not None
        assert fragile.version.seq == 1
    assert proxy.applied == [CHUNK_PUT] * 2
    run.step()
    version = fragile.publish().version
    assert (version.seq, version.parent) == (2, 1)
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_a_failed_anchor_is_an_anchor_of_what_is_there_next_time(
    far: RegistryClient, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=far, policy=policy, patience=0.0) as publisher:
        proxy.lose(CHUNK_PUT, "cut")
        with pytest.raises(RegistryUnavailable):
            publisher.publish().result()
        run.step()
        assert publisher.publish().version.kind == "anchor"
        first = run.expected()
        run.step()
        publisher.publish().result()
    assert_bits_equal(weights_at(client, policy, 1), first)
    assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_a_lost_answer_to_a_commit_makes_exactly_one_version(
    fragile: Publisher, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    commits = f"POST /v1/policies/{policy}/commits"
    proxy.lose(commits, "mute")
    run.step()
    version = fragile.publish().version
    assert proxy.applied == [commits]
    assert (version.seq, seqs(client, policy)) == (2, [1, 2])


def test_a_commit_without_an_answer_is_settled_before_the_next_one(
    fragile: Publisher, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    proxy.lose(f"POST /v1/policies/{policy}/commits", "mute")
    proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=5)
    run.step()
    second = run.expected()
    with pytest.raises(CommitUnknown):
        fragile.publish().result()
    assert client.version(policy, "main").seq == 2  # it was committed all the same
    proxy.heal()
    run.step()
    version = fragile.publish().version
    assert (version.seq, version.parent, seqs(client, policy)) == (3, 2, [1, 2, 3])
    assert_bits_equal(weights_at(client, policy, 2), second)
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_a_commit_that_never_arrived_is_sent_again_before_the_next_one(
    fragile: Publisher, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    proxy.lose(f"POST /v1/policies/{policy}/commits", "cut")
    proxy.lose(f"GET /v1/policies/{policy}/commits/", "cut", times=5)
    run.step()
    second = run.expected()
    with pytest.raises(CommitUnknown):
        fragile.publish({"step": 2}).result()
    assert client.version(policy, "main").seq == 1
    proxy.heal()
    run.step()
    assert fragile.publish({"step": 3}).version.seq == 3
    assert client.version(policy, "2").metadata == {"step": 2}
    assert_bits_equal(weights_at(client, policy, 2), second)
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_a_killed_registry_is_waited_for(
    own_registry: RegistryProcess, run: Run, policy: str
) -> None:
    with (
        RegistryClient(own_registry.url, attempts=1) as client,
        Publisher(run.model, client=client, policy=policy) as publisher,
    ):
        publisher.publish().result()
        own_registry.kill()
        run.step()
        second = run.expected()
        waiting = [publisher.publish()]
        run.step()
        waiting.append(publisher.publish())
        assert not any(future.done() for future in waiting)
        own_registry.start()
        assert [future.version.seq for future in waiting] == [2, 3]
        assert_bits_equal(weights_at(client, policy, 2), second)
        assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_a_registry_killed_again_and_again_during_a_publish_commits_it_once(
    own_registry: RegistryProcess, run: Run, policy: str
) -> None:
    with (
        RegistryClient(own_registry.url, attempts=1) as client,
        Publisher(run.model, client=client, policy=policy) as publisher,
    ):
        publisher.publish().result()
        own_registry.kill()
        run.step()
        future = publisher.publish()
        for moment in ("chunk.stored", "commit.written", "commit.committed"):
            own_registry.start(failpoint=moment)
            own_registry.await_death()
        own_registry.start()
        assert future.version.seq == 2
        assert seqs(client, policy) == [1, 2]
        assert_bits_equal(weights_at(client, policy, 2), run.expected())


def test_closing_with_a_registry_that_stays_away_can_be_hurried(
    own_registry: RegistryProcess, run: Run, policy: str
) -> None:
    with RegistryClient(own_registry.url, attempts=1) as client:
        publisher = Publisher(run.model, client=client, policy=policy)
        publisher.publish().result()
        own_registry.kill()
        run.step()
        future = publisher.publish()
        with pytest.raises(RegistryUnavailable):
            publisher.close(abandon=True)
        assert isinstance(future.exception(), RegistryUnavailable)


def test_of_two_racing_trainers_one_wins_and_the_other_loses_nothing(
    run: Run, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
    rival = Run()
    rival.model.load_state_dict(run.saved()["model"])
    publishers = [Publisher(each.model, client=client, policy=policy) for each in (run, rival)]
    with torch.no_grad():
        rival.model.gain += 1
    run.step()
    barrier = threading.Barrier(2)
    outcomes: list[object] = [None, None]

    def publish(number: int) -> None:
        barrier.wait()
        try:
            outcomes[number] = publishers[number].publish().version.seq
        except HeadMoved as error:
            outcomes[number] = error

    threads = [threading.Thread(target=publish, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner, loser = (0, 1) if outcomes[0] == 2 else (1, 0)
    assert outcomes[winner] == 2
    refusal = outcomes[loser]
    assert isinstance(refusal, HeadMoved)
    assert refusal.details["head"]["seq"] == 2
    depths = set()
    for _ in range(3):  # and so it stays, until somebody decides
        with pytest.raises(HeadMoved) as again:
            publishers[loser].publish()
        depths.add(len(traceback.extract_tb(again.tb)))
    assert len(depths) == 1  # each time an error of its own, which holds no frames of earlier times
    with pytest.raises(BaseMismatch, match="are not version 2"):
        publishers[loser].rebase()
    publishers[loser].rebase(to=1)
    version = publishers[loser].publish().version
    assert (version.seq, version.parent) == (3, 1)
    for publisher in publishers:
        publisher.close()
    held = [each.expected() for each in (run, rival)]
    assert_bits_equal(weights_at(client, policy, 2), held[winner])
    assert_bits_equal(weights_at(client, policy, 3), held[loser])


def test_publishes_behind_a_refused_one_are_refused_and_kept(
    run: Run, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=client, policy=policy, queue_size=4) as publisher:
        publisher.publish()
        run.step()
        publisher.publish().result()
        move(client, policy, 1)
        futures, refused = [], None
        for _ in range(4):
            run.step()
            try:
                futures.append(publisher.publish())
            except HeadMoved as error:
                refused = error
        publisher_error = [future.exception() for future in futures]
        assert all(isinstance(error, HeadMoved) for error in publisher_error)
        assert publisher_error or refused
        publisher.rebase(to=2)
        assert publisher.publish().version.seq == 3
    assert_bits_equal(weights_at(client, policy, 3), run.expected())


def test_after_a_rollback_publishes_are_refused_with_the_reason(
    run: Run, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish().result()
        good = run.saved()
        for _ in range(2):
            run.step()
            publisher.publish().result()
        move(client, policy, 1)
        run.step()
        refusal = publisher.publish().exception()
        assert isinstance(refusal, HeadMoved)
        assert "it diverged" in str(refusal) + str(refusal.details)
        with pytest.raises(BaseMismatch):
            publisher.rebase()
        run.model.load_state_dict(good["model"])
        publisher.rebase()
        run.step()
        version = publisher.publish().version
    assert (version.seq, version.parent) == (4, 1)
    assert client.version(policy, "main").seq == 4
    assert_bits_equal(weights_at(client, policy, 4), run.expected())


def test_a_trainer_that_attaches_after_a_rollback_is_told_who_and_why(
    run: Run, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
        run.step()
        publisher.publish().result()
    move(client, policy, 1)
    with pytest.raises(HeadMoved, match=r"version 2 .* version 1: rollback by ops .*it diverged"):
        Publisher(run.model, client=client, policy=policy)


def test_a_channel_that_went_away_and_came_back_is_no_conflict(
    run: Run, client: RegistryClient, policy: str
) -> None:
    with Publisher(run.model, client=client, policy=policy) as publisher:
        publisher.publish()
        run.step()
        publisher.publish().result()
        move(client, policy, 1)
        move(client, policy, 2, kind="promote")
        run.step()
        assert publisher.publish().version.seq == 3
    assert client.channel(policy, "main").generation == 5


def test_no_refusal_ever_moved_the_head(
    fragile: Publisher, run: Run, proxy: Proxy, client: RegistryClient, policy: str
) -> None:
    """Three publishes that can fail in three ways; the publisher and the registry agree always."""
    for head in (CHUNK_PUT, "POST /v1/chunks:missing", f"POST /v1/policies/{policy}/commits"):
        proxy.heal()
        proxy.lose(head, "cut")
        run.step()
        with contextlib.suppress(PlaitError):
            fragile.publish().result()
        assert fragile.version is not None
        assert client.version(policy, "main").seq == fragile.version.seq
    proxy.heal()
    run.step()
    fragile.publish().result()
    assert_bits_equal(weights_at(client, policy, "main"), run.expected())
