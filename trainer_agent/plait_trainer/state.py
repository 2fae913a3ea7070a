"""What a trainer's own checkpoint carries about its publisher: identities, no weights."""

from collections.abc import Mapping
from typing import Any, Final

from plait.errors import NotFound, UsageError
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient

FORMAT: Final = "plait-trainer/1"


def state_of(policy: str, channel: str, version: VersionDocument | None) -> dict[str, Any]:
    """The state of a trainer whose last committed version this is."""
    return {
        "format": FORMAT,
        "policy": policy,
        "channel": channel,
        "seq": None if version is None else version.seq,
        "version_digest": None if version is None else version.version_digest,
        "layout_digest": None if version is None else version.layout_digest,
        "fingerprint": None if version is None else version.fingerprint,
    }


def known_version(
    client: RegistryClient, state: Mapping[str, Any], policy: str, channel: str
) -> str | None:
    """Version digest in a state, which the registry has; None: it had committed none.

    Raises:
        UsageError: another policy's or channel's state, or none at all.
        NotFound: the registry has never had that version.
    """
    expected = (FORMAT, policy, channel)
    found = tuple(state.get(name) for name in ("format", "policy", "channel"))
    if found != expected:
        raise UsageError(f"the trainer state is of {found}; expected {expected}")
    digest = state.get("version_digest")
    if digest is None:
        return None
    if client.find_commit(policy, str(digest)) is None:
        raise NotFound(
            f"the registry has no version {digest} of {policy!r}, which this trainer "
            f"committed as version {state.get('seq')}",
            remedy="is this the registry that it was committed to, or was it restored?",
        )
    return str(digest)
