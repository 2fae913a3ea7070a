"""States that a trainer has captured and not committed, and the changes that lead from each to the
next."""

from dataclasses import dataclass

from plait.fingerprint import ZERO, Fingerprint
from plait_trainer.deltas import Deltas, add_up, sum_of


@dataclass(frozen=True, eq=False)
class Step:
    """Changes of a process's share from one state to a later one.

    Attributes:
        number: of the state that they lead to: captures since the publisher attached.
    """

    number: int
    deltas: Deltas

    def then(self, later: "Step | None") -> "Step":
        """Both, one after the other, as one step."""
        if later is None:
            return self
        return Step(later.number, add_up(self.deltas, later.deltas))

    @property
    def increment(self) -> Fingerprint:
        return sum((delta.increment for delta in self.deltas.values()), ZERO)


@dataclass(frozen=True, eq=False)
class Uncommitted:
    """A process's share, from the last state that is known to be committed to the present weights.

    Attributes:
        start: number of that state; where nothing is committed yet, of one that may be.
        steps: numbers increasing; the last one leads to the present weights.
        end: fingerprint of the share's present weights.
    """

    start: int
    steps: tuple[Step, ...]
    end: Fingerprint

    @property
    def fingerprints(self) -> dict[int, Fingerprint]:
        """Of the share in each state, by the states' numbers, increasing."""
        found, fingerprint = {}, self.end
        befores = [self.start, *(step.number for step in self.steps)]
        for step, before in zip(reversed(self.steps), reversed(befores[:-1]), strict=True):
            found[step.number] = fingerprint
            fingerprint -= step.increment
            found[before] = fingerprint
        return dict(sorted(found.items()))

    def since(self, number: int) -> Deltas:
        """Changes from a state to the present weights."""
        return sum_of(step.deltas for step in self.steps if step.number > number)
