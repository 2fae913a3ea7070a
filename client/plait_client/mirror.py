"""The private mirror: the head's bits on this machine, for a publisher that keeps none of its own.

A mirror is a checkout in the cache, moved by the same deltas as any other. Losing it costs a
checkout; believing a wrong one is impossible, because a delta's sum is proven against a full pass.
"""

import fcntl
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import CorruptionError, FormatError, LineageError, PlaitError
from plait.fingerprint import Fingerprint
from plait.wire import VersionDocument
from plait_client.build import build_weights
from plait_client.checkout import checkout
from plait_client.checkout_folder import HeldVersion, open_checkout_folder
from plait_client.checkpoint import STATE_FOLDER, CheckpointFolder
from plait_client.disk import disk_errors
from plait_client.fetch import Fetcher
from plait_client.progress import Progress

_logger = logging.getLogger(__name__)


class Mirror:
    """The mirror of one policy of one registry. Made by `open_mirror`."""

    def __init__(self, path: Path, policy: str, fetcher: Fetcher, progress: Progress) -> None:
        self.path = path
        self._policy = policy
        self._fetcher = fetcher
        self._progress = progress

    def weights_of(self, version: VersionDocument) -> CheckpointFolder:
        """The version's weights; moves the mirror there, or makes it anew where it is no use.

        Raises:
            BaseMismatch: the line is external, and there is no mirror to begin with.
        """
        try:
            self._check_out(version, rebuild=False)
        except (LineageError, CorruptionError, FormatError) as error:
            if not (self.path / STATE_FOLDER / "state.json").exists():
                raise
            _logger.warning("the mirror %s is made anew: %s", self.path, error)
            self._check_out(version, rebuild=True)
        return CheckpointFolder(self.path)

    def rebuild(self, version: VersionDocument) -> CheckpointFolder:
        """As `weights_of`, without a look at what is there."""
        self._check_out(version, rebuild=True)
        return CheckpointFolder(self.path)

    def follow(self, version: VersionDocument, published: CheckpointFolder) -> None:
        """Bring the mirror to a version that was just published from `published`.

        A mirror that can't be kept is only slow: the next publish makes it anew.
        """
        try:
            if version.kind == "anchor" or not self.path.exists():
                self._copy(version, published)
            else:
                self._check_out(version, rebuild=False)
        except PlaitError as error:
            _logger.warning("the mirror %s couldn't be kept: %s", self.path, error)

    def _check_out(self, version: VersionDocument, *, rebuild: bool) -> None:
        ref = f"{self._policy}@{version.seq}"
        checkout(
            self._fetcher.client,
            ref,
            self.path,
            fetcher=self._fetcher,
            progress=self._progress,
            rebuild=rebuild,
        )

    def _copy(self, version: VersionDocument, published: CheckpointFolder) -> None:
        held = HeldVersion(
            version.policy,
            version.seq,
            version.version_digest,
            version.layout_digest,
            version.fingerprint,
        )
        with open_checkout_folder(self.path) as place:
            building = place.start_building()
            build_weights(
                building,
                published.layout,
                (),
                source=published,
                expected=Fingerprint.parse(version.fingerprint),
                progress=self._progress,
            )
            place.place(building, held)


@contextmanager
def open_mirror(policy: str, fetcher: Fetcher, progress: Progress) -> Iterator[Mirror]:
    """The mirror, for this process alone: another publish of the policy waits its turn."""
    # The registry's address keeps equal names of two registries apart.
    key = hashlib.sha256(fetcher.client.url.encode()).hexdigest()[:12]
    root = fetcher.cache.root / "mirrors"
    path = root / f"{policy}-{key}"
    with disk_errors(f"open the mirror {path}"):
        root.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("a")
    with lock:
        with disk_errors(f"lock the mirror {path}"):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _logger.warning("waiting for another publish of policy %r on this machine", policy)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield Mirror(path, policy, fetcher, progress)
