"""A follower against a real registry: forward, back, and by whatever way deltas lead."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plait.errors import FingerprintMismatch, LayoutChanged, NoPlan, NotFound, UnknownBase
from plait.tensors import bits_of
from plait.wire import ChannelDocument, HeldState
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_client.upload import put_cut, upload_frames
from plait_rollout.follower import Follower, FollowOptions
from plait_rollout.torch_module import TorchModuleEngine

from .line import Line
from .replicas import QUICK, WrappedEngine, follower_of, refuse_to_map, running, wrapped
from .states import (
    changed,
    copy_of,
    encoded_delta,
    fine_cut,
    fresh_state,
    layout_of,
    same_bits,
)
from .waiting import until

NewLine = Callable[..., Line]


def test_a_replica_follows_forward_and_stamps_every_version(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine)
    assert follower.catch_up().stamp == f"{line.policy}@1#1"
    for _ in range(3):
        version = line.publish()
        status = follower.catch_up()
        assert same_bits(live, line.states[version.seq])
        assert (status.seq, status.ready, status.phase) == (version.seq, True, "serving")
        assert engine.version() == f"{line.policy}@{version.seq}#{version.generation}"
        assert {"plan", "fetch", "stage", "pause", "apply", "verify"} <= status.durations.keys()


def test_five_versions_are_caught_up_in_one_move(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = wrapped(live)
    follower = follower_of(fetcher, line, engine)
    follower.catch_up()
    for _ in range(5):
        line.publish()
    before = engine.applied
    status = follower.catch_up()
    assert engine.applied == before + 1
    assert len(engine.staged[-1].steps) == 5
    assert status.seq == 6
    assert same_bits(live, line.head)


def test_a_chain_over_two_cuts_is_two_moves(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = wrapped(live)
    follower = follower_of(fetcher, line, engine)
    line.publish(items=400)
    line.publish(items=400)
    line.publish(line.head)  # changes nothing: one state under two numbers, and no cut
    line.publish(items=150)
    status = follower.catch_up()
    assert [len(move.steps) for move in engine.staged] == [2, 1]
    assert engine.staged[0].stamp == f"{line.policy}@4#{status.generation}"
    assert status.seq == 5
    assert same_bits(live, line.head)


def test_a_rollback_is_a_newer_generation_of_an_older_version(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine)
    line.publish()
    line.publish()
    follower.catch_up()
    line.move(1)
    status = follower.catch_up()
    assert (status.seq, status.generation) == (1, 4)
    assert engine.version() == f"{line.policy}@1#4"
    assert same_bits(live, line.first)


def test_a_version_that_changes_nothing_moves_the_stamp_only(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine)
    follower.catch_up()
    line.publish(line.head)
    status = follower.catch_up()
    assert (status.seq, status.changed_elements) == (2, 0)
    assert engine.version() == f"{line.policy}@2#2"
    assert same_bits(live, line.first)
    line.publish()
    follower.catch_up()
    assert same_bits(live, line.head)


def test_being_there_is_no_move(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    engine = wrapped(copy_of(line.first))
    follower = follower_of(fetcher, line, engine)
    follower.catch_up()
    before = engine.applied
    assert follower.catch_up().moves == 1
    assert engine.applied == before


def test_a_replica_that_is_ahead_of_its_channel_goes_back(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    line.publish()
    line.publish()
    live = copy_of(line.head)
    line.move(2)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    assert follower.catch_up().seq == 2
    assert same_bits(live, line.states[2])


def test_a_replica_beside_the_lineage_goes_back_and_over(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    line.publish()
    beside = line.branch("dev", 1)
    beside.publish(changed(line.first, 77))
    line.publish()
    live = copy_of(beside.head)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    assert follower.catch_up().seq == line.versions[-1].seq
    assert same_bits(live, line.head)


def test_a_replica_can_be_sent_anywhere_and_stays_there(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    for _ in range(3):
        line.publish()
    with running(follower):
        until(lambda: follower.is_ready)
        assert follower.go_to("main~2").seq == 2
        assert same_bits(live, line.states[2])
        line.publish()
        until(lambda: follower.status().head_seq == 5)
        status = follower.status()
        assert (status.seq, status.pinned, status.ready) == (2, True, True)
        assert same_bits(live, line.states[2])
        assert follower.go_to("main").seq == 5
        assert same_bits(live, line.head)
    with pytest.raises(NotFound):
        follower.go_to("99")


def test_at_least_waits_for_a_version_to_come(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    line.publish()
    assert follower.at_least(2).seq == 2
    assert follower.at_least(1).seq == 2
    with pytest.raises(NotFound, match="its head is 2"):
        follower.at_least(3, timeout=0.2)
    line.publish()
    assert follower.at_least(3, timeout=30).seq == 3
    assert same_bits(live, line.head)


def test_max_lag_moves_only_a_replica_that_is_too_far_behind(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    engine = wrapped(copy_of(line.first))
    follower = follower_of(fetcher, line, engine)
    follower.catch_up()
    line.publish()
    line.publish()
    assert follower.max_lag(2).seq == 1
    assert follower.status().lag_versions == 2
    assert follower.max_lag(1).seq == 3


def test_a_version_committed_during_a_move_is_not_missed(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    engine = wrapped(live)
    follower = follower_of(fetcher, line, engine)

    def commit_once() -> None:
        engine.before_apply = lambda: None
        line.publish()

    with running(follower):
        until(lambda: follower.status().seq == 1)
        engine.before_apply = commit_once
        line.publish()
        until(lambda: follower.status().seq == 3)
    assert same_bits(live, line.head)


def test_an_unfinished_publish_is_invisible(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    follower.catch_up()
    cut = fine_cut(layout_of(line.first), 400)
    upload_frames(line.client, iter(encoded_delta(cut, line.first, changed(line.first, 5))))
    put_cut(line.client, cut)
    assert follower.catch_up().seq == 1
    assert same_bits(live, line.first)


def test_a_new_replica_is_not_ready_before_it_is_at_the_head(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    for _ in range(3):
        line.publish()
    engine = wrapped(copy_of(line.first))
    follower = follower_of(fetcher, line, engine)
    seen: list[bool] = []
    engine.before_apply = lambda: seen.append(follower.is_ready)
    assert not follower.is_ready
    with running(follower):
        until(lambda: follower.is_ready)
        assert follower.status().seq == 4
    assert seen == [False]


def test_readiness_may_allow_a_lag(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    options = FollowOptions(allowed_lag=1, wait_seconds=1.0)
    engine = wrapped(copy_of(line.first))
    follower = follower_of(fetcher, line, engine, options=options)
    follower.catch_up()
    line.publish()
    follower.max_lag(1)
    assert (follower.status().lag_versions, follower.is_ready) == (1, True)
    line.publish()
    follower.max_lag(5)
    assert (follower.status().lag_versions, follower.is_ready) == (2, False)


def test_unknown_weights_are_refused_though_their_seq_is_right(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line()
    live = copy_of(line.first)
    memory = tmp_path / "memory.json"
    follower_of(fetcher, line, TorchModuleEngine(live), memory=memory).catch_up()
    line.publish()
    bits_of(live["table"])[0] ^= 1
    before = copy_of(live)
    follower = follower_of(fetcher, line, TorchModuleEngine(live), memory=memory)
    with pytest.raises(UnknownBase):
        follower.catch_up()
    status = follower.status()
    assert (status.ready, status.seq, status.phase, status.error_code) == (
        False, None, "failed", "unknown_base",
    )  # fmt: skip
    assert same_bits(live, before)


def test_unknown_weights_are_reloaded_where_that_is_allowed_and_it_is_said(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(fresh_state(seed=5))
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine, reload_into=tmp_path / "d", module=engine)
    line.publish()
    status = follower.catch_up()
    assert (status.seq, status.ready) == (2, True)
    assert status.fallback.startswith("reloaded: ")
    assert same_bits(live, line.head)
    line.publish()
    status = follower.catch_up()
    assert status.fallback == ""
    assert same_bits(live, line.head)


def test_weights_changed_behind_the_engines_back_are_found_at_the_next_move(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    follower.catch_up()
    line.publish()
    kept = live["embed.weight"].clone()
    bits_of(live["embed.weight"])[:] += 1
    with pytest.raises(UnknownBase):
        follower.catch_up()
    assert not follower.is_ready
    live["embed.weight"].copy_(kept)
    assert follower.catch_up().seq == 2
    assert same_bits(live, line.head)


def test_a_restarted_engine_is_asked_and_catches_up(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    engine = wrapped(copy_of(line.first))
    follower = follower_of(fetcher, line, engine)
    line.publish()
    with running(follower):
        until(lambda: follower.status().seq == 2)
        restarted = copy_of(line.first)
        engine.inner = TorchModuleEngine(restarted)
        until(lambda: engine.inner.version().endswith("@2#2"))
        until(lambda: follower.is_ready)
    assert same_bits(restarted, line.head)


def test_a_full_reread_finds_drift_that_no_delta_touches(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live), name="drifter")
    follower.catch_up()
    follower.verify()
    bits_of(live["norm.weight"])[3] ^= 1 << 12
    with pytest.raises(FingerprintMismatch, match="something else changed"):
        follower.verify()
    follower.stop()
    (replica,) = line.client.replicas(line.policy)
    assert (replica.drifted, replica.report.error_code) == (True, "fingerprint_mismatch")
    assert not follower.is_ready
    bits_of(live["norm.weight"])[3] ^= 1 << 12
    assert follower.catch_up().ready


def test_a_scheduled_reread_brings_a_drifted_replica_back(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    options = FollowOptions(wait_seconds=1.0, backoff_seconds=0.05, verify_seconds=0.1)
    follower = follower_of(
        fetcher, line, engine, reload_into=tmp_path / "d", module=engine, options=options
    )
    with running(follower):
        until(lambda: follower.is_ready)
        bits_of(live["norm.weight"])[3] ^= 1 << 12
        until(lambda: bool(follower.status().fallback))
        until(lambda: follower.is_ready)
    assert same_bits(live, line.first)


def test_another_layout_needs_an_anchor_and_the_old_version_is_served(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    live = copy_of(line.first)
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    follower.catch_up()
    other = {**copy_of(line.first), "more": fresh_state()["norm.weight"]}
    line.publish_anchor(other)
    with pytest.raises((LayoutChanged, NoPlan)):
        follower.catch_up()
    status = follower.status()
    assert (status.seq, status.phase) == (1, "failed")
    assert status.error_code
    assert same_bits(live, line.first)


def test_deltas_are_taken_in_place_though_an_anchor_would_be_cheaper(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    """Every word changes at each version, so a later anchor is the cheapest way of all."""
    line = new_line(whole=True)
    states = [fresh_state(seed) for seed in range(10, 16)]
    for state in states:
        line.publish(state)
    line.publish_anchor(line.head)
    first = line.versions[0]
    held = HeldState(layout_digest=first.layout_digest, fingerprint=first.fingerprint)
    plans = [
        line.client.plan(line.policy, held, "main", allow_anchor=allowed).steps
        for allowed in (True, False)
    ]
    assert [step.kind for step in plans[0]] == ["anchor"]
    assert {step.kind for step in plans[1]} == {"forward"}
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine, reload_into=tmp_path / "d", module=engine)
    assert follower.catch_up().fallback == ""
    assert same_bits(live, line.head)


def test_a_goal_without_a_chain_of_deltas_is_refused_in_place_and_reloaded_otherwise(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    line.publish_anchor(fresh_state(10))
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    with pytest.raises(NoPlan, match="no chain"):
        follower_of(fetcher, line, engine).catch_up()
    assert same_bits(live, line.first)
    follower = follower_of(fetcher, line, engine, reload_into=tmp_path / "d", module=engine)
    assert follower.catch_up().fallback.startswith("reloaded: no chain")
    assert same_bits(live, line.head)


def test_a_reload_whose_folder_somebody_changed_is_built_anew(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(line.first)
    module = TorchModuleEngine(live)
    engine = WrappedEngine(module)
    engine.before_attach = refuse_to_map
    folder = tmp_path / "d"
    follower = follower_of(fetcher, line, engine, reload_into=folder, module=module)
    follower.catch_up()
    edited = CheckpointFolder(folder, writable=True)
    edited.bits("norm.weight")[0] ^= np.uint32(1)
    edited.flush()
    line.publish()
    with running(follower):
        until(lambda: follower.status().seq == 2)
    assert same_bits(live, line.head)


def test_a_registry_whose_polls_do_not_wait_is_not_stormed(
    new_line: NewLine, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may drop `Prefer`: then every poll is answered at once."""
    line = new_line()
    asked: list[float] = []
    honest = RegistryClient.wait_channel

    def at_once(
        client: RegistryClient, policy: str, channel: str, etag: str | None, wait: float
    ) -> ChannelDocument | None:
        asked.append(time.monotonic())
        return honest(client, policy, channel, etag, 0.0)

    monkeypatch.setattr(RegistryClient, "wait_channel", at_once)
    follower = follower_of(fetcher, line, TorchModuleEngine(copy_of(line.first)))
    with running(follower):
        until(lambda: len(asked) == 4)
        line.publish()
        until(lambda: follower.status().seq == 2)
    # The first poll is for a start; each that brings no news is followed by a pause.
    assert asked[3] - asked[1] >= 1.0


