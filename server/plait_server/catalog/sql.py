"""The SQL adapter: SQLite and PostgreSQL by one set of statements."""

import threading
from collections.abc import Collection, Mapping

from sqlalchemy import select

from plait.lineage import ChannelRef, Lineage, Ref, State
from plait.wire import (
    ChannelDocument,
    ChannelEvent,
    EventPage,
    MoveRequest,
    PolicyDocument,
    ReplicaReport,
    VersionDocument,
)
from plait_server.catalog import (
    channels,
    commits,
    events,
    objects,
    policies,
    replicas,
    versions,
)
from plait_server.catalog.base import (
    Catalog,
    Draft,
    ManifestChunks,
    ReplicaRow,
    Resolved,
    StoredChunk,
    StoredDocument,
)
from plait_server.catalog.database import Database
from plait_server.catalog.graph import LineageCache
from plait_server.catalog.migrate import migrate
from plait_server.catalog.rows import policy_id


class SqlCatalog(Catalog):
    """The catalog in a database, which it migrates to this release's schema when it opens it."""

    def __init__(self, url: str) -> None:
        """Opens and migrates.

        Raises:
            UsageError: not the URL of a SQLite or PostgreSQL database.
            RegistryUnavailable: it doesn't answer.
        """
        self._database = Database(url)
        try:
            self.epoch = migrate(self._database)
        except BaseException:
            self._database.close()
            raise
        self._lineages: dict[int, LineageCache] = {}
        self._lineages_lock = threading.Lock()

    @property
    def where(self) -> str:
        """The database's URL without its password."""
        return self._database.where

    def create_policy(self, name: str) -> PolicyDocument:
        with self._database.write() as connection:
            return policies.create(connection, name)

    def policies(self) -> list[PolicyDocument]:
        with self._database.read() as connection:
            return policies.listing(connection)

    def policy(self, name: str) -> PolicyDocument:
        with self._database.read() as connection:
            return policies.one(connection, name)

    def put_document(self, document: StoredDocument) -> bool:
        with self._database.write() as connection:
            return objects.put_documents(connection, [document]) == 1

    def document(self, digest: str) -> StoredDocument:
        with self._database.read() as connection:
            return objects.document(connection, digest)

    def chunks(self, digests: Collection[str]) -> dict[str, StoredChunk]:
        with self._database.read() as connection:
            return objects.ready_chunks(connection, digests)

    def record_chunk(self, chunk: StoredChunk, *, instead_of: StoredChunk | None) -> StoredChunk:
        with self._database.write() as connection:
            return objects.record_chunk(connection, chunk, instead_of)

    def mark_chunk(self, chunk: StoredChunk, *, damaged: bool) -> None:
        with self._database.write() as connection:
            objects.mark_chunk(connection, chunk, damaged=damaged)

    def resolve(self, policy: str, ref: Ref) -> Resolved:
        with self._database.read() as connection:
            owner = policy_id(connection, policy)
            if isinstance(ref, ChannelRef) and not ref.back:
                # One statement reads both, so that generation and version belong together.
                channel = channels.one(connection, owner, ref.channel, self.epoch)
                version = versions.by_digest(connection, owner, channel.version_digest)
                assert version is not None
                return Resolved(version, channel)
            found = versions.id_of(connection, owner, ref)
            return Resolved(versions.by_id(connection, found), None)

    def committed(self, policy: str, version_digest: str) -> VersionDocument | None:
        with self._database.read() as connection:
            return versions.by_digest(connection, policy_id(connection, policy), version_digest)

    def versions(self, policy: str, limit: int, before: int | None) -> list[VersionDocument]:
        with self._database.read() as connection:
            return versions.page(connection, policy_id(connection, policy), limit, before)

    def versions_of_state(self, policy: str, state: State, limit: int) -> list[VersionDocument]:
        with self._database.read() as connection:
            return versions.of_state(connection, policy_id(connection, policy), state, limit)

    def commit(self, draft: Draft) -> tuple[VersionDocument, bool]:
        with self._database.write() as connection:
            return commits.commit(connection, draft, self.epoch)

    def channels(self, policy: str) -> list[ChannelDocument]:
        with self._database.read() as connection:
            return channels.listing(connection, policy_id(connection, policy), self.epoch)

    def channel(self, policy: str, name: str) -> ChannelDocument:
        with self._database.read() as connection:
            return channels.one(connection, policy_id(connection, policy), name, self.epoch)

    def history(
        self, policy: str, channel: str, limit: int, before: int | None
    ) -> list[ChannelEvent]:
        with self._database.read() as connection:
            owner = policy_id(connection, policy)
            return channels.history(connection, owner, channel, limit, before)

    def create_channel(self, policy: str, name: str, to: Ref, actor: str) -> ChannelDocument:
        with self._database.write() as connection:
            owner = policy_id(connection, policy, lock=True)
            return channels.create(connection, policy, owner, name, to, actor, self.epoch)

    def move_channel(
        self, policy: str, name: str, to: Ref, move: MoveRequest
    ) -> tuple[ChannelDocument, bool]:
        with self._database.write() as connection:
            owner = policy_id(connection, policy, lock=True)
            return channels.move(connection, policy, owner, name, to, move, self.epoch)

    def lineage(self, policy: str) -> Lineage:
        with self._database.read() as connection:
            owner = policy_id(connection, policy)
            with self._lineages_lock:
                cache = self._lineages.setdefault(owner, LineageCache(owner))
            return cache.refreshed(connection)

    def manifest_chunks(self, manifests: Collection[str]) -> Mapping[str, ManifestChunks]:
        with self._database.read() as connection:
            return objects.chunks_of(connection, manifests)

    def events(self, after: int, policy: str | None, limit: int) -> EventPage:
        with self._database.read() as connection:
            # The counter first. Revisions become visible in order: what is below one that was
            # read has been read as well.
            newest = events.revision(connection)
            found = events.listing(connection, after, policy, limit)
            last = found[-1].revision if found else 0
            seen = last if len(found) == limit else max(after, newest, last)
            return EventPage(epoch=self.epoch, events=found, revision=seen)

    def revision(self) -> int:
        with self._database.read() as connection:
            return events.revision(connection)

    def report(self, policy: str, replica: str, report: ReplicaReport) -> ReplicaRow:
        with self._database.write() as connection:
            owner = policy_id(connection, policy)
            replicas.report(connection, owner, replica, report)
            return replicas.one(connection, owner, replica, self.epoch)

    def replicas(self, policy: str) -> list[ReplicaRow]:
        with self._database.read() as connection:
            return replicas.listing(connection, policy_id(connection, policy), self.epoch)

    def check(self) -> None:
        with self._database.read() as connection:
            connection.execute(select(1))

    def close(self) -> None:
        self._database.close()
