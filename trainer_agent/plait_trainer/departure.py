"""Continuing from a version that a channel isn't at: what of the channel is left behind."""

import logging
from dataclasses import dataclass
from typing import Final

from plait.wire import ChannelDocument, VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer.standing import Standing, find_channel, why_there

_NAMED: Final = 8

logger = logging.getLogger("plait.trainer")


@dataclass(frozen=True)
class Departure:
    """A version to continue from, wherever the channel is.

    Attributes:
        head: the channel; None: there is none yet.
        left: versions of the channel's line that the version doesn't come from, the latest first;
            as far back as one page of versions goes.
    """

    version: VersionDocument
    head: ChannelDocument | None
    left: tuple[int, ...]

    @classmethod
    def find(
        cls, client: RegistryClient, policy: str, channel: str, to: int | str | None
    ) -> "Departure":
        """
        Args:
            to: any REF; None: the channel's head.
        """
        head = find_channel(client, policy, channel)
        version = client.version(policy, channel if to is None else str(to))
        left = () if head is None else _left_behind(client, head, version)
        return cls(version, head, left)

    @property
    def standing(self) -> Standing:
        return Standing.beside(self.version, self.head)

    def tell(self) -> None:
        """Warns in the log, unless the channel is at this very version."""
        head = self.head
        if head is None or head.version_digest == self.version.version_digest:
            return
        logger.warning(
            "%s continues from version %s, although channel %r is at version %s: %s%s",
            head.policy, self.version.seq, head.channel, head.seq, why_there(head),
            self._left_in_words(),
        )  # fmt: skip

    def _left_in_words(self) -> str:
        if not self.left:
            return ""
        more = len(self.left) - _NAMED
        names = ", ".join(map(str, self.left[:_NAMED])) + (f" and {more} more" if more > 0 else "")
        return f"; left behind: {names}"


def _left_behind(
    client: RegistryClient, head: ChannelDocument, version: VersionDocument
) -> tuple[int, ...]:
    """Both lines are followed back, the later of the two first, to where they meet."""
    left: list[int] = []
    ours: int | None = version.seq
    theirs: int | None = head.seq
    for each in client.versions(head.policy, before=max(version.seq, head.seq) + 1).versions:
        if theirs is None or ours == theirs:
            break
        if each.seq == theirs:
            left.append(theirs)
            theirs = each.parent
        elif each.seq == ours:
            ours = each.parent
    return tuple(left)
