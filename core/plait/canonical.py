"""Canonical documents: RFC 8785 JSON, named by the SHA-256 of its bytes.

Every document carries `format` and `requires`; a reader that doesn't know one of them refuses
before it does anything else.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import rfc8785

from plait.errors import DocumentInvalid, LimitExceeded, UnsupportedFormat
from plait.json_shape import shape_of
from plait.limits import (
    DOCUMENT_BYTES_MAX,
    DOCUMENT_DEPTH_MAX,
    DOCUMENT_VALUES_MAX,
    INTEGER_MAX,
)

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


def digest_of(data: bytes | memoryview) -> str:
    """`sha256:` and 64 lower-case hex digits of stored bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def serialize(document: Mapping[str, Any]) -> bytes:
    """RFC 8785 bytes of a document.

    Raises:
        DocumentInvalid: canonical JSON can't hold it (a NaN, an integer beyond 2^53-1, half of a
            surrogate pair).
        LimitExceeded: it is nested deeper than DOCUMENT_DEPTH_MAX.
    """
    try:
        data = rfc8785.dumps(dict(document))
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise DocumentInvalid(f"not expressible as canonical JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    if shape_of(data)[0] > DOCUMENT_DEPTH_MAX:
        raise _too_deep()
    return data


def document_digest(document: Mapping[str, Any]) -> str:
    return digest_of(serialize(document))


def parse(data: bytes | str, *, expected_format: str) -> dict[str, Any]:
    """A canonical document's fields, with `format` and `requires` checked and kept.

    Raises:
        LimitExceeded: more bytes, values or levels than limits.py allows.
        DocumentInvalid: not JSON, duplicate keys, not an object, or not in canonical form.
        UnsupportedFormat: another format, or a feature this release lacks.
    """
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError as error:
        raise DocumentInvalid(f"not a JSON document: {error}") from error
    document = read(raw)
    check_header(document, expected_format=expected_format)
    assert isinstance(document, dict)
    if serialize(document) != raw:
        raise DocumentInvalid(f"{expected_format} document is not in canonical form (RFC 8785)")
    return document


def read(raw: bytes) -> object:
    """Any JSON value, under the rules of canonical documents for size, keys and numbers.

    Raises:
        LimitExceeded, DocumentInvalid: as `parse`.
    """
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise LimitExceeded(f"document of {len(raw)} bytes; at most {DOCUMENT_BYTES_MAX}")
    depth, values = shape_of(raw)
    if depth > DOCUMENT_DEPTH_MAX:
        raise _too_deep()
    if values > DOCUMENT_VALUES_MAX:
        raise LimitExceeded(f"document of {values} values; at most {DOCUMENT_VALUES_MAX}")
    try:
        # As text: of bytes the parser would guess the encoding.
        value: object = json.loads(
            raw.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_small_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except ValueError as error:
        raise DocumentInvalid(f"not a JSON document: {error}") from error
    return value


def check_header(document: object, *, expected_format: str) -> None:
    """Refuses a document of another format, or one that requires an unknown feature."""
    if not isinstance(document, dict):
        raise DocumentInvalid(f"expected a JSON object, got {type(document).__name__}")
    if document.get("format") != expected_format:
        raise UnsupportedFormat(
            f"expected a {expected_format!r} document, got {document.get('format')!r:.80}"
        )
    requires = document.get("requires", [])
    if not isinstance(requires, list):
        raise DocumentInvalid(f"'requires' must be a list, got {requires!r:.80}")
    if requires:
        raise UnsupportedFormat(
            f"{expected_format} document requires features unknown to this release: "
            f"{requires!r:.200}",
            remedy="upgrade plait on this side",
        )


def check_length(rows: list[Any], most: int, noun: str) -> None:
    """Refuses a list of a document before anything is built of its rows.

    Raises:
        LimitExceeded: it is longer than `most`.
    """
    if len(rows) > most:
        raise LimitExceeded(f"{len(rows)} {noun}; at most {most}")


def _too_deep() -> LimitExceeded:
    return LimitExceeded(f"a document is nested deeper than {DOCUMENT_DEPTH_MAX} levels")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object names one key twice")
    return fields


def _small_integer(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > INTEGER_MAX:
        raise ValueError(f"integer beyond 2^53-1: {text[:40]}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
