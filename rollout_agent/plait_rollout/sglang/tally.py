"""Partial sums of fingerprints: what one holder reports, and what the adapter adds up."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.fingerprint import ZERO, Fingerprint


@dataclass(slots=True)
class Tally:
    """Sums over the pieces of one holder.

    Attributes:
        owned, items: of the pieces that it alone holds (and their number of items).
        shared: of each piece that others hold too, by its number: (sum, items).
    """

    owned: Fingerprint = ZERO
    items: int = 0
    shared: dict[int, tuple[Fingerprint, int]] = field(default_factory=dict)

    def add(
        self, piece: int, value: Fingerprint, items: int, shared_pieces: Collection[int]
    ) -> None:
        """Adds one part of a piece to where it belongs."""
        if piece in shared_pieces:
            before, count = self.shared.get(piece, (ZERO, 0))
            self.shared[piece] = (before + value, count + items)
        else:
            self.owned += value
            self.items += items

    def to_document(self) -> dict[str, Any]:
        shared = {str(piece): [str(value), n] for piece, (value, n) in self.shared.items()}
        return {"owned": str(self.owned), "items": self.items, "shared": shared}

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "Tally":
        shared = {
            int(piece): (Fingerprint.parse(value), int(items))
            for piece, (value, items) in row["shared"].items()
        }
        return cls(Fingerprint.parse(row["owned"]), int(row["items"]), shared)
