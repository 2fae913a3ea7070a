"""Replicas: what one rollout engine holds, as it reports itself."""

from typing import Annotated, Literal

from pydantic import Field

from plait.wire.base import (
    Count,
    Digest,
    FingerprintHex,
    Generation,
    Name,
    Seq,
    Text,
    Time,
    WireDocument,
    WireRequest,
)

Phase = Literal["attaching", "idle", "fetching", "staged", "applying", "serving", "failed"]


class ReplicaReport(WireRequest):
    """Sent by followers, after every change and as a heartbeat. Safe to repeat.

    Attributes:
        seq, fingerprint: what it serves, proven; None before the first proof.
        seen_generation: of the channel, the newest that it knows.
        error: why it is behind, if it is.
        durations: seconds of the last move, by step (`fetch`, `stage`, `pause`, …).
        ttl_seconds: silent for longer means lost.
    """

    channel: Name
    engine: Annotated[Text, Field(max_length=128)]
    location: Annotated[Text, Field(max_length=128)] = ""
    phase: Phase
    seq: Seq | None
    layout_digest: Digest | None
    fingerprint: FingerprintHex | None
    seen_generation: Generation
    error: Annotated[Text, Field(max_length=4096)] = ""
    error_code: Annotated[Text, Field(max_length=64)] = ""
    durations: dict[Text, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    ttl_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0


class ReplicaDocument(WireDocument):
    """Sent by the registry: the last report, judged.

    Attributes:
        lag_versions: how many versions of the chain it is behind the channel's head; None: unknown
            (nothing proven, or beside the lineage).
        lag_seconds: how long the head has been newer than what it serves; 0 if it is current.
        drifted: its fingerprint isn't the one recorded for its seq.
        lost: silent for longer than its ttl.
    """

    replica: Name
    report: ReplicaReport
    head_seq: Seq | None
    generation: Generation
    lag_versions: Count | None
    lag_seconds: float
    drifted: bool
    lost: bool
    last_seen_at: Time


class FleetDocument(WireDocument):
    """Sent by the registry: every replica of a policy, by name."""

    replicas: list[ReplicaDocument]
