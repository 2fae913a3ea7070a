"""Fields of canonical documents: parsed by what they must be, refused by name."""

from collections.abc import Mapping
from typing import Any

from plait import canonical
from plait.errors import DocumentInvalid, LimitExceeded


def parse_object(row: object, names: set[str], noun: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DocumentInvalid(f"a {noun} must be an object, got {type(row).__name__}")
    if set(row) != names:
        odd = sorted(set(row) ^ names)
        raise DocumentInvalid(f"a {noun} has missing or unknown fields: {', '.join(odd)[:200]}")
    return dict(row)


def parse_digest(value: object, noun: str) -> str:
    if not canonical.is_digest(value):
        raise DocumentInvalid(f"{noun} must be 'sha256:' and 64 hex digits, got {value!r:.80}")
    return str(value)


def parse_integer(value: object, noun: str, most: int) -> int:
    if type(value) is not int or value < 0:
        raise DocumentInvalid(f"{noun} must be a non-negative integer, got {value!r:.80}")
    if value > most:
        raise LimitExceeded(f"{noun} is {value}; at most {most}")
    return value
