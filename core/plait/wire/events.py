"""Events: hints to look again. Losing one costs only latency."""

from typing import Any, Literal

from plait.wire.base import Count, Name, Time, WireDocument


class EventDocument(WireDocument):
    """One thing that happened, in commit order. `revision` grows by one each time."""

    revision: Count
    type: Literal["version_committed", "channel_moved", "policy_created"]
    policy: Name
    channel: Name | None
    payload: dict[str, Any]
    at: Time


class EventPage(WireDocument):
    """Events after a revision, oldest first."""

    epoch: str
    events: list[EventDocument]
    revision: Count
