"""The fleet: replicas' reports, judged against the channel that they follow."""

from datetime import datetime

from plait.lineage import Lineage, State
from plait.wire import FleetDocument, ReplicaDocument, ReplicaReport
from plait_server.catalog import Catalog, ReplicaRow
from plait_server.clock import now, wire_time


class Fleet:
    """Takes reports and answers with how far behind each replica is. Blocks."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def report(self, policy: str, replica: str, report: ReplicaReport) -> ReplicaDocument:
        row = self._catalog.report(policy, replica, report)
        return judge(row, self._catalog.lineage(policy), now())

    def replicas(self, policy: str) -> FleetDocument:
        lineage = self._catalog.lineage(policy)
        rows = self._catalog.replicas(policy)
        return FleetDocument(replicas=[judge(row, lineage, now()) for row in rows])


def judge(row: ReplicaRow, lineage: Lineage, at: int) -> ReplicaDocument:
    """A report in the light of its channel, at a time in microseconds since 1970."""
    sent, channel = row.report, row.channel
    held = None
    if sent.layout_digest is not None and sent.fingerprint is not None:
        held = State(sent.layout_digest, sent.fingerprint)
    drifted = sent.seq is not None and held != row.recorded
    head = None if channel is None else channel.seq
    lag_versions = None
    if head is not None and held is not None and not drifted:
        lag_versions = _versions_behind(lineage, head, held)
    lag_seconds = 0.0
    if channel is not None and held != State(channel.layout_digest, channel.fingerprint):
        left_at = row.left_at
        if left_at is None:
            left_at = round(datetime.fromisoformat(channel.moved_at).timestamp() * 1e6)
        lag_seconds = max(at - left_at, 0) / 1e6
    return ReplicaDocument(
        replica=row.replica,
        report=sent,
        head_seq=head,
        generation=0 if channel is None else channel.generation,
        lag_versions=lag_versions,
        lag_seconds=lag_seconds,
        drifted=drifted,
        lost=at - row.last_seen_at > sent.ttl_seconds * 1e6,
        last_seen_at=wire_time(row.last_seen_at),
    )


def _versions_behind(lineage: Lineage, head: int, held: State) -> int | None:
    """Versions from the head back to the newest ancestor that has these weights."""
    if held not in lineage.versions or head not in lineage.states:
        return None
    oldest = lineage.versions[held][0]
    for distance, version in enumerate(lineage.chain(head)):
        if lineage.states[version] == held:
            return distance
        if version < oldest:  # a parent's number is smaller than its child's
            return None
    return None
