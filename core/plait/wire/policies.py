"""Policies: named lines of weights."""

from plait.wire.base import Count, Name, Time, WireDocument, WireRequest


class CreatePolicy(WireRequest):
    """Sent by whoever publishes first. Not safe to repeat: the second answer is 409 `exists`."""

    name: Name


class PolicyDocument(WireDocument):
    """Sent by the registry."""

    name: Name
    created_at: Time
    versions: Count
    channels: list[Name]


class PolicyList(WireDocument):
    """Sent by the registry: every policy, by name."""

    policies: list[PolicyDocument]
