"""A directory that follows: moved by deltas, and built anew when that can't be."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from plait.errors import StoreUnavailable, UsageError
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_rollout.directory import DirectoryReplica
from plait_rollout.follower import Follower
from plait_rollout.status import Status

from .line import Line
from .replicas import QUICK, running
from .states import State, fresh_state, same_bits
from .waiting import until

NewLine = Callable[..., Line]


def follower_into(
    folder: Path, line: Line, fetcher: Fetcher, on_change: Callable[[Status], None] | None = None
) -> Follower:
    return Follower(
        fetcher,
        DirectoryReplica(folder, fetcher),
        policy=line.policy,
        name="d",
        options=QUICK,
        on_change=on_change,
    )


def state_in(folder: Path) -> State:
    files = [safetensors.torch.load_file(folder / name) for name in CheckpointFolder(folder).files]
    return {name: tensor for file in files for name, tensor in file.items()}


def test_it_follows_forward_back_and_over_a_new_layout(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    folder = tmp_path / "d"
    follower = follower_into(folder, line, fetcher)
    for _ in range(2):
        assert follower.catch_up().ready
        assert same_bits(state_in(folder), line.head)
        line.publish()
    assert follower.catch_up().seq == 3
    line.move(1)
    assert follower.catch_up().seq == 1
    assert same_bits(state_in(folder), line.first)
    line.move(3, kind="promote")
    line.publish_anchor({"only": fresh_state()["norm.weight"]})
    assert follower.catch_up().seq == 4
    assert same_bits(state_in(folder), line.head)


def test_a_directory_that_somebody_changed_is_built_anew_and_it_is_said(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    folder = tmp_path / "d"
    follower_into(folder, line, fetcher).catch_up()
    edited = CheckpointFolder(folder, writable=True)
    edited.bits("norm.weight")[0] ^= np.uint32(1)
    edited.flush()
    line.publish()
    errors: list[str] = []
    follower = follower_into(folder, line, fetcher, lambda now: errors.append(now.error_code))
    with running(follower):
        until(lambda: follower.is_ready)
    assert "base_mismatch" in errors
    assert follower.status().fallback.startswith("built anew")
    assert same_bits(state_in(folder), line.head)


def test_a_directory_that_somebody_moved_elsewhere_is_brought_back(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    """Nothing happens on the channel: a cheap look finds it."""
    line = new_line(whole=True)
    line.publish()
    folder = tmp_path / "d"
    with running(follower_into(folder, line, fetcher)) as follower:
        until(lambda: follower.is_ready)
        checkout(fetcher.client, f"{line.policy}@1", folder, fetcher=fetcher)
        until(lambda: follower.status().moves == 2)
        assert follower.status().seq == 2
    assert same_bits(state_in(folder), line.head)


def test_a_copied_directory_is_read_once_and_then_believed(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    follower_into(tmp_path / "d", line, fetcher).catch_up()
    shutil.copytree(tmp_path / "d", tmp_path / "copy")
    replica = DirectoryReplica(tmp_path / "copy", fetcher)
    layout = fetcher.layout(line.versions[0].layout_digest)
    assert replica.attach(layout) is not None
    assert replica.still_holds()
    (tmp_path / "copy/model.safetensors").touch()
    assert not replica.still_holds()
    assert replica.held is None


def test_a_move_that_wrote_nothing_takes_nothing_away(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = new_line(whole=True)
    follower = follower_into(tmp_path / "d", line, fetcher)
    follower.catch_up()
    line.publish()

    def away(*args: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(Fetcher, "fetch_step", away)
        with pytest.raises(StoreUnavailable):
            follower.catch_up()
        status = follower.status()
        assert (status.seq, status.error_code) == (1, "store_unavailable")
        assert status.fingerprint is not None
    assert follower.catch_up().seq == 2


def test_a_folder_of_somebody_elses_is_left_alone(
    new_line: NewLine, fetcher: Fetcher, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="isn't a checkout"):
        follower_into(tmp_path, line, fetcher).catch_up()
    assert (tmp_path / "notes.txt").read_text() == "mine"
