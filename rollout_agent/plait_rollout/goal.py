"""Where a replica should be, and what it is proven to hold."""

from dataclasses import dataclass

from plait.fingerprint import Fingerprint
from plait.wire import ChannelDocument, VersionDocument


@dataclass(frozen=True, slots=True)
class Goal:
    """A version to reach.

    Attributes:
        generation: of the followed channel, as it was seen last.
    """

    policy: str
    seq: int
    layout_digest: str
    fingerprint: Fingerprint
    generation: int

    @classmethod
    def of_head(cls, head: ChannelDocument) -> "Goal":
        fingerprint = Fingerprint.parse(head.fingerprint)
        return cls(head.policy, head.seq, head.layout_digest, fingerprint, head.generation)

    @classmethod
    def of_version(cls, version: VersionDocument, *, generation: int) -> "Goal":
        fingerprint = Fingerprint.parse(version.fingerprint)
        return cls(version.policy, version.seq, version.layout_digest, fingerprint, generation)

    @property
    def stamp(self) -> str:
        """What an engine calls itself there."""
        return stamp_of(self.policy, self.seq, self.generation)


@dataclass(frozen=True, slots=True)
class Held:
    """Weights that a replica is proven to hold.

    Attributes:
        stamp: what the engine calls them; empty if it was never told.
    """

    layout_digest: str
    fingerprint: Fingerprint
    stamp: str

    def has(self, goal: Goal) -> bool:
        """Whether these are the goal's weights, whatever they are called."""
        return (self.layout_digest, self.fingerprint) == (goal.layout_digest, goal.fingerprint)


def stamp_of(policy: str, seq: int, generation: int) -> str:
    """`POLICY@SEQ#GENERATION`: which weights made a sample, and under which move of the channel."""
    return f"{policy}@{seq}#{generation}"
