"""The version record: the canonical document whose digest is the identity of a version."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from plait import canonical
from plait.errors import DocumentInvalid, LimitExceeded
from plait.fields import parse_digest, parse_object
from plait.fingerprint import Fingerprint
from plait.limits import METADATA_BYTES_MAX
from plait.names import check_name

RECORD_FORMAT: Final = "plait-version/1"

Proof = Literal["full", "incremental", "unproven"]

_RECORD_FIELDS: Final = {
    "format", "requires", "policy", "layout", "parent",
    "fingerprint", "proof", "metadata", "nonce",
}  # fmt: skip


@dataclass(frozen=True)
class VersionRecord:
    """The identity of a version: its digest is the version digest and the idempotency key.

    Attributes:
        policy: name of the line.
        layout: digest.
        parent: version digest, None for the first of a line.
        fingerprint: of the whole weights.
        proof: how the fingerprint is known: `full` pass, `incremental`, `unproven`.
        metadata: training facts (step, learning rate, message); free, small.
        nonce: makes two publishes of one content two versions.

    Raises:
        DocumentInvalid, LimitExceeded: a policy's name or metadata that no record can have.
    """

    policy: str
    layout: str
    parent: str | None
    fingerprint: Fingerprint
    proof: Proof
    nonce: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_metadata(self.metadata)
        check_name(self.policy, "policy")

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes."""
        return canonical.serialize(self.to_document())

    @cached_property
    def digest(self) -> str:
        return canonical.digest_of(self.data)

    def to_document(self) -> dict[str, Any]:
        return {
            "format": RECORD_FORMAT,
            "requires": [],
            "policy": self.policy,
            "layout": self.layout,
            "parent": self.parent,
            "fingerprint": str(self.fingerprint),
            "proof": self.proof,
            "metadata": dict(self.metadata),
            "nonce": self.nonce,
        }

    @classmethod
    def parse(cls, data: bytes | str) -> "VersionRecord":
        return cls.from_document(canonical.parse(data, expected_format=RECORD_FORMAT))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "VersionRecord":
        """From a parsed JSON object (a commit carries it inline).

        Raises:
            DocumentInvalid, UnsupportedFormat, LimitExceeded.
        """
        canonical.check_header(document, expected_format=RECORD_FORMAT)
        row = parse_object(document, _RECORD_FIELDS, "version record")
        if row["proof"] not in ("full", "incremental", "unproven"):
            raise DocumentInvalid(f"unknown proof: {row['proof']!r:.80}")
        if not isinstance(row["nonce"], str) or not 16 <= len(row["nonce"]) <= 64:
            raise DocumentInvalid("a version record's nonce is a string of 16 to 64 characters")
        if not isinstance(row["metadata"], dict):
            raise DocumentInvalid("a version record's metadata is an object")
        return cls(
            policy=check_name(row["policy"], "policy"),
            layout=parse_digest(row["layout"], "layout digest"),
            parent=None if row["parent"] is None else parse_digest(row["parent"], "parent"),
            fingerprint=Fingerprint.parse(row["fingerprint"]),
            proof=row["proof"],
            nonce=row["nonce"],
            metadata=row["metadata"],
        )


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as whoever reads the record will find it: a copy of its own.

    Raises:
        DocumentInvalid: canonical JSON can't hold it, or couldn't read it back.
        LimitExceeded: more than METADATA_BYTES_MAX bytes, or too deeply nested for a record.
    """
    size = len(canonical.serialize(metadata))
    if size > METADATA_BYTES_MAX:
        raise LimitExceeded(f"metadata of {size} bytes; at most {METADATA_BYTES_MAX}")
    # What is written must be readable, as deep in a record as it is: and a float of 1e17 is
    # written as an integer beyond 2^53-1.
    held = canonical.read(canonical.serialize({"metadata": metadata}))
    assert isinstance(held, dict)
    return dict(held["metadata"])
