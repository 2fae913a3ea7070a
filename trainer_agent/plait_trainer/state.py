"""What a trainer's own checkpoint carries about its publisher: identities, and the changes that
aren't committed; no weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from plait.errors import NotFound, UsageError
from plait.fields import parse_digest, parse_integer
from plait.fingerprint import Fingerprint
from plait.limits import INTEGER_MAX
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer.saved_changes import SavedChanges, pack
from plait_trainer.share import Share
from plait_trainer.steps import Uncommitted

FORMAT: Final = "plait-trainer/2"

_VERSION: Final = ("seq", "version_digest", "layout_digest", "fingerprint")
_AS: Final = "pass what `state_dict` gave"


def state_of(
    policy: str,
    channel: str,
    version: VersionDocument | None,
    changes: tuple[Share, Uncommitted] | None = None,
) -> dict[str, Any]:
    """The state of a trainer whose last committed version this is.

    Args:
        changes: since then, and of which share; None: it isn't attached.
    """
    packed, digest = ((), None) if changes is None else pack(*changes)
    return {
        "format": FORMAT,
        "policy": policy,
        "channel": channel,
        "seq": None if version is None else version.seq,
        "version_digest": None if version is None else version.version_digest,
        "layout_digest": None if version is None else version.layout_digest,
        "fingerprint": None if version is None else version.fingerprint,
        "changes": packed,
        "changes_digest": digest,
    }


@dataclass(frozen=True, eq=False)
class TrainerState:
    """A state that was read.

    Attributes:
        seq, version_digest: of the last version that was known to be committed; None: there was
            none.
        changes: since then; None: the publisher wasn't attached.
    """

    seq: int | None
    version_digest: str | None
    changes: SavedChanges | None

    @classmethod
    def read(cls, state: Mapping[str, Any], policy: str, channel: str) -> "TrainerState":
        """
        Raises:
            UsageError: another policy's or channel's state, or none at all.
            FormatError, CorruptionError: it is damaged.
        """
        if not isinstance(state, Mapping):
            raise UsageError(
                f"a trainer state is a mapping, got {type(state).__name__}", remedy=_AS
            )
        expected = (FORMAT, policy, channel)
        found = tuple(state.get(name) for name in ("format", "policy", "channel"))
        if found != expected:
            raise UsageError(f"the trainer state is of {found}; expected {expected}")
        seq, version_digest = _version(state)
        digest, changes = state.get("changes_digest"), None
        if digest is not None:
            changes = SavedChanges.read(state.get("changes"), digest)
        return cls(seq, version_digest, changes)

    def require_known(self, client: RegistryClient, policy: str) -> None:
        """
        Raises:
            NotFound: the registry has never had the state's version.
        """
        if self.version_digest is None:
            return
        if client.find_commit(policy, str(self.version_digest)) is None:
            raise NotFound(
                f"the registry has no version {self.version_digest} of {policy!r}, which this "
                f"trainer committed as version {self.seq}",
                remedy="is this the registry that it was committed to, or was it restored?",
            )


def _version(state: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """The seq and the digest of a state's version: all of its fields are there, or none is."""
    found = [state.get(name) for name in _VERSION]
    if all(field is None for field in found):
        return None, None
    seq, version_digest, layout_digest, fingerprint = found
    parse_digest(layout_digest, "a state's layout")
    Fingerprint.parse(fingerprint)
    number = parse_integer(seq, "a state's version", INTEGER_MAX)
    return number, parse_digest(version_digest, "a state's version digest")
