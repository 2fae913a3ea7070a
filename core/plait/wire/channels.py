"""Channels: the only things that move."""

from typing import Annotated, Literal

from pydantic import Field

from plait.limits import REASON_BYTES_MAX
from plait.wire.base import (
    Actor,
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

MoveKind = Literal["commit", "create", "promote", "rollback"]


class ChannelDocument(WireDocument):
    """Sent by the registry: where a channel points now. Followers order by `generation`.

    Attributes:
        epoch: of the registry's database; generations of two epochs can't be compared.
    """

    policy: Name
    channel: Name
    epoch: str
    generation: Generation
    seq: Seq
    version_digest: Digest
    layout_digest: Digest
    fingerprint: FingerprintHex
    kind: MoveKind
    reason: str
    actor: str
    moved_at: Time


class ChannelList(WireDocument):
    """Sent by the registry: a policy's channels, by name."""

    channels: list[ChannelDocument]


class CreateChannel(WireRequest):
    """Sent by operators. `to` is any REF of the policy."""

    name: Name
    to: Annotated[str, Field(min_length=1, max_length=256)]
    actor: Actor = ""


class MoveRequest(WireRequest):
    """Sent by operators: promote or roll back. Safe to repeat under one `move_id`.

    Attributes:
        to: any REF of the policy.
        expected_generation: as the operator saw it.
        move_id: random; the same one replays the first answer.
        reason: kept in the history for ever; a rollback must give one.
    """

    to: Annotated[str, Field(min_length=1, max_length=256)]
    expected_generation: Generation
    kind: Literal["promote", "rollback"]
    move_id: Annotated[Text, Field(min_length=16, max_length=64)]
    reason: Annotated[Text, Field(max_length=REASON_BYTES_MAX)] = ""
    actor: Actor = ""


class ChannelEvent(WireDocument):
    """One movement in a channel's history."""

    generation: Generation
    from_seq: Seq | None
    to_seq: Seq
    kind: MoveKind
    reason: str
    actor: str
    at: Time


class ChannelHistory(WireDocument):
    """Every movement of a channel, newest first. Nothing is ever removed from it."""

    events: list[ChannelEvent]
