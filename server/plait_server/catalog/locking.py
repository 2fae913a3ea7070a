"""Whether a folder can hold a SQLite database: asked before one is made there."""

import secrets
import sqlite3
from pathlib import Path
from typing import Final

from plait.errors import UsageError

# SQLite's write-ahead log needs memory that all processes share, and locks that hold.
_NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "glusterfs", "lustre", "ceph",
     "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.davfs"}
)  # fmt: skip
_MOUNTS: Final = Path("/proc/mounts")


def require_locking(folder: Path, *, mounts: Path = _MOUNTS) -> None:
    """Tries a throw-away database in the folder.

    Raises:
        UsageError: in plain words, why SQLite can't work there.
    """
    remedy = "put --data on a local disk, or use PostgreSQL: --database postgresql://…"
    kind = filesystem_of(folder, mounts)
    if kind in _NETWORK_FILESYSTEMS:
        raise UsageError(
            f"{folder} is on a network filesystem ({kind}), where SQLite's locks don't hold: "
            "two registries could both believe that they may write",
            remedy=remedy,
        )
    probe = folder / f"probe-{secrets.token_hex(8)}.db"
    try:
        _try_locks(probe)
    except (sqlite3.Error, OSError) as error:
        raise UsageError(
            f"SQLite can't lock files in {folder} ({error}); without locks a registry would "
            "lose commits",
            remedy=remedy,
        ) from error
    finally:
        for path in folder.glob(f"{probe.name}*"):
            path.unlink(missing_ok=True)


def filesystem_of(folder: Path, mounts: Path = _MOUNTS) -> str:
    """Type of the filesystem that holds a folder; empty where the system doesn't say."""
    try:
        rows = [line.split(" ") for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    target = folder.absolute().resolve()
    # /proc/mounts writes a space in a path as \040; the deepest mount point decides.
    points = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    holding = [(len(p.parts), kind) for p, kind in points if target.is_relative_to(p)]
    return max(holding)[1] if holding else ""


def _try_locks(path: Path) -> None:
    first = sqlite3.connect(path, timeout=0, isolation_level=None)
    second = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        mode = first.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise sqlite3.OperationalError(f"journal mode is {mode}, not wal")
        first.execute("CREATE TABLE probe (number INTEGER)")
        first.execute("BEGIN IMMEDIATE")
        first.execute("INSERT INTO probe VALUES (1)")
        try:
            second.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            first.execute("COMMIT")
            return
        raise sqlite3.OperationalError("two writers at once were let in")
    finally:
        first.close()
        second.close()
