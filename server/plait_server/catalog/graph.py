"""A policy's graph in SQL: read once, then only what each commit added."""

import sys
import threading

from sqlalchemy import Connection, select

from plait.lineage import Edge, Lineage, State
from plait_server.catalog.tables import edges, manifests, policies, states, versions


class LineageCache:
    """One policy's lineage as of a graph revision.

    Commits of a policy queue at its row, so revisions become visible in their order, and all that
    is newer than the cached one is all that is missing.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._revision = 0
        self._lineage = Lineage()

    def refreshed(self, connection: Connection) -> Lineage:
        with self._lock:
            query = select(policies.c.graph_revision).where(policies.c.id == self._owner)
            revision = connection.execute(query).scalar_one()
            if revision > self._revision:
                self._extend(connection, revision)
                self._revision = revision
            return self._lineage

    def _extend(self, connection: Connection, revision: int) -> None:
        parents = versions.alias("parents")
        query = (
            select(
                versions.c.seq,
                parents.c.seq.label("parent"),
                states.c.layout_digest,
                states.c.fingerprint,
            )
            .join(states, states.c.id == versions.c.state_id)
            .outerjoin(parents, parents.c.id == versions.c.parent_id)
            .where(
                versions.c.policy_id == self._owner,
                versions.c.graph_revision > self._revision,
                versions.c.graph_revision <= revision,
            )
            .order_by(versions.c.seq)
        )
        found = connection.execute(query).all()
        edges_found = self._new_edges(connection, revision)
        # Nothing is added before everything is read: a failure in between leaves no half.
        for seq, parent, layout, fingerprint in found:
            self._lineage.add_version(seq, parent, _state(layout, fingerprint))
        for edge in edges_found:
            self._lineage.add_edge(edge)

    def _new_edges(self, connection: Connection, revision: int) -> list[Edge]:
        query = (
            select(manifests)
            .join(edges, edges.c.manifest_digest == manifests.c.digest)
            .where(
                edges.c.policy_id == self._owner,
                edges.c.revision > self._revision,
                edges.c.revision <= revision,
            )
            .order_by(edges.c.revision)
        )
        return [
            Edge(
                manifest=row.digest,
                base=None if row.base is None else _state(row.layout_digest, row.base),
                target=_state(row.layout_digest, row.target),
                cost=row.payload_bytes,
                external=bool(row.external),
            )
            for row in connection.execute(query)
        ]


def _state(layout: str, fingerprint: str) -> State:
    """A hundred thousand versions name few layouts, and each fingerprint three times."""
    return State(sys.intern(layout), sys.intern(fingerprint))
