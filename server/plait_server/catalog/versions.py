"""Versions in SQL: from rows to documents."""

import json
from functools import cache
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, Row, Select, literal, select

from plait.lineage import ChannelRef, DigestRef, Ref, SeqRef, State
from plait.wire import VersionDocument
from plait_server.catalog.refusals import no_channel, no_version
from plait_server.catalog.tables import channels, manifests, policies, states, versions
from plait_server.clock import wire_time

_parents: Final = versions.alias("parents")


@cache
def version_rows() -> Select[Any]:
    """Versions with all that their documents show; `id` is the row's number."""
    return (
        select(
            versions,
            policies.c.name.label("policy"),
            _parents.c.seq.label("parent_seq"),
            _parents.c.digest.label("parent_digest"),
            states.c.layout_digest,
            states.c.fingerprint,
            manifests.c.kind,
            manifests.c.external,
            manifests.c.cut_digest,
            manifests.c.changed_elements,
            manifests.c.changed_bytes,
            manifests.c.total_elements,
            manifests.c.dense_bytes,
            manifests.c.payload_bytes,
        )
        .join(policies, policies.c.id == versions.c.policy_id)
        .join(states, states.c.id == versions.c.state_id)
        .join(manifests, manifests.c.digest == versions.c.manifest_digest)
        .outerjoin(_parents, _parents.c.id == versions.c.parent_id)
    )


def version_document(row: Row[Any]) -> VersionDocument:
    return VersionDocument(
        policy=row.policy,
        seq=row.seq,
        parent=row.parent_seq,
        parent_digest=row.parent_digest,
        kind=row.kind,
        external=bool(row.external),
        channel=row.channel,
        generation=row.generation,
        fingerprint=row.fingerprint,
        proof=row.proof,
        layout_digest=row.layout_digest,
        version_digest=row.digest,
        manifest_digest=row.manifest_digest,
        cut_digest=row.cut_digest,
        changed_elements=row.changed_elements,
        changed_bytes=row.changed_bytes,
        total_elements=row.total_elements,
        dense_bytes=row.dense_bytes,
        payload_bytes=row.payload_bytes,
        metadata=json.loads(row.training),
        actor=row.actor,
        committed_at=wire_time(row.committed_at),
    )


def by_id(connection: Connection, version_id: int) -> VersionDocument:
    return version_document(
        connection.execute(version_rows().where(versions.c.id == version_id)).one()
    )


def by_digest(connection: Connection, owner: int, digest: str) -> VersionDocument | None:
    query = version_rows().where(versions.c.policy_id == owner, versions.c.digest == digest)
    row = connection.execute(query).one_or_none()
    return None if row is None else version_document(row)


def page(
    connection: Connection, owner: int, limit: int, before: int | None
) -> list[VersionDocument]:
    query = version_rows().where(versions.c.policy_id == owner)
    if before is not None:
        query = query.where(versions.c.seq < before)
    rows = connection.execute(query.order_by(versions.c.seq.desc()).limit(limit))
    return [version_document(row) for row in rows]


def of_state(connection: Connection, owner: int, state: State, limit: int) -> list[VersionDocument]:
    query = version_rows().where(
        states.c.policy_id == owner,
        states.c.layout_digest == state.layout,
        states.c.fingerprint == state.fingerprint,
    )
    rows = connection.execute(query.order_by(versions.c.seq.desc()).limit(limit))
    return [version_document(row) for row in rows]


def id_of(connection: Connection, owner: int, ref: Ref) -> int:
    """Row number of the version that a REF names.

    Raises:
        NotFound: no such version, or no such channel.
    """
    found: int | None
    if isinstance(ref, ChannelRef):
        query = select(channels.c.version_id).where(
            channels.c.policy_id == owner, channels.c.name == ref.channel
        )
        found = connection.scalar(query)
        if found is None:
            raise no_channel(connection, owner, ref.channel)
        if ref.back:
            found = _ancestor(connection, found, ref.back)
    else:
        condition = versions.c.seq == ref.seq if isinstance(ref, SeqRef) else _digest(ref)
        query = select(versions.c.id).where(versions.c.policy_id == owner, condition)
        found = connection.scalar(query)
    if found is None:
        raise no_version(connection, owner, str(ref))
    return found


def _digest(ref: DigestRef) -> Any:
    return versions.c.digest == ref.digest


def _ancestor(connection: Connection, version_id: int, steps: int) -> int | None:
    """The version `steps` parents back; None if the line begins later."""
    chain = (
        select(versions.c.id, versions.c.parent_id, literal(0, BigInteger).label("distance"))
        .where(versions.c.id == version_id)
        .cte("chain", recursive=True)
    )
    chain = chain.union_all(
        select(versions.c.id, versions.c.parent_id, chain.c.distance + 1)
        .join(chain, versions.c.id == chain.c.parent_id)
        .where(chain.c.distance < steps)
    )
    return connection.scalar(select(chain.c.id).where(chain.c.distance == steps))
