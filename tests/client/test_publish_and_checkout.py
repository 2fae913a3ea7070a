"""Publish and checkout against a real registry: every version, in any order, bit for bit."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from plait.errors import (
    BaseMismatch,
    CheckpointInvalid,
    HeadMoved,
    LayoutChanged,
    NotFound,
    UnknownBase,
    UsageError,
)
from plait.wire import VersionDocument
from plait_client import publish as publishing
from plait_client.cache import ChunkCache
from plait_client.checkout import checkout
from plait_client.fetch import Fetcher
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient
from tests.client import checkpoints
from tests.client.checkpoints import Bits

ORDER = [3, 1, 6, 2, 5, 4, 6, 1]


def line(count: int = 6) -> list[Bits]:
    return list(
        itertools.accumulate(
            range(1, count), lambda bits, seed: checkpoints.stepped(bits, seed),
            initial=checkpoints.first_bits(),
        )
    )  # fmt: skip


def send(
    fetcher: Fetcher, policy: str, folder: Path, bits: Bits, *, files: int = 1, **options: object
) -> VersionDocument:
    checkpoints.write(folder, bits, files=files)
    return publish(Request(folder, policy, **options), fetcher)  # type: ignore[arg-type]


def publish_line(fetcher: Fetcher, policy: str, tmp_path: Path) -> list[Bits]:
    versions = line()
    for number, bits in enumerate(versions, start=1):
        sent = send(fetcher, policy, tmp_path / f"in-{number}", bits, files=1 + number % 3)
        assert sent.seq == number
        assert sent.fingerprint == checkpoints.independent_fingerprint(bits)
    return versions


def holds(folder: Path, bits: Bits) -> bool:
    return checkpoints.read(folder) == checkpoints.expected(bits)


def test_every_version_comes_back_in_any_order(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = publish_line(fetcher, policy, tmp_path)
    assert client.version(policy, "main").kind == "delta"
    ways = []
    for number in ORDER:
        result = checkout(client, f"{policy}@{number}", tmp_path / "moving", fetcher=fetcher)
        ways.append(result.way)
        assert holds(tmp_path / "moving", versions[number - 1])
        fresh = tmp_path / f"fresh-{number}"
        checkout(client, f"{policy}@{number}", fresh, fetcher=fetcher, rebuild=fresh.exists())
        assert holds(fresh, versions[number - 1])
        assert (fresh / "tokenizer/vocab.txt").read_text() == "a\nb\n"
    assert ways[0] == "built"
    assert "moved" in ways


def test_an_unchanged_publish_is_a_version_without_chunks(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    first = send(fetcher, policy, tmp_path / "a", checkpoints.first_bits())
    again = send(fetcher, policy, tmp_path / "a", checkpoints.first_bits(), message="a step")
    assert (again.seq, again.kind, again.changed_elements) == (2, "delta", 0)
    assert again.fingerprint == first.fingerprint
    assert again.metadata == {"message": "a step"}
    assert not client.manifest(again.manifest_digest).chunks
    checkout(client, f"{policy}@2", tmp_path / "out", fetcher=fetcher)
    assert checkout(client, f"{policy}@1", tmp_path / "out", fetcher=fetcher).way == "already there"


def test_a_lost_mirror_costs_a_checkout_and_nothing_else(
    fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = line(3)
    send(fetcher, policy, tmp_path / "1", versions[0])
    shutil.rmtree(fetcher.cache.root)
    assert send(fetcher, policy, tmp_path / "2", versions[1]).kind == "delta"
    (shard,) = (fetcher.cache.root / "mirrors").glob(f"{policy}-*/model.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-3] ^= 1
    shard.write_bytes(damaged)
    third = send(fetcher, policy, tmp_path / "3", versions[2])
    assert third.fingerprint == checkpoints.independent_fingerprint(versions[2])
    assert third.changed_elements < 200


def test_a_mirror_that_rots_unseen_is_found_by_the_sum_and_made_anew(
    fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = line(2)
    send(fetcher, policy, tmp_path / "1", versions[0])
    (shard,) = (fetcher.cache.root / "mirrors").glob(f"{policy}-*/model.safetensors")
    found = shard.stat()
    with shard.open("r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([byte[0] ^ 1]))

    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    second = send(fetcher, policy, tmp_path / "2", versions[1])
    assert second.fingerprint == checkpoints.independent_fingerprint(versions[1])
    checkout(fetcher.client, f"{policy}@2", tmp_path / "out", fetcher=fetcher)
    assert holds(tmp_path / "out", versions[1])


def test_a_given_base_must_be_the_head(fetcher: Fetcher, policy: str, tmp_path: Path) -> None:
    versions = line(3)
    send(fetcher, policy, tmp_path / "1", versions[0])
    second = send(fetcher, policy, tmp_path / "2", versions[1], base=tmp_path / "1")
    assert second.parent == 1
    with pytest.raises(BaseMismatch, match="isn't version 2"):
        send(fetcher, policy, tmp_path / "3", versions[2], base=tmp_path / "1")
    assert fetcher.client.version(policy, "main").seq == 2


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "new"])
def test_another_layout_needs_a_new_anchor(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path, change: str
) -> None:
    bits = checkpoints.first_bits()
    send(fetcher, policy, tmp_path / "1", bits)
    specs = dict(checkpoints.SPECS)
    other = dict(bits)
    if change == "shape":
        specs["model.half"] = ("F16", "<u2", (3, 17))
    elif change == "dtype":
        specs["model.half"] = ("BF16", "<u2", (17, 3))
    elif change == "missing":
        del other["model.half"]
    else:
        specs["model.more"] = ("F32", "<u4", (2,))
        other["model.more"] = np.zeros(2, "<u4")
    folder = checkpoints.write(tmp_path / "2", other, specs=specs)
    with pytest.raises(LayoutChanged, match=r"model\.(half|more).*--new-anchor"):
        publish(Request(folder, policy), fetcher)
    assert client.version(policy, "main").seq == 1
    checkout(client, f"{policy}@1", tmp_path / "out", fetcher=fetcher)
    anchor = publish(Request(folder, policy, mode="anchor"), fetcher)
    assert (anchor.seq, anchor.kind, anchor.parent) == (2, "anchor", 1)
    checkout(client, policy, tmp_path / "out", fetcher=fetcher)
    assert checkpoints.read(tmp_path / "out") == checkpoints.read(folder)
    checkout(client, f"{policy}@main~1", tmp_path / "out", fetcher=fetcher)
    assert holds(tmp_path / "out", bits)


def test_an_external_line_needs_its_base_once(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = line(3)
    first = send(fetcher, policy, tmp_path / "base", versions[0], mode="external")
    assert (first.external, first.proof) == (True, "unproven")
    send(fetcher, policy, tmp_path / "2", versions[1])
    send(fetcher, policy, tmp_path / "3", versions[2])
    out = tmp_path / "out"
    with pytest.raises(BaseMismatch, match="--base"):
        checkout(client, f"{policy}@3", out, fetcher=fetcher)
    assert not out.exists()
    wrong = checkpoints.write(tmp_path / "wrong", checkpoints.first_bits(9))
    with pytest.raises(UnknownBase):
        checkout(client, f"{policy}@3", out, base=wrong, fetcher=fetcher)
    assert not out.exists()
    checkout(client, f"{policy}@3", out, base=tmp_path / "base", fetcher=fetcher)
    assert holds(out, versions[2])
    assert (out / "config.json").exists()
    for number in (1, 2, 3):
        checkout(client, f"{policy}@{number}", out, fetcher=fetcher)
        assert holds(out, versions[number - 1])


def test_a_mirror_of_a_line_that_ended_does_not_stand_in_the_way_of_the_new_one(
    fetcher: Fetcher, policy: str, tmp_path: Path, client: RegistryClient
) -> None:
    """Another machine began the new line, so the mirror here knows nothing of it."""
    first = checkpoints.first_bits()
    send(fetcher, policy, tmp_path / "1", first)
    other = {name: bits for name, bits in first.items() if name != "model.half"}
    elsewhere = Fetcher(client, ChunkCache(tmp_path / "elsewhere"))
    send(elsewhere, policy, tmp_path / "2", other, mode="external")
    after = checkpoints.stepped(other, 1)
    with pytest.raises(BaseMismatch, match="--base"):
        send(fetcher, policy, tmp_path / "3", after)
    assert send(fetcher, policy, tmp_path / "3", after, base=tmp_path / "2").kind == "delta"


def test_a_checkout_can_begin_at_any_version_that_lies_here(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = publish_line(fetcher, policy, tmp_path)
    for number in (1, 4, 6):
        out = tmp_path / f"out-{number}"
        checkout(client, f"{policy}@{number}", out, base=tmp_path / "in-4", fetcher=fetcher)
        assert holds(out, versions[number - 1])
    assert holds(tmp_path / "in-4", versions[3])


def test_of_two_publishers_one_wins_and_the_other_loses_nothing(
    registry: object, client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    versions = line(3)
    send(fetcher, policy, tmp_path / "1", versions[0])
    other = Fetcher(client, ChunkCache(tmp_path / "other-cache"))
    real = publishing.commit_version

    def late(*args: object, **kwargs: object) -> VersionDocument:
        monkeypatch.setattr(publishing, "commit_version", real)
        send(other, policy, tmp_path / "2", versions[1])
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(publishing, "commit_version", late)
    with pytest.raises(HeadMoved) as caught:
        send(fetcher, policy, tmp_path / "3", versions[2])
    assert caught.value.details["head"]["seq"] == 2
    third = publish(Request(tmp_path / "3", policy), fetcher)
    assert third.parent == 2
    checkout(client, policy, tmp_path / "out", fetcher=fetcher)
    assert holds(tmp_path / "out", versions[2])


def test_a_publish_whose_answer_was_lost_is_not_made_twice(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    versions = line(2)
    send(fetcher, policy, tmp_path / "1", versions[0])
    real = publishing.commit_version

    def killed(*args: object, **kwargs: object) -> VersionDocument:
        real(*args, **kwargs)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "commit_version", killed)
    with pytest.raises(KeyboardInterrupt):
        send(fetcher, policy, tmp_path / "2", versions[1])
    monkeypatch.setattr(publishing, "commit_version", real)
    assert publish(Request(tmp_path / "2", policy), fetcher).seq == 2
    assert client.version(policy, "main").seq == 2
    assert publish(Request(tmp_path / "2", policy), fetcher).seq == 3  # a new one, unchanged


@pytest.mark.parametrize("mode", ["anchor", "external", "delta"])
def test_a_checkpoint_that_is_saved_over_while_it_is_published_is_not_committed(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, mode: str,
) -> None:  # fmt: skip
    versions = line(3)
    send(fetcher, policy, tmp_path / "1", versions[0])
    folder = checkpoints.write(tmp_path / "2", versions[1])
    real = publishing.fingerprint_weights
    upload = publishing.upload_frames

    def saved_over(*args: object, **kwargs: object) -> object:
        checkpoints.write(tmp_path / "3", versions[2])
        (tmp_path / "3/model.safetensors").replace(folder / "model.safetensors")
        return (real if mode == "external" else upload)(*args, **kwargs)  # type: ignore[arg-type]

    hooked = "fingerprint_weights" if mode == "external" else "upload_frames"
    monkeypatch.setattr(publishing, hooked, saved_over)
    with pytest.raises(CheckpointInvalid, match="changed while it was read"):
        publish(Request(folder, policy, mode=mode), fetcher)  # type: ignore[arg-type]
    assert client.version(policy, "main").seq == 1


def test_a_channel_that_does_not_exist_is_not_made_by_a_slip(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = line(3)
    send(fetcher, policy, tmp_path / "1", versions[0])
    with pytest.raises(UsageError, match="no channel 'mian'"):
        send(fetcher, policy, tmp_path / "2", versions[1], channel="mian")
    branch = send(fetcher, policy, tmp_path / "2", versions[1], channel="side", base=tmp_path / "1")
    assert (branch.channel, branch.parent, branch.generation) == ("side", 1, 1)
    assert client.channel(policy, "main").seq == 1


def test_after_a_rollback_the_next_publish_builds_on_the_head(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    from plait.wire import MoveRequest

    publish_line(fetcher, policy, tmp_path)
    move = MoveRequest(
        to="2", expected_generation=6, kind="rollback", move_id="0" * 16, reason="it got worse"
    )
    assert client.move_channel(policy, "main", move).generation == 7
    bits = checkpoints.first_bits(5)
    sent = send(fetcher, policy, tmp_path / "in-7", bits)
    assert (sent.seq, sent.parent, sent.generation) == (7, 2, 8)
    checkout(client, policy, tmp_path / "out", fetcher=fetcher)
    assert holds(tmp_path / "out", bits)


def test_foreign_folders_and_changed_checkouts_are_left_alone(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = line(2)
    send(fetcher, policy, tmp_path / "1", versions[0])
    send(fetcher, policy, tmp_path / "2", versions[1])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="isn't a checkout"):
        checkout(client, f"{policy}@1", foreign, fetcher=fetcher)
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]
    out = tmp_path / "out"
    checkout(client, f"{policy}@1", out, fetcher=fetcher)
    changed = checkpoints.write(out, checkpoints.stepped(versions[0], 77))
    before = checkpoints.read(changed)
    with pytest.raises(BaseMismatch, match="was changed"):
        checkout(client, f"{policy}@2", out, fetcher=fetcher)
    assert checkpoints.read(out) == before
    checkout(client, f"{policy}@2", out, fetcher=fetcher, rebuild=True)
    assert holds(out, versions[1])


def test_a_copied_checkout_is_proven_and_moved(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = publish_line(fetcher, policy, tmp_path)
    checkout(client, f"{policy}@5", tmp_path / "out", fetcher=fetcher)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert checkout(client, f"{policy}@6", tmp_path / "copy", fetcher=fetcher).way == "moved"
    assert holds(tmp_path / "copy", versions[5])


def test_a_reader_that_maps_the_files_never_sees_zeros_or_an_end(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    versions = publish_line(fetcher, policy, tmp_path)
    out = tmp_path / "out"
    checkout(client, f"{policy}@5", out, fetcher=fetcher)
    shard = out / "model.safetensors"
    inode, mapped = shard.stat().st_ino, np.memmap(shard, np.uint8, "r")
    assert checkout(client, f"{policy}@6", out, fetcher=fetcher).way == "moved"
    assert shard.stat().st_ino == inode
    assert mapped.tobytes() == shard.read_bytes()  # moved in place, under the reader's eyes
    before = mapped.tobytes()
    checkout(client, f"{policy}@1", out, fetcher=fetcher, rebuild=True)
    assert mapped.tobytes() == before  # replaced: the reader keeps the old file
    assert holds(out, versions[0])


def test_two_runs_do_not_work_on_one_folder(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    from plait.errors import ConflictError
    from plait_client.checkout_folder import open_checkout_folder

    send(fetcher, policy, tmp_path / "1", checkpoints.first_bits())
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with open_checkout_folder(tmp_path / "out"):
            inside.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    with pytest.raises(ConflictError, match="another run"):
        checkout(client, policy, tmp_path / "out", fetcher=fetcher)
    leave.set()
    holder.join()
    checkout(client, policy, tmp_path / "out", fetcher=fetcher)


def test_a_damaged_state_file_is_said_and_replaced_on_demand(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    bits = checkpoints.first_bits()
    send(fetcher, policy, tmp_path / "1", bits)
    out = tmp_path / "out"
    checkout(client, policy, out, fetcher=fetcher)
    state = out / ".plait/state.json"
    assert json.loads(state.read_text())["version"]["seq"] == 1
    state.write_text("{")
    with pytest.raises(CheckpointInvalid, match="state"):
        checkout(client, policy, out, fetcher=fetcher)
    checkout(client, policy, out, fetcher=fetcher, rebuild=True)
    assert holds(out, bits)


def test_what_does_not_exist_is_not_found(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        checkout(client, policy, tmp_path / "out", fetcher=fetcher)
    send(fetcher, policy, tmp_path / "1", checkpoints.first_bits())
    for ref in ("9", "nowhere", "main~3"):
        with pytest.raises(NotFound):
            checkout(client, f"{policy}@{ref}", tmp_path / "out", fetcher=fetcher)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "placing", "building": ""},
        {"phase": "placing", "building": "building-0/../.."},
        {"phase": "done"},
        {"leaving": ["../../precious.txt"]},
        {"leaving": ["/precious.txt"]},
        {"files": [{"name": "../x", "size": 0, "mtime_ns": 0, "inode": 0}]},
    ],
)
def test_a_state_file_that_names_other_places_is_refused_and_they_stay(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path, change: dict[str, object]
) -> None:
    """A folder may come from anybody."""
    send(fetcher, policy, tmp_path / "1", checkpoints.first_bits())
    out = tmp_path / "there" / "out"
    checkout(client, policy, out, fetcher=fetcher)
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    path = out / ".plait/state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointInvalid, match="isn't a checkout's state"):
        checkout(client, policy, out, fetcher=fetcher)
    assert precious.exists()
    assert checkout(client, policy, out, fetcher=fetcher, rebuild=True).way == "built"
    assert precious.exists()
    assert holds(out, checkpoints.first_bits())
