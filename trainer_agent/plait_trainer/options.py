"""What a publisher is told, checked where it is constructed: a mistake must not wait for the first
publish, or for a worker nobody looks at."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import UsageError
from plait.limits import ACTOR_BYTES_MAX


def check_whole(value: object, what: str, *, least: int = 1) -> int:
    """
    Raises:
        UsageError: not a whole number of at least `least`.
    """
    if type(value) is not int or value < least:
        raise UsageError(f"{what} is {value!r}; expected a whole number of at least {least}")
    return value


def check_seconds(value: object, what: str, *, above: float | None = None) -> float:
    """
    Args:
        above: a number that it must exceed; None: 0 will do.
    Raises:
        UsageError: not a number of seconds; infinity is one.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0 or (above is not None and value <= above):  # type: ignore[arg-type, operator]
        least = "of at least 0" if above is None else f"above {above:g}"
        raise UsageError(f"{what} is {value!r}; expected seconds {least}")
    return float(value)  # type: ignore[arg-type]


def check_mapping(value: object, what: str) -> Mapping[str, Any]:
    """
    Raises:
        UsageError: not a mapping whose keys are text.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} is a {type(value).__name__}; expected a mapping from text")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise UsageError(f"{what} has the key {odd[0]!r:.80}; expected text")
    return value


def check_actor(value: object) -> str:
    """
    Raises:
        UsageError: not text, or too long for a channel's history.
    """
    if not isinstance(value, str) or len(value) > ACTOR_BYTES_MAX:
        raise UsageError(
            f"actor is {value!r:.80}; expected text of at most {ACTOR_BYTES_MAX} characters"
        )
    return value


def check_path(value: object, what: str) -> Path | None:
    """
    Raises:
        UsageError: neither a path nor None.
    """
    if value is not None and not isinstance(value, str | Path):
        raise UsageError(f"{what} is {value!r:.80}; expected the path of a folder")
    return None if value is None else Path(value)
