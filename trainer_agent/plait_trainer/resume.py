"""What the weights at hand are known to come from: found out by all processes together.

The weights themselves are proven; a trainer's state adds the states that they were, back to the one
that was committed when it was saved. Whichever of them the registry knows is where to go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from plait.fingerprint import ZERO, Fingerprint
from plait_trainer.earlier_weights import EarlierWeights
from plait_trainer.saved_changes import SavedChanges
from plait_trainer.steps import Uncommitted
from plait_trainer.tracking import Proven


@dataclass(frozen=True, eq=False)
class Claim:
    """What one process's saved changes say, for the others.

    Attributes:
        states: fingerprint of its share in each state, by the states' numbers, increasing; empty
            if they say nothing about the weights at hand.
        hint: why, and what would help.
    """

    states: dict[int, Fingerprint]
    hint: str = ""


@dataclass(frozen=True, eq=False)
class Origins:
    """The weights at hand, and those that they come from.

    Attributes:
        proven: the weights at hand.
        changes: of this process's share, if they are known.
        states: (number, fingerprint of all shares), the latest first; the first is at hand.
        hint: why there are no more, and what would help.
    """

    proven: Proven
    changes: Uncommitted | None
    states: tuple[tuple[int, Fingerprint], ...]
    hint: str = ""

    @classmethod
    def alone(cls, proven: Proven) -> "Origins":
        """Nothing is known of where they come from."""
        return cls(proven, None, ((0, proven.fingerprint),))

    @classmethod
    def of(cls, proven: Proven, changes: Uncommitted | None, claims: Sequence[Claim]) -> "Origins":
        """
        Args:
            changes: of this process's share.
            claims: of all processes, in order of their ranks.
        """
        unfit = [claim.hint for claim in claims if not claim.states]
        if len({max(claim.states, default=0) for claim in claims}) > 1 and not unfit:
            unfit = ["the processes' states were saved at different moments: "]
        if unfit:
            return replace(cls.alone(proven), hint=unfit[0])
        common = set.intersection(*(set(claim.states) for claim in claims))
        states = tuple(
            (number, sum((claim.states[number] for claim in claims), ZERO))
            for number in sorted(common, reverse=True)
        )
        return cls(proven, changes, states)

    @property
    def fingerprints(self) -> list[Fingerprint]:
        return [fingerprint for _, fingerprint in self.states]

    def back_at(self, fingerprint: str) -> Proven | None:
        """The latest of the states that has this fingerprint."""
        for number, found in self.states:
            if str(found) == fingerprint:
                return self._back_at(number, found)
        return None

    def _back_at(self, number: int, fingerprint: Fingerprint) -> Proven:
        if self.changes is None or number == self.states[0][0]:
            return self.proven
        share = self.proven.division.deltas
        live = self.proven.held.published(share)
        base = EarlierWeights(share, live, self.changes.since(number))
        part = self.changes.fingerprints[number]
        return replace(self.proven, base=base, part=part, fingerprint=fingerprint)


def compare(saved: SavedChanges | None, proven: Proven) -> tuple[Claim, Uncommitted | None]:
    """What saved changes say about the weights at hand, on this process.

    Raises:
        ChunkInvalid, DigestMismatch: the chunks aren't deltas of the share's frames.
    """
    share = proven.division.deltas
    if saved is None:
        return Claim({}), None
    if not saved.is_of(share):
        return Claim({}, _OTHER_SHARE), None
    if saved.end != proven.part:
        return Claim({}, _OTHER_WEIGHTS), None
    changes = saved.unpack(share)
    return Claim(changes.fingerprints), changes


_OTHER_SHARE: Final = (
    "the checkpoint's uncommitted changes are of another share of the model: each process loads "
    "the state that it saved, and before the number of processes or the grain changes, publish and "
    "flush; "
)
_OTHER_WEIGHTS: Final = "the checkpoint's uncommitted changes lead to other weights: load those; "
