"""The commit's one transaction."""

import json
from typing import Any

from sqlalchemy import Connection, select, update

from plait.errors import UnknownBase
from plait.lineage import State
from plait.manifest import MANIFEST_FORMAT, Manifest
from plait.version_record import RECORD_FORMAT
from plait.wire import VersionDocument
from plait_server import failpoints
from plait_server.catalog import channels, events, objects
from plait_server.catalog import versions as versions_sql
from plait_server.catalog.base import Draft, StoredDocument
from plait_server.catalog.refusals import replayed
from plait_server.catalog.rows import insert_or_keep, policy_id
from plait_server.catalog.tables import (
    edges,
    manifest_chunks,
    manifests,
    policies,
    states,
    versions,
)
from plait_server.clock import now


def commit(connection: Connection, draft: Draft, epoch: str) -> tuple[VersionDocument, bool]:
    """The version, and whether it had been committed before."""
    owner = policy_id(connection, draft.policy, lock=True)
    before = versions_sql.by_digest(connection, owner, draft.record.digest)
    if before is not None:
        return replayed(before, draft.channel), True
    _require_expected(connection, owner, draft, epoch)
    seq, revision = _numbers(connection, owner)
    failpoints.reach("commit.numbered")
    _write_manifest(connection, draft)
    version_id = _write_version(connection, owner, draft, seq, revision)
    failpoints.reach("commit.written")
    channels.point(
        connection, owner, draft.channel, version_id,
        kind="commit", reason="", actor=draft.actor,
        expected_generation=draft.expected_generation,
    )  # fmt: skip
    failpoints.reach("commit.moved")
    version = versions_sql.by_id(connection, version_id)
    channel = channels.one(connection, owner, draft.channel, epoch)
    events.announce(
        connection, [_committed_news(version), channels.moved_news(draft.policy, channel)]
    )
    failpoints.reach("commit.announced")
    return version, False


def _require_expected(connection: Connection, owner: int, draft: Draft, epoch: str) -> None:
    channel = channels.find(connection, owner, draft.channel, epoch)
    head = None if channel is None else channel.version_digest
    generation = 0 if channel is None else channel.generation
    if head == draft.expected_head and generation == draft.expected_generation:
        return
    raise channels.conflict(
        connection, owner, draft.channel, channel, draft.expected_generation,
        moved=head != draft.expected_head,
    )  # fmt: skip


def _numbers(connection: Connection, owner: int) -> tuple[int, int]:
    """The version's seq, and the graph revision that it makes."""
    counted = (
        update(policies)
        .where(policies.c.id == owner)
        .values(next_seq=policies.c.next_seq + 1, graph_revision=policies.c.graph_revision + 1)
        .returning(policies.c.next_seq - 1, policies.c.graph_revision)
    )
    seq, revision = connection.execute(counted).one()
    return seq, revision


def _write_manifest(connection: Connection, draft: Draft) -> None:
    manifest = draft.manifest
    record = StoredDocument(draft.record.digest, RECORD_FORMAT, draft.record.data)
    document = StoredDocument(manifest.digest, MANIFEST_FORMAT, manifest.data)
    objects.put_documents(connection, [document, record])
    row = {
        "digest": manifest.digest,
        "kind": manifest.kind,
        "external": int(manifest.external),
        "layout_digest": manifest.layout,
        "cut_digest": manifest.cut,
        "base": None if manifest.base is None else str(manifest.base),
        "target": str(manifest.target),
        "changed_elements": manifest.statistics.changed_elements,
        "changed_bytes": manifest.statistics.changed_bytes,
        "total_elements": manifest.statistics.total_elements,
        "dense_bytes": manifest.statistics.dense_bytes,
        "payload_bytes": draft.payload_bytes,
    }
    if insert_or_keep(connection, manifests, [row]):
        _write_manifest_chunks(connection, manifest)


def _write_manifest_chunks(connection: Connection, manifest: Manifest) -> None:
    named = [("chunk", chunk.digest) for chunk in manifest.chunks]
    named += [("side_file", side_file.digest) for side_file in manifest.side_files]
    ids = objects.chunk_ids(connection, {digest for _, digest in named})
    rows: list[dict[str, Any]] = [
        {
            "manifest_digest": manifest.digest,
            "ordinal": ordinal,
            "chunk_id": ids[digest],
            "role": role,
        }
        for ordinal, (role, digest) in enumerate(named)
    ]
    if rows:
        connection.execute(manifest_chunks.insert(), rows)


def _write_version(
    connection: Connection, owner: int, draft: Draft, seq: int, revision: int
) -> int:
    record, manifest = draft.record, draft.manifest
    target = _state_id(connection, owner, State(record.layout, str(record.fingerprint)))
    base = None
    if manifest.base is not None:
        base = _state_id(connection, owner, State(manifest.layout, str(manifest.base)))
    edge = {
        "policy_id": owner,
        "manifest_digest": manifest.digest,
        "base_id": base,
        "target_id": target,
        "revision": revision,
    }
    insert_or_keep(connection, edges, [edge])
    inserted = connection.execute(
        versions.insert().values(
            policy_id=owner,
            seq=seq,
            parent_id=_parent_id(connection, owner, record.parent),
            digest=record.digest,
            manifest_digest=manifest.digest,
            state_id=target,
            proof=record.proof,
            training=json.dumps(dict(record.metadata)),
            channel=draft.channel,
            generation=draft.expected_generation + 1,
            actor=draft.actor,
            graph_revision=revision,
            committed_at=now(),
        )
    )
    assert inserted.inserted_primary_key is not None
    return int(inserted.inserted_primary_key[0])


def _parent_id(connection: Connection, owner: int, parent: str | None) -> int | None:
    if parent is None:
        return None
    query = select(versions.c.id).where(versions.c.policy_id == owner, versions.c.digest == parent)
    found = connection.scalar(query)
    if found is None:
        raise UnknownBase(f"the record's parent {parent} is no version of the policy")
    return int(found)


def _state_id(connection: Connection, owner: int, state: State) -> int:
    row = {"policy_id": owner, "layout_digest": state.layout, "fingerprint": state.fingerprint}
    insert_or_keep(connection, states, [row])
    query = select(states.c.id).where(
        states.c.policy_id == owner,
        states.c.layout_digest == state.layout,
        states.c.fingerprint == state.fingerprint,
    )
    return int(connection.execute(query).scalar_one())


def _committed_news(version: VersionDocument) -> events.News:
    shown = {"seq", "parent", "kind", "version_digest", "layout_digest", "fingerprint"}
    payload = version.model_dump(mode="json", include=shown)
    return events.News("version_committed", version.policy, version.channel, payload)
