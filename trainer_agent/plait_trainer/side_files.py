"""The files that travel with an anchor: config, tokenizer, whatever isn't weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from plait.canonical import digest_of
from plait.errors import CheckpointInvalid, LimitExceeded
from plait.limits import SIDE_FILE_BYTES_MAX, SIDE_FILES_MAX
from plait.manifest import SideFile
from plait.names import check_side_file_name
from plait_client.registry import RegistryClient
from plait_client.upload import upload_object

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_NOT_TRAVELLING: Final = frozenset({".plait", ".git", ".cache", "__pycache__"})


def upload_side_files(client: RegistryClient, folder: Path) -> tuple[SideFile, ...]:
    """Uploads every file of a folder but its weights, and names them for a manifest.

    Raises:
        CheckpointInvalid: no such folder, a link that leads out of it, or a file that can't be
            read.
        LimitExceeded, DocumentInvalid: a file too large, too many, or a name that can't travel.
            All of this before anything is uploaded.
    """
    try:
        files = list(_travelling(folder))
        if len(files) > SIDE_FILES_MAX:
            raise LimitExceeded(f"{folder} holds {len(files)} side files; at most {SIDE_FILES_MAX}")
        return tuple(_upload(client, name, path.read_bytes()) for name, path in files)
    except OSError as error:
        raise CheckpointInvalid(f"the side files of {folder} can't be read: {error}") from error


def _travelling(folder: Path) -> Iterator[tuple[str, Path]]:
    if not folder.is_dir():
        raise CheckpointInvalid(f"side files come from a folder, and {folder} is none")
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_dir() or path.name.endswith(_WEIGHTS) or _NOT_TRAVELLING & set(inside.parts):
            continue
        _check_inside(folder.resolve(), path)
        if not path.is_file():
            raise CheckpointInvalid(f"{path} isn't a regular file")
        if (size := path.stat().st_size) > SIDE_FILE_BYTES_MAX:
            raise LimitExceeded(f"{path} has {size} bytes; at most {SIDE_FILE_BYTES_MAX}")
        yield check_side_file_name(inside.as_posix()), path


def _check_inside(root: Path, path: Path) -> None:
    """A link must not publish somebody else's file. The Hugging Face cache links a snapshot's files
    to the blobs beside it: those are its own."""
    target = path.resolve()
    is_own = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    if not (is_own or target.is_relative_to(root)):
        raise CheckpointInvalid(
            f"{path} links to {target}, out of the folder", remedy="copy the file to its place"
        )


def _upload(client: RegistryClient, name: str, data: bytes) -> SideFile:
    digest = digest_of(data)
    upload_object(client, digest, data)
    return SideFile(name, digest, len(data))
