"""Plans: the cheapest chain of manifests from what a caller holds to where it wants to be."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from plait.wire.base import Count, Digest, FingerprintHex, Name, Seq, WireDocument, WireRequest


class HeldState(WireRequest):
    """What the caller holds and has proven. `seq` is only cross-checked: content decides."""

    layout_digest: Digest
    fingerprint: FingerprintHex
    seq: Seq | None = None


class PlanRequest(WireRequest):
    """Sent by followers and checkouts. Safe to repeat: it changes nothing.

    Attributes:
        held: None if the caller holds nothing.
        to: any REF of the policy.
        allow_external: a plan from nothing may begin at an external anchor, whose weights the
            caller must already have on its disk.
        allow_anchor: a plan may begin at an anchor, which replaces all weights; without it a plan
            is made of deltas alone.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)

    held: HeldState | None = Field(default=None, alias="from")
    to: Annotated[str, Field(min_length=1, max_length=256)]
    allow_external: bool = True
    allow_anchor: bool = True


class PlanChunk(WireDocument):
    """One chunk to fetch. `key` is its name in the store, for agents that reach the store."""

    digest: Digest
    size: Count
    key: str


class PlanStep(WireDocument):
    """One manifest to follow.

    Attributes:
        kind: `forward` adds the delta, `reverse` subtracts it, `anchor` writes everything,
            `external` asks for weights that the caller must already have.
        base, target: states before and after; base is None for an anchor.
        to_seq: a version that has the target state.
        bytes: what there is to fetch: chunks, manifest and cut.
    """

    kind: Literal["forward", "reverse", "anchor", "external"]
    manifest_digest: Digest
    layout_digest: Digest
    cut_digest: Digest | None
    base: FingerprintHex | None
    target: FingerprintHex
    to_seq: Seq
    chunks: list[PlanChunk]
    side_files: list[PlanChunk]
    bytes: Count


class PlanDocument(WireDocument):
    """Sent by the registry. No steps: the caller is there already.

    Attributes:
        channel, generation: set where `to` named a channel itself, read in the same transaction.
    """

    policy: Name
    seq: Seq
    version_digest: Digest
    layout_digest: Digest
    fingerprint: FingerprintHex
    channel: Name | None
    generation: Count | None
    epoch: str
    steps: list[PlanStep]
    total_bytes: Count
