"""The registry's clock, and times as they are written on the wire."""

import time
from datetime import UTC, datetime


def now() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def wire_time(microseconds: int) -> str:
    """RFC 3339 in UTC, with microseconds."""
    moment = datetime.fromtimestamp(microseconds // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{microseconds % 1_000_000:06d}Z"
