"""The spool: a local folder through which the adapter and the engine's ranks exchange files.

    SPOOL/documents/   layouts, cuts and manifests, by digest
    SPOOL/chunks/      chunk files, by digest (links into the agent's cache)
    SPOOL/requests/    what the update hook is asked, one file a request
    SPOOL/rank-N/      inbox of rank N's stager thread, and the lock that tells whether N lives
    SPOOL/reports/     answers, one file a request and rank
    SPOOL/driver.lock, SPOOL/driver.json    the adapter's own

Files appear by rename, whole or not at all. Requests name documents and chunks by digest, never by
path: a rank opens nothing outside its spool.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from plait.canonical import is_digest
from plait.errors import (
    DocumentInvalid,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    ObjectMissing,
    PlaitError,
    type_registry,
)
from plait.limits import DOCUMENT_BYTES_MAX

FORMAT: Final = "plait-spool/1"
VARIABLE: Final = "PLAIT_SPOOL"

_REQUEST_ID: Final = re.compile(r"[0-9a-f]{32}")


class Spool:
    """Paths in a spool, and files that appear whole."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.documents = self.root / "documents"
        self.chunks = self.root / "chunks"
        self.requests = self.root / "requests"
        self.reports = self.root / "reports"

    def prepare(self) -> None:
        """Makes the folders. The files say which weights to serve: for this user only."""
        for folder in (self.root, self.documents, self.chunks, self.requests, self.reports):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def document(self, digest: str) -> Path:
        return self.documents / _file_name(digest)

    def chunk(self, digest: str) -> Path:
        return self.chunks / _file_name(digest)

    def request(self, request_id: str) -> Path:
        return self.requests / f"{check_request_id(request_id)}.json"

    def report(self, request_id: str, rank: int) -> Path:
        return self.reports / f"{check_request_id(request_id)}.rank-{rank}.json"

    def inbox(self, rank: int) -> Path:
        return self.root / f"rank-{rank}"

    def life(self, rank: int) -> Path:
        """The file that rank N keeps locked while it lives."""
        return self.inbox(rank) / "life"

    def put_document(self, digest: str, data: bytes) -> None:
        if not self.document(digest).exists():
            write_whole(self.document(digest), data)

    def read_document(self, digest: str) -> bytes:
        """Bytes of a document, still to be compared with its digest.

        Raises:
            EngineRefused: it isn't there.
        """
        return _read(self.document(digest))

    def put_chunk(self, digest: str, source: Path) -> None:
        """Makes a verified local chunk visible to the ranks, by a link where that is possible.

        Raises:
            ObjectMissing: the local file is gone.
        """
        target = self.chunk(digest)
        if target.exists():
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        try:
            partial.hardlink_to(source)
        except FileNotFoundError as error:
            raise ObjectMissing(f"chunk {digest} is gone from {source}") from error
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, partial)
        partial.replace(target)


def check_request_id(request_id: object) -> str:
    if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
        raise DocumentInvalid(f"a request id is 32 hex digits, got {request_id!r:.80}")
    return request_id


def write_whole(path: Path, data: bytes) -> None:
    """A file that appears at once: written beside its place, then renamed.

    Not flushed to the disk: what a spool says means nothing once the host, and with it the engine,
    has gone down.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_bytes(data)
    partial.replace(path)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps({"format": FORMAT, **document}).encode())


def read_json(path: Path) -> dict[str, Any]:
    """A spool document.

    Raises:
        EngineRefused: not there.
        DocumentInvalid: not one of this release's spool documents.
    """
    data = _read(path)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"{path.name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DocumentInvalid(f"{path.name} is no {FORMAT} document")
    return document


def error_document(error: BaseException) -> dict[str, Any]:
    """An error as a report carries it. What isn't plait's own comes with its traceback."""
    if isinstance(error, PlaitError):
        return {
            "code": error.code,
            "message": error.message,
            "remedy": error.remedy,
            "details": json.loads(json.dumps(error.details, default=str)),
        }
    trace = "".join(traceback.format_exception(error))[-4000:]
    message = f"{type(error).__name__}: {error}"
    return {
        "code": EngineError.code,
        "message": f"unexpected in the engine: {message}",
        "remedy": "",
        "details": {"traceback": trace},
    }


def error_from(document: Mapping[str, Any]) -> PlaitError:
    """The error that a report carries."""
    cls = type_registry.get(str(document["code"]), EngineError)
    return cls(document["message"], remedy=document["remedy"], **document["details"])


def hold_lock(path: Path) -> BinaryIO | None:
    """Locks a file for as long as the returned handle is open; None if somebody else holds it.

    The kernel lets go when the process ends, however it ends: no clock is involved.
    """
    handle = path.open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock."""
    if not path.exists():
        return False
    handle = hold_lock(path)
    if handle is not None:
        handle.close()
    return handle is None


def remove_old(folder: Path, keep: set[str]) -> None:
    """Removes a folder's files except those named."""
    for path in folder.iterdir():
        if path.name not in keep:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def spool_from_environment() -> Spool:
    """The spool that the engine was started with.

    Raises:
        EngineUnavailable: it was started without one.
    """
    root = os.environ.get(VARIABLE, "")
    if not root or not Path(root).is_absolute():
        raise EngineUnavailable(
            f"{VARIABLE} is {root!r} in the engine's environment; expected an absolute path",
            remedy=f"start the engine with {VARIABLE} set to the agent's spool folder",
        )
    return Spool(Path(root))


def _file_name(digest: str) -> str:
    if not is_digest(digest):
        raise DocumentInvalid(f"expected a digest, got {digest!r:.80}")
    return digest.replace(":", "-")


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > DOCUMENT_BYTES_MAX:
            raise DocumentInvalid(f"{path.name} is larger than {DOCUMENT_BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        raise EngineRefused(f"{path.name} can't be read in the spool: {error}") from error
