"""The files that travel with an anchor: config, tokenizer, whatever isn't weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from plait.canonical import digest_of
from plait.errors import CheckpointInvalid, LimitExceeded
from plait.limits import SIDE_FILE_BYTES_MAX
from plait.manifest import SideFile, check_side_file_name
from plait_client.registry import RegistryClient
from plait_client.upload import upload_object

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_NOT_TRAVELLING: Final = frozenset({".plait", ".git", ".cache", "__pycache__"})


def upload_side_files(client: RegistryClient, folder: Path) -> tuple[SideFile, ...]:
    """Uploads every file of a folder but its weights, and names them for a manifest.

    Raises:
        CheckpointInvalid: no such folder, or a link that leads out of it.
        LimitExceeded, DocumentInvalid: a file too large, or a name that can't travel.
    """
    if not folder.is_dir():
        raise CheckpointInvalid(f"side files come from a folder, and {folder} is none")
    return tuple(_upload(client, name, path) for name, path in _travelling(folder))


def _travelling(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_dir() or path.name.endswith(_WEIGHTS) or _NOT_TRAVELLING & set(inside.parts):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointInvalid(f"{path} is a link that leads out of {folder}")
        yield check_side_file_name(inside.as_posix()), path


def _upload(client: RegistryClient, name: str, path: Path) -> SideFile:
    if (size := path.stat().st_size) > SIDE_FILE_BYTES_MAX:
        raise LimitExceeded(f"{path} has {size} bytes; at most {SIDE_FILE_BYTES_MAX}")
    data = path.read_bytes()
    digest = digest_of(data)
    upload_object(client, digest, data)
    return SideFile(name, digest, len(data))
