"""Every error that plait raises on purpose, as one tree.

    PlaitError
    ├── FormatError              the bytes are not what the format allows
    │   ├── DocumentInvalid      a canonical document breaks its own rules
    │   ├── UnsupportedFormat    a format or a required feature this release doesn't know
    │   ├── LayoutInvalid        names, dtypes or shapes that no layout can have
    │   ├── CheckpointInvalid    a folder of safetensors files that isn't one checkpoint
    │   ├── ChunkInvalid         a chunk file or a frame in it
    │   └── LimitExceeded        within the format, beyond what limits.py allows
    ├── CorruptionError          bytes are not the ones that were named
    │   ├── DigestMismatch
    │   ├── SizeMismatch
    │   └── FingerprintMismatch
    ├── LineageError             a step that the lineage doesn't allow
    │   ├── BaseMismatch         a delta was about to meet another base
    │   ├── UnknownBase          weights that no version of the policy has
    │   ├── LayoutChanged        other names, dtypes or shapes: needs a new anchor
    │   └── NoPlan               no chain of stored manifests leads there
    ├── NotFound                 no such policy, version, channel, document or chunk
    ├── AlreadyExists            a policy or channel of that name
    ├── ConflictError            somebody else was first
    │   ├── HeadMoved            carries the head and why it moved
    │   ├── GenerationMoved      only the counter moved
    │   └── CommitUnknown        the answer was lost: ask by version digest
    ├── StoreError               the store can't do what was asked
    │   ├── ObjectMissing        no object under that key
    │   ├── ChunkMissing         a commit names chunks that were never uploaded
    │   ├── StoreUnavailable     throttled, cut off or away: may pass
    │   └── NoSpace              disk, quota or file size limit
    ├── ServiceError             the registry failed
    │   ├── RegistryUnavailable  no answer, or not now: may pass
    │   ├── Unauthenticated      no token, or not the registry's
    │   └── RequestRejected      a request that it can't take
    ├── EngineError              the engine, or the map into it, failed
    │   ├── EngineUnavailable    no answer, or not now: may pass
    │   ├── EngineRefused        the engine's side said no and wrote nothing
    │   ├── MapUnproven          canonical words can't be mapped to its parameters
    │   └── ReplicaUnproven      the replica's weights are not proven: not to be served
    ├── PublishError             the trainer's weights can't be published as they stand
    │   ├── PeerLost             another process of a sharded trainer is gone
    │   └── PublisherClosed      after `close`
    ├── UsageError               the caller's words are off
    └── NotInstalledError        names the extra to install

`code` is stable and seen from outside; `exit_code` is the command line's; `retryable` says whether
the same call may simply be made again.
"""

from typing import Any, ClassVar

type_registry: dict[str, type["PlaitError"]] = {}


class PlaitError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: names the thing, the value and what was expected.
        remedy: what the reader can do about it, if anything.
        details: JSON-able facts, carried through HTTP unchanged.
    """

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_registry[cls.code] = cls

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (pools, stagers); keyword arguments would be lost.
        return (_rebuild, (type(self), self.message, self.remedy, self.details))


def _rebuild(
    cls: type[PlaitError], message: str, remedy: str, details: dict[str, Any]
) -> PlaitError:
    return cls(message, remedy=remedy, **details)


class FormatError(PlaitError):
    code = "format_invalid"
    http_status = 422


class DocumentInvalid(FormatError):
    code = "document_invalid"


class UnsupportedFormat(FormatError):
    code = "unsupported_format"


class LayoutInvalid(FormatError):
    code = "layout_invalid"


class CheckpointInvalid(FormatError):
    code = "checkpoint_invalid"


class ChunkInvalid(FormatError):
    code = "chunk_invalid"


class LimitExceeded(FormatError):
    code = "limit_exceeded"
    http_status = 413


class CorruptionError(PlaitError):
    code = "corrupt"
    exit_code = 3
    http_status = 422


class DigestMismatch(CorruptionError):
    code = "digest_mismatch"


class SizeMismatch(CorruptionError):
    code = "size_mismatch"


class FingerprintMismatch(CorruptionError):
    code = "fingerprint_mismatch"
    http_status = 409


class LineageError(PlaitError):
    code = "lineage"
    exit_code = 3
    http_status = 409


class BaseMismatch(LineageError):
    code = "base_mismatch"


class UnknownBase(LineageError):
    code = "unknown_base"


class LayoutChanged(LineageError):
    code = "layout_changed"


class NoPlan(LineageError):
    code = "no_plan"


class NotFound(PlaitError, LookupError):
    code = "not_found"
    http_status = 404


class AlreadyExists(PlaitError):
    code = "exists"
    http_status = 409


class ConflictError(PlaitError):
    code = "conflict"
    exit_code = 3
    http_status = 409


class HeadMoved(ConflictError):
    code = "head_moved"


class GenerationMoved(ConflictError):
    code = "generation_moved"


class CommitUnknown(ConflictError):
    code = "commit_unknown"
    exit_code = 4
    http_status = 503


class StoreError(PlaitError):
    code = "store_failed"


class ObjectMissing(StoreError, LookupError):
    code = "object_missing"
    http_status = 404


class ChunkMissing(StoreError):
    code = "chunk_missing"
    http_status = 422


class StoreUnavailable(StoreError):
    code = "store_unavailable"
    exit_code = 4
    retryable = True
    http_status = 503


class NoSpace(StoreError):
    code = "no_space"
    http_status = 507


class ServiceError(PlaitError):
    code = "service_failed"


class RegistryUnavailable(ServiceError):
    code = "registry_unavailable"
    exit_code = 4
    retryable = True
    http_status = 503


class Unauthenticated(ServiceError):
    code = "unauthenticated"
    http_status = 401


class RequestRejected(ServiceError):
    code = "request_rejected"
    http_status = 400


class EngineError(PlaitError):
    code = "engine_failed"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"
    exit_code = 4
    retryable = True


class EngineRefused(EngineError):
    code = "engine_refused"
    exit_code = 3


class MapUnproven(EngineError):
    code = "map_unproven"
    exit_code = 3


class ReplicaUnproven(EngineError):
    code = "replica_unproven"
    exit_code = 3


class PublishError(PlaitError):
    code = "publish_failed"


class PeerLost(PublishError):
    code = "peer_lost"


class PublisherClosed(PublishError):
    code = "publisher_closed"


class UsageError(PlaitError):
    code = "usage"
    exit_code = 2
    http_status = 400


class NotInstalledError(PlaitError):
    code = "not_installed"
    exit_code = 2
