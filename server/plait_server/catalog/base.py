"""The port: what the registry asks of its catalog, and nothing more.

Every method is one transaction, may be called from any thread, and blocks. Errors of every adapter:
RegistryUnavailable (locked or unreachable: ask again), NoSpace, NotFound for an unknown policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.lineage import Lineage, Ref, State
from plait.manifest import Manifest
from plait.version_record import VersionRecord
from plait.wire import (
    ChannelDocument,
    ChannelEvent,
    EventPage,
    MoveRequest,
    PolicyDocument,
    ReplicaReport,
    VersionDocument,
)


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A canonical document and the format that it was parsed as."""

    digest: str
    format: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that was read whole and matched its digest, and the key it lies under.

    Attributes:
        damaged: it was read again later, and didn't.
    """

    digest: str
    size: int
    key: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A commit whose documents have passed every check that needs no lock.

    Attributes:
        payload_bytes: what a follower at the base must fetch: chunks, manifest and cut.
    """

    policy: str
    channel: str
    expected_head: str | None
    expected_generation: int
    record: VersionRecord
    manifest: Manifest
    payload_bytes: int
    actor: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A version by REF, and the channel if the REF named one itself, read together."""

    version: VersionDocument
    channel: ChannelDocument | None


@dataclass(frozen=True, slots=True)
class ManifestChunks:
    """Where a manifest's objects lie, in the manifest's order."""

    cut_digest: str | None
    chunks: list[StoredChunk]
    side_files: list[StoredChunk]


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica's last report, and the two facts about its channel that judge it.

    Attributes:
        last_seen_at: microseconds since 1970.
        recorded: the state recorded for the seq it reports; None: no such version.
        channel: None if there is no such channel.
        left_at: when the channel last moved away from the reported state (microseconds);
            None if it never pointed there, or points there now.
    """

    replica: str
    report: ReplicaReport
    last_seen_at: int
    recorded: State | None
    channel: ChannelDocument | None
    left_at: int | None


class Catalog(ABC):
    """Policies, versions, channels and where objects lie.

    Attributes:
        epoch: random, made with the database.
    """

    epoch: str

    @abstractmethod
    def create_policy(self, name: str) -> PolicyDocument:
        """Raises AlreadyExists."""

    @abstractmethod
    def policies(self) -> list[PolicyDocument]:
        """All, by name."""

    @abstractmethod
    def policy(self, name: str) -> PolicyDocument: ...

    @abstractmethod
    def put_document(self, document: StoredDocument) -> bool:
        """Whether it is new."""

    @abstractmethod
    def document(self, digest: str) -> StoredDocument:
        """Raises NotFound."""

    @abstractmethod
    def chunks(self, digests: Collection[str]) -> dict[str, StoredChunk]:
        """Those of the digests that are known, by digest."""

    @abstractmethod
    def record_chunk(self, chunk: StoredChunk, *, instead_of: StoredChunk | None) -> StoredChunk:
        """The chunk as it is recorded now: this one, or the one of whoever was first.

        Args:
            instead_of: a recorded chunk whose object is damaged; manifests that name it will find
                the new object.
        """

    @abstractmethod
    def mark_chunk(self, chunk: StoredChunk, *, damaged: bool) -> None:
        """Remembers how the object was found; nothing if the chunk has another one by now."""

    @abstractmethod
    def resolve(self, policy: str, ref: Ref) -> Resolved:
        """Raises NotFound."""

    @abstractmethod
    def committed(self, policy: str, version_digest: str) -> VersionDocument | None: ...

    @abstractmethod
    def versions(self, policy: str, limit: int, before: int | None) -> list[VersionDocument]:
        """Newest first, with a seq below `before`."""

    @abstractmethod
    def versions_of_state(self, policy: str, state: State, limit: int) -> list[VersionDocument]:
        """Newest first."""

    @abstractmethod
    def commit(self, draft: Draft) -> tuple[VersionDocument, bool]:
        """The version, and whether it had been committed before. All or nothing.

        Raises:
            HeadMoved, GenerationMoved: with head, generation and event in `details`.
            ChunkMissing: a chunk went away meanwhile.
            UnknownBase: the record's parent is no version of the policy.
            AlreadyExists: this version was committed to another channel.
        """

    @abstractmethod
    def channels(self, policy: str) -> list[ChannelDocument]:
        """All, by name."""

    @abstractmethod
    def channel(self, policy: str, name: str) -> ChannelDocument:
        """Raises NotFound."""

    @abstractmethod
    def history(
        self, policy: str, channel: str, limit: int, before: int | None
    ) -> list[ChannelEvent]:
        """Newest first, with a generation below `before`. Raises NotFound."""

    @abstractmethod
    def create_channel(self, policy: str, name: str, to: Ref, actor: str) -> ChannelDocument:
        """Raises AlreadyExists, NotFound."""

    @abstractmethod
    def move_channel(
        self, policy: str, name: str, to: Ref, move: MoveRequest
    ) -> tuple[ChannelDocument, bool]:
        """The channel as this move left it, and whether it had been moved before.

        Raises:
            GenerationMoved: with head, generation and event in `details`.
            AlreadyExists: `move_id` was another move's.
        """

    @abstractmethod
    def lineage(self, policy: str) -> Lineage:
        """The whole graph, cached by graph revision; at least as new as any earlier answer."""

    @abstractmethod
    def manifest_chunks(self, manifests: Collection[str]) -> Mapping[str, ManifestChunks]: ...

    @abstractmethod
    def events(self, after: int, policy: str | None, limit: int) -> EventPage:
        """Oldest first; `revision` is the last one that was looked at."""

    @abstractmethod
    def revision(self) -> int:
        """Of the newest event."""

    @abstractmethod
    def report(self, policy: str, replica: str, report: ReplicaReport) -> ReplicaRow: ...

    @abstractmethod
    def replicas(self, policy: str) -> list[ReplicaRow]:
        """All, by name."""

    @abstractmethod
    def check(self) -> None:
        """Raises RegistryUnavailable if the database can't be asked."""

    @abstractmethod
    def close(self) -> None: ...
