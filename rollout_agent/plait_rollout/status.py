"""What a follower says about itself, to programs beside it and to people."""

from dataclasses import asdict, dataclass, field
from typing import Any

from plait.wire import Phase


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of a follower.

    Attributes:
        replica: its name in the fleet.
        way: how weights get into the engine: `in-place`, `reload`, `directory`.
        phase: as it is reported to the registry.
        ready: it serves proven weights that are near enough to the channel's head.
        seq, fingerprint, stamp: what is served, proven; None: nothing is proven, or the policy has
            no such version.
        head_seq, generation: of the channel, as it was seen last.
        lag_versions: behind the head; None: unknown.
        pinned: it stays where it was sent and doesn't follow the channel.
        moves: how many were made by this process.
        error, error_code, remedy: why it is not where it should be; empty if it is.
        fallback: why the last move didn't take the usual way; empty if it did.
        durations: seconds of the last move, by step.
    """

    policy: str
    channel: str
    replica: str
    way: str
    phase: Phase = "idle"
    ready: bool = False
    seq: int | None = None
    layout_digest: str | None = None
    fingerprint: str | None = None
    stamp: str = ""
    head_seq: int | None = None
    generation: int = 0
    lag_versions: int | None = None
    pinned: bool = False
    moves: int = 0
    error: str = ""
    error_code: str = ""
    remedy: str = ""
    fallback: str = ""
    changed_elements: int | None = None
    durations: dict[str, float] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        return asdict(self)
