"""What stays the same from publish to publish."""

from dataclasses import dataclass
from pathlib import Path

from plait.layout import Layout
from plait.store import Store
from plait_trainer.share import Share
from plait_trainer.sharing import Division


@dataclass(frozen=True, eq=False)
class Line:
    """A policy's line, as this process publishes it.

    Attributes:
        division: who publishes what of it.
        external: the first anchor uploads nothing: both sides hold its weights.
        side_files: folder whose files travel with anchors.
        store: written directly; None: through the registry.
    """

    policy: str
    channel: str
    division: Division
    external: bool = False
    side_files: Path | None = None
    actor: str = ""
    store: Store | None = None

    @property
    def layout(self) -> Layout:
        return self.division.layout

    def share(self, *, begins: bool) -> Share:
        """What this process publishes of its first anchor, or of a delta."""
        return self.division.anchors if begins else self.division.deltas
