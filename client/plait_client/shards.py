"""New checkpoint files: allocated whole, then written through maps, tensor by tensor.

File names, sizes and index are the ones that `save_pretrained` would give, so any loader opens the
folder. No copy of the model is held in memory.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plait.layout import Layout, TensorSpec
from plait.weights import Weights
from plait_client.checkpoint import INDEX, CheckpointFolder, index_document
from plait_client.disk import disk_errors, sync_folder, write_atomically
from plait_client.safetensors_header import header_of

SHARD_BYTES: Final = 4_000_000_000

# Copying in slices keeps the dirty pages of a huge tensor from piling up before they are written.
_COPY_ITEMS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be, with its tensors."""

    name: str
    tensors: tuple[TensorSpec, ...]


def shards_of(layout: Layout, *, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """The files of a layout: one, or as many as keep each within `shard_bytes`.

    A tensor larger than that has a file of its own.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in layout.tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def allocate_checkpoint(
    folder: Path, layout: Layout, *, shard_bytes: int = SHARD_BYTES
) -> CheckpointFolder:
    """A new checkpoint of zeros in an empty folder, to be written through its `bits`.

    Its disk blocks are taken at once, so that no later write meets a full disk.

    Raises:
        NoSpace: the disk is too small.
    """
    shards = shards_of(layout, shard_bytes=shard_bytes)
    with disk_errors(f"write a checkpoint of {layout.dense_bytes} bytes into {folder}"):
        for shard in shards:
            header, _ = header_of(shard.tensors)
            size = len(header) + sum(tensor.nbytes for tensor in shard.tensors)
            with (folder / shard.name).open("xb") as file:
                file.write(header)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, size)
                os.fsync(file.fileno())
        if len(shards) > 1:
            file_of = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
            write_atomically(folder / INDEX, index_document(layout, file_of))
        sync_folder(folder)
    return CheckpointFolder(folder, writable=True)


def copy_weights(source: Weights, target: Weights) -> Iterator[int]:
    """Copy every bit; yields the bytes of each slice as it is done."""
    for tensor in source.layout.tensors:
        old, new = source.bits(tensor.name), target.bits(tensor.name)
        for start in range(0, tensor.items, _COPY_ITEMS):
            part = slice(start, start + _COPY_ITEMS)
            new[part] = old[part]
            yield new[part].nbytes


def write_checkpoint(
    folder: Path,
    weights: Weights,
    side_files: Iterable[tuple[str, Path]] = (),
    *,
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointFolder:
    """Write weights and side files as a Hugging Face folder, durably.

    Args:
        folder: new or empty.
        side_files: name in the folder, and the file to copy.

    Raises:
        NoSpace, StoreError: the disk's refusals.
    """
    with disk_errors(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    written = allocate_checkpoint(folder, weights.layout, shard_bytes=shard_bytes)
    for _ in copy_weights(weights, written):
        pass
    written.flush()
    for name, source in side_files:
        copy_side_file(folder, name, source)
    return written


def copy_side_file(folder: Path, name: str, source: Path) -> None:
    """Write a side file as `source` has it. Raises StoreError, NoSpace."""
    write_side_file(folder, name, read_side_file(source))


def read_side_file(path: Path) -> bytes:
    """Raises StoreError: the system refuses."""
    with disk_errors(f"read {path}"):
        return path.read_bytes()


def write_side_file(folder: Path, name: str, data: bytes) -> None:
    """Write one side file durably; `name` was checked at the door."""
    path = folder / name
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
