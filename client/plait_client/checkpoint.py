"""Checkpoint folders: any directory of .safetensors files, as one set of weights.

The bits are mapped, not read: whoever looks at a tensor touches its pages only. Everything that
could be wrong with a folder is found before the first bit is used.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from plait.errors import CheckpointInvalid, LimitExceeded
from plait.layout import Layout
from plait.limits import SIDE_FILE_BYTES_MAX, SIDE_FILES_MAX
from plait.names import check_side_file_name
from plait.weights import UNSIGNED
from plait_client.disk import disk_errors, sync_file
from plait_client.safetensors_header import StoredTensor, read_header

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"
STATE_FOLDER: Final = ".plait"
_INDEX_BYTES_MAX: Final = 256 << 20
_NOT_TRAVELLING: Final = frozenset({STATE_FOLDER, ".git", ".cache", "__pycache__"})


class CheckpointFolder:
    """A folder's weights (plait.weights.Weights), its layout and its side files.

    Attributes:
        path: the folder.
        layout: of all tensors in its .safetensors files.
        files: names of those files.
    """

    def __init__(self, path: Path | str, *, writable: bool = False) -> None:
        """Opens and checks every file.

        Args:
            writable: `bits` write through to the files.

        Raises:
            CheckpointInvalid: no or broken .safetensors files, a tensor in two of them, an index
                that says otherwise, a link that leads out of the folder.
            LayoutInvalid, LimitExceeded: tensors that no layout can have.
        """
        self.path = Path(path)
        self._mode: Literal["r", "r+"] = "r+" if writable else "r"
        with disk_errors(f"read {self.path}"):
            self.files = _weight_files(self.path)
            self._opened = self._looks()
            held = {name: read_header(self.path / name) for name in self.files}
        self._place: dict[str, tuple[str, StoredTensor]] = {}
        for file, tensors in held.items():
            for tensor in tensors:
                self._add(file, tensor)
        self.layout = Layout.of(tensor.spec for _, tensor in self._place.values())
        with disk_errors(f"read {self.path / INDEX}"):
            self._check_index()
        self._maps: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}

    def bits(self, name: str) -> NDArray[Any]:
        """The tensor's items as a 1-d unsigned view of its mapped file, row-major.

        A tensor that its file holds at an odd place comes as a copy, and read-only.
        """
        file, tensor = self._place[name]
        dtype = UNSIGNED[tensor.spec.item_bytes]
        if not tensor.spec.nbytes:
            return np.empty(0, dtype)
        raw = self._map(file)[tensor.offset : tensor.offset + tensor.spec.nbytes]
        if tensor.offset % dtype.itemsize:
            raw = raw.copy()
            raw.flags.writeable = False
        return raw.view(dtype)

    def side_files(self) -> Iterator[tuple[str, Path]]:
        """Everything else in the folder, by name: what travels with an anchor.

        Raises:
            CheckpointInvalid: a link that leads out of the folder, or not a regular file.
            LimitExceeded: a file too large, or too many.
            DocumentInvalid: a name that no other machine could write.
        """
        with disk_errors(f"read {self.path}"):
            names = sorted(_other_files(self.path))
        if len(names) > SIDE_FILES_MAX:
            raise LimitExceeded(
                f"{self.path} holds {len(names)} side files; at most {SIDE_FILES_MAX} travel",
                remedy="move them out of the folder that is published",
            )
        for name in names:
            path = self.path / check_side_file_name(name)
            with disk_errors(f"read {path}"):
                _check_inside(self.path, path)
                if not path.is_file():
                    raise CheckpointInvalid(f"{path} isn't a regular file")
                size = path.stat().st_size
            if size > SIDE_FILE_BYTES_MAX:
                raise LimitExceeded(
                    f"{path} has {size} bytes; a side file has at most {SIDE_FILE_BYTES_MAX}",
                    remedy="move it out of the folder that is published",
                )
            yield name, path

    def require_unchanged(self) -> None:
        """After reading: the files are the ones that were opened, and nobody wrote to them.

        Raises:
            CheckpointInvalid: somebody did; what was read may be of two checkpoints.
        """
        with disk_errors(f"read {self.path}"):
            if _weight_files(self.path) != self.files or self._looks() != self._opened:
                raise CheckpointInvalid(
                    f"{self.path} changed while it was read",
                    remedy="do it again when nobody writes to it",
                )

    def flush(self) -> None:
        """Make what was written through `bits` durable."""
        for file, mapped in self._maps.items():
            with disk_errors(f"write {self.path / file}"):
                mapped.flush()
                sync_file(self.path / file)

    def _looks(self) -> list[tuple[int, int, int]]:
        found = [(self.path / name).stat() for name in self.files]
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]

    def _add(self, file: str, tensor: StoredTensor) -> None:
        name = tensor.spec.name
        if name in self._place:
            raise CheckpointInvalid(
                f"tensor {name!r} is both in {self._place[name][0]} and in {file}",
                remedy="remove the file that doesn't belong to this checkpoint",
            )
        self._place[name] = (file, tensor)

    def _map(self, file: str) -> NDArray[np.uint8]:
        # Two threads may both map a file; either map will do.
        if file not in self._maps:
            with disk_errors(f"map {self.path / file}"):
                self._maps[file] = np.memmap(self.path / file, np.uint8, self._mode)
        # A plain array: the subclass makes every slice slower, and kernels compile anew for it.
        return self._maps[file].view(np.ndarray)

    def _check_index(self) -> None:
        """The index, if there is one, names every tensor and its file, and nothing else."""
        path = self.path / INDEX
        if not path.is_file():
            return
        _check_inside(self.path, path)
        if path.stat().st_size > _INDEX_BYTES_MAX:
            raise LimitExceeded(f"{path} has more than {_INDEX_BYTES_MAX} bytes")
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(f"{path} isn't JSON: {error}") from error
        named = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(named, dict):
            raise CheckpointInvalid(f"{path} has no weight_map")
        held = {name: file for name, (file, _) in self._place.items()}
        if named != held:
            raise CheckpointInvalid(
                f"{path} contradicts the files: {_contradiction(named, held)}",
                remedy="download the whole checkpoint again, or remove what doesn't belong to it",
            )


def index_document(layout: Layout, file_of: Mapping[str, str]) -> bytes:
    """The index of a checkpoint of several files, as transformers writes it."""
    document = {
        "metadata": {"total_size": layout.dense_bytes},
        "weight_map": {tensor.name: file_of[tensor.name] for tensor in layout.tensors},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _contradiction(named: Mapping[str, object], held: Mapping[str, str]) -> str:
    for name in sorted(set(named) | set(held)):
        if named.get(name) != held.get(name):
            says = repr(named[name]) if name in named else "nowhere"
            found = held.get(name, "in no file")
            return f"tensor {name!r} is {found}, the index says {says}"
    raise AssertionError("equal maps don't contradict each other")


def _weight_files(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        there = os.path.lexists(folder)
        raise CheckpointInvalid(
            f"{folder} isn't a folder" if there else f"there is no folder {folder}",
            remedy="name the folder that holds the .safetensors files",
        )
    names = sorted(p.name for p in folder.iterdir() if p.suffix == SUFFIX and p.name != SUFFIX)
    names = [name for name in names if not name.startswith(".")]
    if not names:
        raise CheckpointInvalid(
            f"{folder} holds no .safetensors file",
            remedy="save the model there with save_pretrained(…, safe_serialization=True)",
        )
    for name in names:
        _check_inside(folder, folder / name)
    return tuple(names)


def _other_files(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name not in _NOT_TRAVELLING]
        for name in folders:
            _check_inside(folder, Path(parent) / name)
        for name in files:
            relative = (Path(parent) / name).relative_to(folder).as_posix()
            at_top = "/" not in relative
            if not at_top or (relative != INDEX and not relative.endswith(SUFFIX)):
                yield relative


def _check_inside(folder: Path, path: Path) -> None:
    """Refuses a link out of the folder: it would publish, or write, somebody else's file.

    The Hugging Face cache links a snapshot's files to the blobs beside it: those are its own.
    """
    if not path.is_symlink():
        return
    # Not Path.resolve: links in a circle are a RuntimeError there, and an OSError for the opener.
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = root.parent.parent / "blobs"
    from_hub_cache = root.parent.name == "snapshots" and target.is_relative_to(blobs)
    if not (target.is_relative_to(root) or from_hub_cache):
        raise CheckpointInvalid(
            f"{path} links to {target}, out of the folder", remedy="copy the file to its place"
        )


def _raise(error: OSError) -> None:
    raise error
