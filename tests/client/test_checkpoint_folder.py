"""Checkpoint folders: every dtype in and out, and every way to be no checkpoint."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import CheckpointInvalid, FormatError, LimitExceeded, StoreError
from plait.weights import fingerprint_weights
from plait_client.checkpoint import INDEX, CheckpointFolder
from plait_client.shards import shards_of, write_checkpoint
from tests.client import checkpoints


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def row(first: int, last: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [last - first] if shape is None else shape,
        "data_offsets": [first, last],
    }


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_reads_as_the_bits_that_were_saved(tmp_path: Path, files: int) -> None:
    bits = checkpoints.first_bits()
    folder = CheckpointFolder(checkpoints.write(tmp_path / "a", bits, files=files))
    assert {t.name: (t.dtype, t.shape) for t in folder.layout.tensors} == {
        name: (dtype, shape) for name, (dtype, _, shape) in checkpoints.SPECS.items()
    }
    for name, array in bits.items():
        assert folder.bits(name).tobytes() == array.tobytes(), name
    assert str(fingerprint_weights(folder)) == checkpoints.independent_fingerprint(bits)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000])
def test_a_written_checkpoint_is_one_that_others_can_read(tmp_path: Path, shard_bytes: int) -> None:
    bits = checkpoints.first_bits()
    source = CheckpointFolder(checkpoints.write(tmp_path / "a", bits))
    write_checkpoint(tmp_path / "b", source, source.side_files(), shard_bytes=shard_bytes)
    assert checkpoints.read(tmp_path / "b") == checkpoints.expected(bits)
    assert (tmp_path / "b/tokenizer/vocab.txt").read_text() == "a\nb\n"
    index = tmp_path / "b" / INDEX
    assert index.exists() == (shard_bytes == 4000)
    if index.exists():
        document = json.loads(index.read_text())
        assert document["metadata"]["total_size"] == source.layout.dense_bytes
        assert set(document["weight_map"]) == set(bits)
        assert all(
            file.endswith("-of-00002.safetensors") for file in document["weight_map"].values()
        )
    assert CheckpointFolder(tmp_path / "b").layout == source.layout


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = CheckpointFolder(checkpoints.write(tmp_path / "a", checkpoints.first_bits()))
    shards = shards_of(folder.layout, shard_bytes=100)
    alone = [shard for shard in shards if sum(t.nbytes for t in shard.tensors) > 100]
    assert {shard.tensors[0].name for shard in alone if len(shard.tensors) == 1} >= {
        "model.embed.weight"
    }
    assert sorted(t.name for s in shards for t in s.tensors) == sorted(checkpoints.SPECS)


def test_a_misaligned_tensor_is_read_all_the_same(tmp_path: Path) -> None:
    values = np.array([1, 2], "<u4")
    raw_file(
        tmp_path / "m.safetensors",
        {"a": row(0, 3), "b": row(3, 11, "F32", [2])},
        b"xyz" + values.tobytes(),
    )
    folder = CheckpointFolder(tmp_path)
    assert folder.bits("b").tolist() == [1, 2]
    assert not folder.bits("b").flags.writeable


def test_an_empty_checkpoint_is_one(tmp_path: Path) -> None:
    raw_file(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}})
    assert CheckpointFolder(tmp_path).layout.total_words == 0


def broken_cases() -> dict[str, Callable[[Path], object]]:
    def file(header: Any, data: bytes = b"") -> Callable[[Path], None]:
        return lambda folder: raw_file(folder / "m.safetensors", header, data)

    def truncated(folder: Path) -> None:
        path = checkpoints.write(folder, checkpoints.first_bits()) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    def longer(folder: Path) -> None:
        path = checkpoints.write(folder, checkpoints.first_bits()) / "model.safetensors"
        path.write_bytes(path.read_bytes() + b"x")

    def duplicate_across(folder: Path) -> None:
        raw_file(folder / "a.safetensors", {"w": row(0, 1)}, b"x")
        raw_file(folder / "b.safetensors", {"w": row(0, 1)}, b"x")

    def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            path = checkpoints.write(folder, checkpoints.first_bits(), files=2) / INDEX
            document = json.loads(path.read_text())
            change(document["weight_map"])
            path.write_text(json.dumps(document))

        return make

    def other_file(named: dict[str, str]) -> None:
        named["model.half"] = next(f for f in named.values() if f != named["model.half"])

    return {
        "no such folder": lambda folder: folder.rmdir(),
        "no weights": lambda folder: (folder / "config.json").write_text("{}"),
        "a pipe": lambda folder: os.mkfifo(folder / "m.safetensors"),
        "a folder of that name": lambda folder: (folder / "m.safetensors").mkdir(),
        "an empty file": lambda folder: (folder / "m.safetensors").touch(),
        "a header beyond the file": lambda folder: (folder / "m.safetensors").write_bytes(
            struct.pack("<Q", 1 << 40)
        ),
        "not JSON": file(b"{nope"),
        "not an object": file([1, 2]),
        "deep nesting": file(b"[" * 100_000),
        "not a row": file({"a": 3}),
        "a boolean as a number": file({"a": row(0, 1, "U8", [True])}, b"x"),
        "an unknown dtype": file({"a": row(0, 1, "U128")}, b"x"),
        "a negative shape": file({"a": row(0, 1, "U8", [-1])}, b"x"),
        "a size that isn't the shape's": file({"a": row(0, 4, "F32", [2])}, b"xxxx"),
        "a gap": file({"a": row(0, 1), "b": row(2, 3)}, b"xxx"),
        "an overlap": file({"a": row(0, 2), "b": row(1, 3)}, b"xxx"),
        "a name twice in one file": file(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"xx",
        ),
        "a name in two files": duplicate_across,
        "truncated": truncated,
        "bytes behind the end": longer,
        "an index that names another file": index(other_file),
        "an index that lacks a tensor": index(lambda named: named.pop("model.half")),
        "an index that names too much": index(lambda named: named.update(more="m-1.safetensors")),
    }  # fmt: skip


@pytest.mark.parametrize("case", sorted(broken_cases()))
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    broken_cases()[case](folder)
    with pytest.raises(CheckpointInvalid):
        CheckpointFolder(folder)


def test_the_refusal_names_the_tensor_and_both_files(tmp_path: Path) -> None:
    broken_cases()["a name in two files"](tmp_path)
    with pytest.raises(
        CheckpointInvalid, match=r"'w' is both in a.safetensors and in b.safetensors"
    ):
        CheckpointFolder(tmp_path)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside = checkpoints.write(tmp_path / "outside", checkpoints.first_bits())
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="out of the folder"):
        CheckpointFolder(folder)
    (folder / "model.safetensors").unlink()
    checkpoints.write(folder, checkpoints.first_bits(), config=False)
    (folder / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(CheckpointInvalid, match="out of the folder"):
        list(CheckpointFolder(folder).side_files())
    (folder / "config.json").unlink()
    (folder / "more").symlink_to(outside / "tokenizer")
    with pytest.raises(CheckpointInvalid, match="out of the folder"):
        list(CheckpointFolder(folder).side_files())


def test_links_in_a_circle_are_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(StoreError, match="symbolic links"):
        CheckpointFolder(tmp_path)


def test_a_snapshot_in_the_hub_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    real = checkpoints.write(tmp_path / "real", checkpoints.first_bits(), config=False)
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (real / "model.safetensors").rename(blobs / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    assert len(CheckpointFolder(snapshot).layout.tensors) == len(checkpoints.SPECS)


def test_side_files_are_everything_but_weights_index_and_what_tools_keep(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "a", checkpoints.first_bits(), files=2)
    for name in (".plait/state.json", ".git/HEAD", ".cache/huggingface/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    names = [name for name, _ in CheckpointFolder(folder).side_files()]
    assert names == ["config.json", "tokenizer/vocab.txt"]


def test_a_side_file_that_is_too_large_or_has_no_portable_name_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "a", checkpoints.first_bits())
    with (folder / "big.bin").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(LimitExceeded, match=r"big\.bin"):
        list(CheckpointFolder(folder).side_files())
    (folder / "big.bin").unlink()
    (folder / "a\\b").touch()
    with pytest.raises(FormatError):
        list(CheckpointFolder(folder).side_files())


def test_a_folder_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "a", checkpoints.first_bits())
    opened = CheckpointFolder(folder)
    opened.require_unchanged()
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointInvalid, match="changed while it was read"):
        opened.require_unchanged()
    (folder / "more.safetensors").unlink()
    opened.require_unchanged()
    again = checkpoints.write(tmp_path / "b", checkpoints.first_bits(1)) / "model.safetensors"
    again.replace(folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="changed while it was read"):
        opened.require_unchanged()
