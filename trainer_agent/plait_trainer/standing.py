"""Where a trainer stands in a policy's lineage: found by content, never by memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import HeadMoved, LayoutChanged, NotFound, UnknownBase
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.wire import ChannelDocument, VersionDocument
from plait_client.registry import RegistryClient


@dataclass(frozen=True)
class Standing:
    """What the next commit starts from, and what it expects to find.

    Attributes:
        parent: the version whose weights the next delta starts from; None: an anchor comes next.
        head: version digest of the channel's head; None: no such channel yet.
        generation: the channel's; 0: no such channel yet.
    """

    parent: VersionDocument | None
    head: str | None
    generation: int

    @classmethod
    def after(cls, version: VersionDocument) -> "Standing":
        """Where whoever committed this version stands."""
        return cls(version, version.version_digest, version.generation)

    @classmethod
    def beside(cls, parent: VersionDocument | None, channel: ChannelDocument | None) -> "Standing":
        """On a version, whatever the channel's head is."""
        if channel is None:
            return cls(parent, None, 0)
        return cls(parent, channel.version_digest, channel.generation)

    def in_words(self, fingerprint: Fingerprint) -> str:
        """For the log: what weights of this fingerprint are."""
        if self.parent is None:
            return f"weights {fingerprint} begin a new line with an anchor"
        return f"weights {fingerprint} {_are(self.parent, str(fingerprint))} {self.parent.seq}"


def find_channel(client: RegistryClient, policy: str, channel: str) -> ChannelDocument | None:
    """The channel, or None if there is none (or no such policy)."""
    try:
        return client.channel(policy, channel)
    except NotFound:
        return None


def find_standing(
    client: RegistryClient,
    policy: str,
    channel: str,
    *,
    layout: Layout,
    fingerprints: Sequence[Fingerprint],
    new_anchor: bool,
    hint: str = "",
) -> Standing:
    """Where weights of this layout stand.

    Args:
        fingerprints: of the weights; and then of those that they are known to come from, the
            latest first. The first that is a version decides.
        hint: what else would help if none is.
    Raises:
        HeadMoved: one is a version, but not the channel's head; `new_anchor` or not.
        UnknownBase: the policy has versions, and these weights are none of them.
        LayoutChanged: nor can they be: they have another layout.
    """
    head = find_channel(client, policy, channel)
    for fingerprint in dict.fromkeys(fingerprints):
        held = _versions_with(client, policy, layout, fingerprint)
        if head is not None:
            for version in held:
                if version.version_digest == head.version_digest:
                    return Standing.beside(version, head)
            if held:
                raise _moved_on(held[0], head, str(fingerprints[0]))
        elif held:
            return Standing.beside(held[0], None)
    if not new_anchor and (latest := _latest(client, policy)) is not None:
        _refuse_unknown(client, latest, layout, fingerprints[0], hint)
    return Standing.beside(None, head)


def why_there(head: ChannelDocument) -> str:
    """Why a channel is where it is."""
    who = f" by {head.actor}" if head.actor else ""
    why = f": {head.reason}" if head.reason else ""
    return f"{head.kind}{who} at {head.moved_at}{why}"


def _versions_with(
    client: RegistryClient, policy: str, layout: Layout, fingerprint: Fingerprint
) -> list[VersionDocument]:
    try:
        return client.versions_with(policy, layout.digest, str(fingerprint))
    except (UnknownBase, NotFound):
        return []


def _latest(client: RegistryClient, policy: str) -> VersionDocument | None:
    try:
        newest = client.versions(policy, limit=1).versions
    except NotFound:
        return None
    return newest[0] if newest else None


def _moved_on(held: VersionDocument, head: ChannelDocument, fingerprint: str) -> HeadMoved:
    return HeadMoved(
        f"these weights {_are(held, fingerprint)} {held.seq} of {held.policy!r}, but channel "
        f"{head.channel!r} is at version {head.seq}: {why_there(head)}",
        remedy=f"load version {head.seq} and attach again, or rebase(to={held.seq}) to continue "
        f"from version {held.seq} all the same",
        held=held.seq,
        head=head.seq,
        generation=head.generation,
    )


def _are(version: VersionDocument, fingerprint: str) -> str:
    return "are version" if version.fingerprint == fingerprint else "were trained on from version"


def _refuse_unknown(
    client: RegistryClient,
    latest: VersionDocument,
    layout: Layout,
    fingerprint: Fingerprint,
    hint: str,
) -> None:
    if latest.layout_digest != layout.digest:
        known = client.layout(latest.layout_digest)
        try:
            known.require_equal(layout, what="the model")
        except LayoutChanged as error:
            error.remedy = "new_anchor=True starts a new line with another layout"
            raise
    raise UnknownBase(
        f"no version of {latest.policy!r} has the weights that this trainer holds "
        f"(fingerprint {fingerprint}; the newest version, {latest.seq}, has {latest.fingerprint})",
        remedy=f"{hint}load a committed version; or pass base=, the weights of one, to publish the "
        "difference to it; or new_anchor=True to start a new line",
        fingerprint=str(fingerprint),
        hint=hint,
    )
