"""The note of a commit that was sent but not answered, so that the next publish can ask for it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.canonical import is_digest
from plait_client.disk import disk_errors, read_regular, write_atomically


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """Enough to recognise the same publish, and to ask what became of it."""

    version_digest: str
    channel: str
    layout: str
    fingerprint: str
    message: str


class Pending:
    """At most one note in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> PendingCommit | None:
        """The note; None: every commit so far was answered (or the note can't be read)."""
        with disk_errors(f"read {self._path}"):
            try:
                note = PendingCommit(**json.loads(read_regular(self._path) or b""))
            except (FileNotFoundError, ValueError, TypeError, RecursionError):
                # A damaged note only means that a repeat makes a version of its own.
                return None
        return note if is_digest(note.version_digest) else None

    def write(self, commit: PendingCommit) -> None:
        with disk_errors(f"write {self._path}"):
            write_atomically(self._path, json.dumps(asdict(commit)).encode())

    def clear(self) -> None:
        with disk_errors(f"remove {self._path}"):
            self._path.unlink(missing_ok=True)
