"""What travels with an anchor, and what is refused before anything is uploaded."""

import os
from pathlib import Path

import pytest

from plait.canonical import digest_of
from plait.errors import CheckpointInvalid, DocumentInvalid, LimitExceeded, PlaitError
from plait.limits import SIDE_FILE_BYTES_MAX, SIDE_FILES_MAX
from plait_client.registry import RegistryClient
from plait_trainer.side_files import upload_side_files


def test_everything_but_weights_and_caches_travels(client: RegistryClient, tmp_path: Path) -> None:
    kept = {"config.json": b"{}", "chat/template.jinja": b"hello"}
    left = ("model.safetensors", "model.safetensors.index.json", ".git/HEAD", ".plait/journal")
    for name, data in {**kept, **dict.fromkeys(left, b"")}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files = upload_side_files(client, tmp_path)
    assert {file.name: client.chunk(file.digest, file.size) for file in files} == kept


def test_a_snapshot_of_the_hub_cache_links_to_its_own_blobs(
    client: RegistryClient, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"config")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (file,) = upload_side_files(client, snapshot)
    assert (file.name, file.digest) == ("config.json", digest_of(b"config"))


def linked(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"another's")
    (folder / "config.json").symlink_to(folder.parent / "secret")


def dangling(folder: Path) -> None:
    (folder / "config.json").symlink_to("nowhere")


def piped(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def large(folder: Path) -> None:
    with (folder / "optimizer.pt").open("wb") as file:
        file.truncate(SIDE_FILE_BYTES_MAX + 1)


def many(folder: Path) -> None:
    for number in range(SIDE_FILES_MAX + 1):
        (folder / f"{number}.txt").touch()


def ill_named(folder: Path) -> None:
    (folder / os.fsdecode(b"ill-encoded-\xff")).touch()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (linked, CheckpointInvalid),
        (dangling, CheckpointInvalid),
        (piped, CheckpointInvalid),
        (large, LimitExceeded),
        (many, LimitExceeded),
        (ill_named, DocumentInvalid),
        (Path.rmdir, CheckpointInvalid),
    ],
)
def test_a_folder_that_can_t_travel_is_refused_before_anything_is_sent(
    client: RegistryClient, tmp_path: Path, spoil: object, error: type[PlaitError]
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    assert callable(spoil)
    spoil(folder)
    first = f"first of {spoil}".encode()
    if folder.is_dir():
        (folder / "a.json").write_bytes(first)
    with pytest.raises(error):
        upload_side_files(client, folder)
    assert client.missing_chunks([digest_of(first)]) == [digest_of(first)]
