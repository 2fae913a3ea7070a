"""Checkouts killed with SIGKILL at every step: the next run repairs the folder."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import BaseMismatch, CheckpointInvalid, NoSpace, StoreError
from plait_client import checkout_folder
from plait_client.cache import ChunkCache
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient
from plait_client.verification import verify_folder
from tests.client import checkpoints
from tests.client.checkpoint_line import Line, make_line
from tests.client.commands import LARGEST_FILE, Command
from tests.client.serving import ServedRegistry

MOVE_POINTS = (
    "journal.record", "journal.record:2", "journal.synced", "move.journalled",
    "journal.scattered", "journal.scattered:3", "move.flushed", "move.stamped",
)  # fmt: skip
BUILD_POINTS = (
    "build.base", "build.group", "build.done", "placing.begun", "placing.file",
    "placing.file:2", "placing.done",
)  # fmt: skip


class Setting:
    """A line, its registry, and a cache that has all of it."""

    def __init__(self, registry: ServedRegistry, fetcher: Fetcher, line: Line) -> None:
        self.registry = registry
        self.fetcher = fetcher
        self.line = line

    def start(self, ref: str, folder: Path, *more: str, **environment: str) -> Command:
        known = {"PLAIT_URL": self.registry.url, "PLAIT_CACHE": str(self.fetcher.cache.root)}
        return Command(["checkout", ref, str(folder), *more], known | environment)

    def killed_at(self, point: str, ref: str, folder: Path, *more: str) -> None:
        result = self.start(ref, folder, *more, PLAIT_FAILPOINT=point).result()
        assert result.code == -signal.SIGKILL, result

    def checkout(self, seq: int, folder: Path, **options: bool) -> bool:
        """Check out, prove the result, and say whether something was repaired."""
        result = checkout(
            self.fetcher.client, self.line.ref(seq), folder, fetcher=self.fetcher, **options
        )
        assert checkpoints.read(folder) == checkpoints.expected(self.line.versions[seq - 1])
        assert result.version.seq == seq
        left = {path.name for path in (folder / ".plait").iterdir()}
        assert left == {"lock", "state.json"}
        return result.repaired


@pytest.fixture(scope="module")
def setting(
    registry: ServedRegistry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    root = tmp_path_factory.mktemp("crashes")
    with RegistryClient(registry.url) as client:
        fetcher = Fetcher(client, ChunkCache(root / "cache"))
        line = make_line(fetcher, "crashes", root / "in", 4, seed=50)
        yield Setting(registry, fetcher, line)


@pytest.mark.parametrize("point", MOVE_POINTS)
def test_a_move_killed_at_any_step_is_repaired(
    setting: Setting, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at(point, setting.line.ref(4), out)
    begun = not point.startswith("journal.record") and point != "journal.synced"
    repaired = setting.checkout(3 if begun else 4, out)
    assert repaired == begun
    # And on to somewhere else, as if nothing had happened.
    setting.checkout(2, out)


@pytest.mark.parametrize("point", BUILD_POINTS)
def test_a_first_checkout_killed_at_any_step_is_repaired(
    setting: Setting, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    setting.killed_at(point, setting.line.ref(3), out)
    setting.checkout(3, out)
    assert (out / "tokenizer/vocab.txt").exists()


@pytest.mark.parametrize("point", ["build.base", "placing.begun", "placing.file:2", "placing.done"])
def test_a_rebuild_killed_at_any_step_is_repaired_to_the_old_or_the_new_version(
    setting: Setting, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at(point, setting.line.ref(1), out, "--rebuild")
    assert setting.checkout(1, out) == (point != "build.base" and point != "placing.done")


def test_checkouts_killed_at_random_moments_end_at_a_whole_version(
    setting: Setting, tmp_path: Path
) -> None:
    chance = random.Random(7)
    out = tmp_path / "out"
    for _ in range(10):
        command = setting.start(setting.line.ref(chance.randint(1, 4)), out)
        time.sleep(chance.uniform(0.05, 0.6))
        command.kill()
    setting.checkout(2, out)


def test_repair_needs_no_registry(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    result = setting.start(setting.line.ref(1), out, PLAIT_URL="http://127.0.0.1:9").result()
    assert result.code == 4, result
    assert checkpoints.read(out) == checkpoints.expected(setting.line.versions[3])


def test_a_damaged_journal_makes_new_files(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    journal = out / ".plait/journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    assert setting.checkout(4, out) is True


def test_files_that_vanish_in_the_middle_of_a_move_are_made_anew(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("move.journalled", setting.line.ref(4), out)
    (out / "model.safetensors").unlink()
    assert setting.checkout(4, out) is True


def test_a_folder_in_the_middle_of_a_move_is_not_verified(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    version = setting.fetcher.client.version("crashes", "4")
    with pytest.raises(CheckpointInvalid, match="middle of a move"):
        verify_folder(out, version)


def test_a_base_that_was_changed_where_a_delta_writes_is_refused_before_the_first_write(
    setting: Setting, tmp_path: Path
) -> None:
    """Even if nothing shows from outside: size and time of the file are the old ones."""
    out = tmp_path / "out"
    setting.checkout(3, out)
    shard = out / "model.safetensors"
    found = shard.stat()
    old, new = (
        (root / "model.safetensors").read_bytes()
        for root in (setting.line.folder(3), setting.line.folder(4))
    )
    before = bytearray(shard.read_bytes())
    changed = [i for i in range(len(old)) if old[i] != new[i]]
    # Both files have the tensors in one order, but the header may differ in length.
    shift = len(before) - len(old)
    before[changed[0] + shift] ^= 0x80
    shard.write_bytes(before)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(BaseMismatch, match="--rebuild"):
        checkout(setting.fetcher.client, setting.line.ref(4), out, fetcher=setting.fetcher)
    assert shard.read_bytes() == before
    assert not (out / ".plait/journal").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_is_said_and_the_folder_stays_as_it_was(
    setting: Setting, tmp_path: Path, existing: bool
) -> None:
    out = tmp_path / "out"
    if existing:
        setting.checkout(3, out)
    # A limit on file sizes stands for the disk: the journal or the new files don't fit.
    command = setting.start(setting.line.ref(4), out, "--json", **{LARGEST_FILE: "800"})
    result = command.result()
    assert result.code == NoSpace.exit_code, result
    assert '"code":"no_space"' in result.stderr
    assert result.stdout == ""
    if existing:
        assert checkpoints.read(out) == checkpoints.expected(setting.line.versions[2])
    else:
        assert not out.exists()
    setting.checkout(4, out)


def test_files_that_can_not_be_written_are_found_before_the_move_begins(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    opened = np.memmap

    def read_only(path: Path, dtype: Any, mode: str) -> Any:
        """A file system's refusal: the tests may run as a user whom modes don't stop."""
        if mode == "r+":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, dtype, mode)

    with monkeypatch.context() as patched:
        patched.setattr(np, "memmap", read_only)
        with pytest.raises(StoreError, match="Permission denied"):
            setting.checkout(4, out)
    verify_folder(out, setting.fetcher.client.version("crashes", "3"))
    assert setting.checkout(4, out) is False


def test_a_copy_of_a_half_moved_folder_is_repaired_too(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered:2", setting.line.ref(4), out)
    shutil.copytree(out, tmp_path / "copy")
    assert setting.checkout(4, tmp_path / "copy") is True


def test_a_build_that_was_cut_short_is_not_taken_for_the_files_that_were_taking_their_places(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.killed_at("placing.file", setting.line.ref(3), out)
    setting.killed_at("build.base", setting.line.ref(1), out, "--rebuild")
    assert setting.checkout(3, out) is True


@pytest.mark.parametrize("point", ["placing.begun", "placing.file", "placing.done"])
def test_an_interrupt_while_files_take_their_places_loses_none_of_them(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Ctrl-C runs the clean-up that a kill doesn't."""
    out = tmp_path / "out"
    setting.checkout(3, out)

    def interrupted(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkout_folder, "failpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setting.checkout(1, out, rebuild=True)
    setting.checkout(1, out)


def test_new_files_that_vanish_on_the_way_to_their_places_are_made_again(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("placing.file", setting.line.ref(1), out, "--rebuild")
    for building in (out / ".plait").glob("building-*"):
        shutil.rmtree(building)
    assert setting.checkout(1, out) is True


def test_a_file_that_somebody_changed_in_the_middle_of_a_move_is_not_believed(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    # An element that the delta leaves alone, so that only a full pass can see it.
    old, new = (setting.line.versions[seq - 1]["model.packed"].reshape(-1) for seq in (3, 4))
    edited = CheckpointFolder(out, writable=True)
    edited.bits("model.packed")[np.flatnonzero(old == new)[0]] ^= 1
    edited.flush()
    assert setting.checkout(4, out) is True


@pytest.mark.parametrize("point", ["placing.begun", "placing.file"])
def test_new_files_that_somebody_changed_on_the_way_to_their_places_are_not_believed(
    setting: Setting, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at(point, setting.line.ref(1), out, "--rebuild")
    on_their_way = list(out.glob(".plait/building-*/model.safetensors"))
    weights = on_their_way[0] if on_their_way else out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert setting.checkout(1, out) is True


def test_what_killed_runs_left_lying_is_cleared_away(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    inner = out / ".plait"
    (inner / "building-0123").mkdir()
    for name in (".tmp-0123", "journal.tmp", "building-0123/model.safetensors"):
        (inner / name).write_bytes(b"half")
    assert setting.checkout(4, out) is False


def test_a_torn_folder_is_not_published_and_is_nobodys_base(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    whole = setting.line.folder(4)
    for request in (Request(out, "torn"), Request(whole, "crashes", base=out)):
        with pytest.raises(CheckpointInvalid, match="middle of a move"):
            publish(request, setting.fetcher)
    with pytest.raises(CheckpointInvalid, match="middle of a move"):
        checkout(
            setting.fetcher.client, setting.line.ref(4), tmp_path / "new", base=out,
            fetcher=setting.fetcher,
        )  # fmt: skip
    assert not (tmp_path / "new").exists()


def test_an_old_file_may_have_the_name_of_a_new_folder(setting: Setting, tmp_path: Path) -> None:
    one, two = (
        checkpoints.write(tmp_path / name, bits)
        for name, bits in zip(("one", "two"), setting.line.versions, strict=False)
    )
    (one / "extra").write_text("a file")
    (two / "extra/deep").mkdir(parents=True)
    (two / "extra/deep/a.txt").write_text("a folder")
    publish(Request(one, "extra"), setting.fetcher)
    publish(Request(two, "extra", mode="anchor"), setting.fetcher)
    out = tmp_path / "out"
    for seq, folder in ((1, one), (2, two), (1, one)):
        fetcher = setting.fetcher
        checkout(fetcher.client, f"extra@{seq}", out, fetcher=fetcher, rebuild=out.exists())
        mine = out / "extra"
        assert mine.is_dir() == (folder / "extra").is_dir()
        assert {p.name for p in mine.rglob("*")} == {p.name for p in (folder / "extra").rglob("*")}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["version"].update(fingerprint="g" * 32),
        lambda state: state["version"].update(layout_digest=3),
        lambda state: state["files"][0].update(name="a\0b"),
        lambda state: state.update(leaving=[["a"]]),
    ],
)
def test_a_damaged_state_file_is_a_typed_error_and_rebuilt(
    setting: Setting, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    path = out / ".plait/state.json"
    state = json.loads(path.read_bytes())
    change(state)
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointInvalid, match="isn't a checkout's state"):
        setting.checkout(4, out)
    setting.checkout(4, out, rebuild=True)


def test_a_pipe_where_a_file_of_the_folder_belongs_blocks_nobody(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    state = out / ".plait/state.json"
    state.unlink()
    os.mkfifo(state)
    with pytest.raises(CheckpointInvalid, match="isn't a checkout's state"):
        setting.checkout(4, out)
    setting.checkout(3, out, rebuild=True)
    setting.killed_at("journal.scattered", setting.line.ref(4), out)
    journal = out / ".plait/journal"
    journal.unlink()
    os.mkfifo(journal)
    setting.checkout(4, out)


def test_a_lock_that_is_a_link_to_nowhere_is_refused(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    lock = out / ".plait/lock"
    lock.unlink()
    lock.symlink_to("nowhere")
    with pytest.raises(StoreError, match="lock"):
        setting.checkout(4, out)


def test_a_side_file_that_became_a_circle_of_links_is_an_error_of_ours(
    setting: Setting, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    setting.checkout(3, out)
    config = out / "config.json"
    config.unlink()
    config.symlink_to(config.name)
    with pytest.raises(StoreError, match=r"config\.json"):
        setting.checkout(4, out)
