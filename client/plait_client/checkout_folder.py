"""A checkout's folder: its lock, what it says it holds, and its repair after a crash.

`DIR/.plait/` holds `lock`, `state.json`, and while something is under way `journal` (a move by
deltas, see journal.py) or `building-…/` (new files, before they take the old ones' places). At
every moment one of three things is true, and the next run finishes or forgets accordingly:

- `state.json` says `whole`, no `journal`: the files are that version; anything else is litter.
- `journal` exists: the files are between two versions, and replaying it ends at the newer one.
- `state.json` says `placing`: new files are taking their places, out of the building folder that it
  names; moving on ends at the new version.

Every build has a folder of its own, so that one which is cut short is never taken for another.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, Literal

from plait.errors import (
    BaseMismatch,
    CheckpointInvalid,
    ConflictError,
    FingerprintMismatch,
    StoreError,
    UsageError,
)
from plait.weights import fingerprint_weights
from plait.wire import HeldState
from plait_client import journal
from plait_client.checkpoint import INDEX, STATE_FOLDER, SUFFIX, CheckpointFolder
from plait_client.disk import (
    TEMPORARY_PREFIX,
    disk_errors,
    read_regular,
    remove_any,
    sync_folder,
    write_atomically,
)
from plait_client.failpoints import failpoint

STATE_FORMAT: Final = "plait-checkout/1"
_BUILDING: Final = "building-"
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version whose weights a folder holds."""

    policy: str
    seq: int
    version_digest: str
    layout_digest: str
    fingerprint: str

    @property
    def state(self) -> HeldState:
        """As a plan asks for it. Without the seq: content decides."""
        return HeldState(layout_digest=self.layout_digest, fingerprint=self.fingerprint)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as plait left it: whoever writes to it later changes one of these."""

    name: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class CheckoutState:
    """What `state.json` says.

    Attributes:
        phase: `whole`, or `placing` while new files take their places.
        version: that the files are, or will be.
        files: that plait wrote, as it left them; a rename changes nothing of a stamp.
        leaving: while placing, names of old files that have to go.
        building: while placing, the folder in `.plait` that new files come from.
    """

    phase: Literal["whole", "placing"]
    version: HeldVersion
    files: tuple[FileStamp, ...]
    leaving: tuple[str, ...] = ()
    building: str = ""

    def serialize(self) -> bytes:
        return json.dumps({"format": STATE_FORMAT} | asdict(self), indent=2).encode()

    @classmethod
    def parse(cls, data: bytes | None, path: Path) -> "CheckoutState":
        try:
            row: dict[str, Any] = json.loads(data or b"")
            if row["format"] != STATE_FORMAT:
                raise ValueError(f"format {row['format']!r}")
            state = cls(
                phase=row["phase"],
                version=HeldVersion(**row["version"]),
                files=tuple(FileStamp(**stamp) for stamp in row["files"]),
                leaving=tuple(row["leaving"]),
                building=row["building"],
            )
            state._check()
            return state
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointInvalid(
                f"{path} isn't a checkout's state: {error!r}",
                remedy="check out with --rebuild to make the folder anew",
            ) from error

    def _check(self) -> None:
        """Names become paths that are written and removed. Raises ValueError, TypeError."""
        _ = self.version.state  # a wire document, which looks at its fields
        if self.phase not in ("whole", "placing"):
            raise ValueError(f"phase {self.phase!r}")
        if self.phase == "placing" and not re.fullmatch(_BUILDING + "[0-9a-f]+", self.building):
            raise ValueError(f"building {self.building!r}")
        for name in (*self.leaving, *(stamp.name for stamp in self.files)):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"a file's name {name!r}")


class CheckoutFolder:
    """A folder that this process alone works on. Made by `open_checkout_folder`."""

    def __init__(self, path: Path, *, existed: bool) -> None:
        self.path = path
        self.inner = path / STATE_FOLDER
        self.journal = self.inner / "journal"
        self._existed = existed

    def state(self) -> CheckoutState | None:
        """What the folder says it is; None: nothing yet.

        Raises:
            CheckpointInvalid: its state file is damaged.
        """
        path = self.inner / "state.json"
        with disk_errors(f"read {path}"):
            try:
                return CheckoutState.parse(read_regular(path), path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    @property
    def is_torn(self) -> bool:
        """Whether the files may lie between two versions, until the next run has repaired them."""
        if self.journal.exists():
            return True
        try:
            state = self.state()
        except CheckpointInvalid:
            return False  # said by whoever needs it
        return state is not None and state.phase == "placing"

    def repair(self) -> bool:
        """Finish what a killed run left unfinished, and forget what it hadn't begun to write.

        What is finished is read back whole: nobody knows what happened to the files meanwhile.

        Returns:
            Whether there was something to finish.

        Raises:
            CorruptionError, FingerprintMismatch, CheckpointInvalid: the files can't be proven.
        """
        with disk_errors(f"repair {self.path}"):
            state = self.state()
            self._remove_litter(state)
            # First: where both are there, new files replace a move that couldn't be finished.
            if state is not None and state.phase == "placing":
                self._finish_placing(state, reread=True)
                return True
            if self.journal.exists():
                self.finish_move(reread=True)
                return True
        return False

    def held(self) -> HeldVersion | None:
        """The version that the files are, proven; None: there is none yet.

        Files that nobody touched since plait proved them are believed; others are read whole.

        Raises:
            BaseMismatch: somebody changed the weights.
        """
        state = self.state()
        if state is None:
            return None
        version = state.version
        weights = CheckpointFolder(self.path)
        if weights.layout.digest != version.layout_digest:
            raise self._changed(version, f"layout {weights.layout.digest}", version.layout_digest)
        with disk_errors(f"look at {self.path}"):
            untouched = all(stamp == _stamp(self.path, stamp.name) for stamp in state.files)
        if not untouched:
            found = str(fingerprint_weights(weights))
            if found != version.fingerprint:
                raise self._changed(version, f"fingerprint {found}", version.fingerprint)
        return version

    def _changed(self, version: HeldVersion, found: str, expected: str) -> BaseMismatch:
        return BaseMismatch(
            f"{self.path} was changed since version {version.seq} was checked out: its weights "
            f"have {found}, expected {expected}",
            remedy="check out into another folder, or with --rebuild to lose the changes",
            expected=expected,
            found=found,
        )

    def stamp(self, version: HeldVersion) -> None:
        """Say that the files are this version now."""
        self._write_whole(version, self.present())

    def finish_move(self, *, reread: bool = False) -> None:
        """Replay the journal, prove what it wrote, and say which version that makes.

        The files change in place: a reader that maps them sees new weights, never zeros or a short
        file, because no file is truncated or replaced.

        Args:
            reread: prove every weight, not only those that were written.

        Raises:
            CorruptionError, FingerprintMismatch, CheckpointInvalid: the journal or the files are
                damaged; the journal stays.
        """
        version = HeldVersion(**journal.read_header(self.journal))
        weights = CheckpointFolder(self.path, writable=True)
        if weights.layout.digest != version.layout_digest:
            raise CheckpointInvalid(
                f"files of {self.path} are gone or replaced in the middle of a move",
                remedy="check out with --rebuild",
            )
        with disk_errors(f"write {self.path}"):
            journal.replay(self.journal, weights)
            weights.flush()
            failpoint("move.flushed")
            if reread:
                self._prove(weights, version)
            self.stamp(version)
            failpoint("move.stamped")
            self.journal.unlink()
            sync_folder(self.inner)

    def _prove(self, weights: CheckpointFolder, version: HeldVersion) -> None:
        """Read every weight. Raises FingerprintMismatch."""
        found = str(fingerprint_weights(weights))
        if found != version.fingerprint:
            raise FingerprintMismatch(
                f"{self.path} was changed in the middle of a move: it has fingerprint {found}, "
                f"version {version.seq} has {version.fingerprint}",
                remedy="check out with --rebuild",
                expected=version.fingerprint,
                found=found,
            )

    def start_building(self) -> Path:
        """An empty folder for new files, on the same disk."""
        building = self.inner / f"{_BUILDING}{secrets.token_hex(8)}"
        with disk_errors(f"write {building}"):
            building.mkdir()
        return building

    def place(self, building: Path, version: HeldVersion) -> None:
        """Let the files in `building` take their places, and the old ones that plait wrote go.

        Each file is replaced by a rename: a reader that maps an old one keeps it to the end.
        """
        with disk_errors(f"write {self.path}"):
            names = {
                path.relative_to(building).as_posix()
                for path in building.rglob("*")
                if path.is_file()
            }
            state = CheckoutState(
                phase="placing",
                version=version,
                files=_stamps(building, names),
                leaving=tuple(sorted(self.present() - names)),
                building=building.name,
            )
            self._write(state)
            failpoint("placing.begun")
            self._finish_placing(state)

    def discard(self) -> None:
        """After a failure: leave the folder as it was found, or as the next run can finish it."""
        # The failure that led here says more than a clean-up that fails too.
        with suppress(OSError, CheckpointInvalid, StoreError):
            if self.journal.exists():
                return
            self._remove_litter(self.state())
            if all(path == self.inner for path in self.path.iterdir()) and self.state() is None:
                shutil.rmtree(self.inner)
                if not self._existed:
                    self.path.rmdir()

    def _remove_litter(self, state: CheckoutState | None) -> None:
        """What killed or failed runs began and nothing refers to."""
        self.journal.with_name(journal.TEMPORARY).unlink(missing_ok=True)
        for path in self.inner.glob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
        for path in self.inner.glob(f"{_BUILDING}*"):
            if state is None or path.name != state.building:
                with suppress(OSError):
                    remove_any(path)

    def present(self) -> set[str]:
        """What plait wrote, and all weights: any that stayed would join the new ones."""
        weights = {path.name for path in self.path.glob(f"*{SUFFIX}")}
        weights |= {INDEX} if (self.path / INDEX).exists() else set()
        try:
            state = self.state()
        except CheckpointInvalid:
            return weights
        return weights | ({stamp.name for stamp in state.files} if state else set())

    def _finish_placing(self, state: CheckoutState, *, reread: bool = False) -> None:
        """Move on where placing stopped; no file that isn't one of the new ones stays for one.

        Args:
            reread: prove every weight before the folder is called whole.

        Raises:
            CheckpointInvalid: a new file is neither in its place nor on its way there.
            FingerprintMismatch: somebody changed the new files; the folder stays torn.
        """
        self.journal.unlink(missing_ok=True)
        # Old files go first: one may have the name of a folder that a new one needs.
        for name in state.leaving:
            self._remove(name)
        folders = {self.path}
        for stamp in state.files:
            source, target = self.inner / state.building / stamp.name, self.path / stamp.name
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
                failpoint("placing.file")
            elif _stamp(self.path, stamp.name) != stamp:
                raise CheckpointInvalid(
                    f"{target} isn't the new file that should be there, and {source} is gone",
                    remedy="check out with --rebuild",
                )
            folders.update(p for p in target.parents if p.is_relative_to(self.path))
        for folder in folders:
            sync_folder(folder)
        if reread:
            self._prove(CheckpointFolder(self.path), state.version)
        self._write_whole(state.version, {stamp.name for stamp in state.files})
        failpoint("placing.done")
        self._remove_litter(None)

    def _remove(self, name: str) -> None:
        """An old file, and the folders that it leaves empty."""
        path = self.path / name
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.path or (parent.is_dir() and any(parent.iterdir())):
                break
            if parent.is_dir():
                parent.rmdir()

    def _write_whole(self, version: HeldVersion, names: Iterable[str]) -> None:
        # A side file that its owner removed is no longer plait's; weights are all there by now.
        self._write(CheckoutState("whole", version, _stamps(self.path, names)))

    def _write(self, state: CheckoutState) -> None:
        write_atomically(self.inner / "state.json", state.serialize())


@contextmanager
def open_checkout_folder(path: Path) -> Iterator[CheckoutFolder]:
    """A folder to check out into, locked against other runs.

    On an error the folder is left as it was found, unless the journal already stands: then the
    next run finishes the move.

    Raises:
        UsageError: it holds something that plait didn't put there.
        ConflictError: another run works on it.
    """
    existed = path.exists()
    inner = path / STATE_FOLDER
    with disk_errors(f"open {path}"):
        if existed and not path.is_dir():
            raise UsageError(f"{path} isn't a folder", remedy="choose a new or empty folder")
        if existed and not inner.is_dir() and any(path.iterdir()):
            raise UsageError(
                f"{path} isn't empty and isn't a checkout of plait's; nothing was written",
                remedy="choose a new or empty folder",
            )
    with _locked(inner / "lock"):
        folder = CheckoutFolder(path, existed=existed)
        try:
            yield folder
        except BaseException:
            folder.discard()
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with disk_errors(f"lock {path}"):
        file = _open_lock(path)
    try:
        yield
    finally:
        file.close()


def _open_lock(path: Path) -> BinaryIO:
    while True:
        # A failed first checkout removes its lock and its folder, perhaps just now.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Never through a link: one that leads nowhere would look removed for ever.
            descriptor = os.open(path, _LOCK_FLAGS, 0o666)
        except FileNotFoundError:
            continue
        file = os.fdopen(descriptor, "rb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BlockingIOError as error:
            file.close()
            raise ConflictError(
                f"another run of plait works on {path.parent.parent}",
                remedy="wait until it is done, then run this again",
            ) from error
        file.close()


def _stamp(folder: Path, name: str) -> FileStamp | None:
    try:
        found = (folder / name).stat()
    except FileNotFoundError:
        return None
    return FileStamp(name, found.st_size, found.st_mtime_ns, found.st_ino)


def _stamps(folder: Path, names: Iterable[str]) -> tuple[FileStamp, ...]:
    """Of those that exist."""
    return tuple(stamp for name in sorted(names) if (stamp := _stamp(folder, name)) is not None)


def untouched(path: Path) -> HeldVersion | None:
    """The version of a checkout whose files are as plait proved and left them; None: read it.

    A cheap look without the lock: another run may begin at any moment.
    """
    folder = CheckoutFolder(path, existed=True)
    with disk_errors(f"read {path}"):
        try:
            state = folder.state()
        except CheckpointInvalid:
            return None
        if state is None or folder.is_torn or folder.present() != {s.name for s in state.files}:
            return None
        same = _stamps(path, (stamp.name for stamp in state.files)) == state.files
    return state.version if same else None


def refuse_torn(path: Path) -> None:
    """Before a folder of anybody's is read as weights.

    Raises:
        CheckpointInvalid: it is a checkout in the middle of a move.
    """
    if CheckoutFolder(path, existed=True).is_torn:
        raise CheckpointInvalid(
            f"{path} is in the middle of a move", remedy="run the checkout again to finish it"
        )
