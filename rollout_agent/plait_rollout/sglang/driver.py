"""What a driver of an engine must not forget when it dies: the move that is under way.

`driver.json` in the spool is written before an engine is paused for a move, and again when the move
is proven or undone. Whoever attaches next finds in it whether the engine may be torn.
"""

from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from plait.errors import EngineRefused
from plait.fingerprint import Fingerprint
from plait_rollout.sglang.spool import Spool, hold_lock, read_json, write_json


@dataclass(frozen=True, slots=True)
class MoveUnderWay:
    """A move between its first and last step.

    Attributes:
        move: its id, by which the ranks know their undo lists.
        base, target: the states that the engine may hold.
        base_stamp, target_stamp: what it is to report for each.
    """

    move: str
    base: Fingerprint
    target: Fingerprint
    base_stamp: str
    target_stamp: str


@dataclass(frozen=True, slots=True)
class DriverState:
    """The last word about an engine.

    Attributes:
        boots: of the ranks that it is about.
        held: what the engine holds if no move is under way.
        under_way: the unfinished move, if any.
    """

    boots: tuple[str, ...]
    held: Fingerprint
    under_way: MoveUnderWay | None = None

    def settled(self, held: Fingerprint) -> "DriverState":
        return replace(self, held=held, under_way=None)

    def write(self, spool: Spool) -> None:
        move = self.under_way
        row = None
        if move is not None:
            row = {
                "move": move.move,
                "base": str(move.base),
                "target": str(move.target),
                "base_stamp": move.base_stamp,
                "target_stamp": move.target_stamp,
            }
        document = {"boots": list(self.boots), "held": str(self.held), "under_way": row}
        write_json(spool.root / "driver.json", document)

    @classmethod
    def read(cls, spool: Spool) -> "DriverState | None":
        """The last driver's word, or None where there was none.

        Raises:
            DocumentInvalid: not a state file.
        """
        if not (spool.root / "driver.json").exists():
            return None
        document = read_json(spool.root / "driver.json")
        return cls(
            tuple(document["boots"]),
            Fingerprint.parse(document["held"]),
            _under_way(document["under_way"]),
        )


def _under_way(row: dict[str, Any] | None) -> MoveUnderWay | None:
    if row is None:
        return None
    return MoveUnderWay(
        row["move"],
        Fingerprint.parse(row["base"]),
        Fingerprint.parse(row["target"]),
        row["base_stamp"],
        row["target_stamp"],
    )


def claim(spool: Spool) -> BinaryIO:
    """Makes this process the engine's only driver, until the handle is closed or the process ends.

    Raises:
        EngineRefused: another living process drives it.
    """
    handle = hold_lock(spool.root / "driver.lock")
    if handle is None:
        raise EngineRefused(
            f"another agent drives the engine of {spool.root}",
            remedy="stop it first; one follower drives one engine",
        )
    return handle