def test_an_engine_that_cannot_be_mapped_is_reloaded(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(line.first)
    module = TorchModuleEngine(live)
    engine = WrappedEngine(module)
    engine.before_attach = refuse_to_map
    follower = follower_of(fetcher, line, engine, reload_into=tmp_path / "d", module=module)
    for _ in range(2):
        line.publish()
        status = follower.catch_up()
        assert (status.way, status.ready) == ("reload", True)
        assert "transformed" in status.fallback
        assert same_bits(live, line.head)
        assert module.version() == status.stamp


def test_the_fleet_shows_what_is_served_and_how_long_it_took(
    new_line: NewLine, fetcher: Fetcher
) -> None:
    line = new_line()
    options = FollowOptions(wait_seconds=1.0, location="rack 7")
    follower = follower_of(
        fetcher, line, TorchModuleEngine(copy_of(line.first)), name="r1", options=options
    )
    line.publish()
    with running(follower):
        until(lambda: follower.is_ready)
    (replica,) = line.client.replicas(line.policy)
    report = replica.report
    assert (report.phase, report.seq, report.engine, report.location) == (
        "serving", 2, "in-place", "rack 7",
    )  # fmt: skip
    assert (replica.lag_versions, replica.drifted, replica.lost) == (0, False, False)
    assert report.fingerprint == line.versions[-1].fingerprint
    assert report.durations["pause"] >= 0


def test_a_change_is_told_once(new_line: NewLine, fetcher: Fetcher) -> None:
    line = new_line()
    told: list[tuple[int | None, str]] = []
    follower: Follower = follower_of(
        fetcher,
        line,
        TorchModuleEngine(copy_of(line.first)),
        options=QUICK,
        on_change=lambda status: told.append((status.seq, status.error_code)),
    )
    with running(follower):
        until(lambda: follower.is_ready)
        line.publish()
        until(lambda: follower.status().seq == 2)
    assert told == [(1, ""), (2, "")]


def test_a_reload_that_cannot_begin_keeps_the_old_version_served(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    live = copy_of(line.first)
    engine = TorchModuleEngine(live)
    follower = follower_of(fetcher, line, engine, reload_into=tmp_path / "d", module=engine)
    follower.catch_up()
    line.publish_anchor({**copy_of(line.first), "more": fresh_state()["norm.weight"]})
    with pytest.raises(LayoutChanged):
        follower.catch_up()
    status = follower.status()
    assert (status.seq, status.ready, status.error_code) == (1, True, "layout_changed")
    assert same_bits(live, line.first)
    line.move(1)
    assert follower.catch_up().seq == 1
