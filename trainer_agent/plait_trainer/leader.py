"""Rank 0's side of a publish: one commit of what all processes have uploaded."""

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from plait.errors import (
    AlreadyExists,
    CommitUnknown,
    GenerationMoved,
    HeadMoved,
    NotFound,
    PlaitError,
    RegistryUnavailable,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait.manifest import ChunkEntry, Manifest, Statistics
from plait.version_record import Proof, VersionRecord
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, put_layout
from plait_trainer.deltas import statistics_of
from plait_trainer.group import Outcome, refuse_failures
from plait_trainer.line import Line
from plait_trainer.patience import Patience
from plait_trainer.remedies import after_a_move
from plait_trainer.side_files import upload_side_files
from plait_trainer.standing import Standing

_PROOFS: Final[tuple[Proof, ...]] = ("full", "incremental", "unproven")  # the strongest first

logger = logging.getLogger("plait.trainer")


@dataclass(frozen=True, eq=False)
class Part:
    """What one process has uploaded of a publish.

    Attributes:
        fingerprint: of its share at the capture.
        statistics: of its own chunks.
    """

    chunks: tuple[ChunkEntry, ...]
    fingerprint: Fingerprint
    proof: Proof
    statistics: Statistics


@dataclass(frozen=True, eq=False)
class Answer:
    """What a commit has come to.

    Attributes:
        version: it is committed.
        error: why it isn't; or why nobody knows.
        in_doubt: it was sent, and may be committed: it is sent again first.
    """

    version: VersionDocument | None = None
    error: Exception | None = None
    in_doubt: bool = False


@dataclass(frozen=True, eq=False)
class _Letter:
    """A commit that is about to be sent, or was, without an answer.

    The record's nonce makes the very same commit recognisable: it is only ever sent again.
    """

    record: VersionRecord
    manifest: Manifest
    standing: Standing


@dataclass(eq=False)
class Leader:
    """Speaks with the registry for all processes. Its answers are told to the others: nothing here
    raises but `make_known` and `look_up`."""

    client: RegistryClient
    line: Line
    patience: Patience
    _letter: _Letter | None = None
    _known: set[str] = field(default_factory=set)

    def make_known(self) -> None:
        """The policy and the layout, before anything refers to them."""
        if self.line.layout.digest in self._known:
            return
        try:
            self.client.policy(self.line.policy)
        except NotFound:
            self._create_policy()
        self._known.add(put_layout(self.client, self.line.layout))

    def commit(
        self, parts: Sequence[Outcome[Part]], standing: Standing, metadata: Mapping[str, Any]
    ) -> Answer:
        """Commits all parts, or none of them."""
        try:
            refuse_failures("upload", parts)
            own = [part.get() for part in parts]
            self._letter = self.patience.get(lambda: self._write(own, standing, metadata))
        except Exception as error:  # noqa: BLE001 (it is told to all)
            return _refusal(error)
        failpoint("trainer.before_commit")
        answer = self.send()
        failpoint("trainer.after_commit")
        return answer

    def send(self) -> Answer:
        """Sends the last commit, perhaps again."""
        letter = self._last()
        try:
            version = self.patience.get(lambda: self._send(letter))
        except Exception as error:  # noqa: BLE001 (it is told to all)
            # Whatever isn't a plain refusal may be committed all the same.
            refused = isinstance(error, PlaitError)
            unanswered = isinstance(error, CommitUnknown | RegistryUnavailable)
            if isinstance(error, HeadMoved | GenerationMoved):
                error.remedy = after_a_move(error, letter.standing)
            return replace(_refusal(error), in_doubt=unanswered or not refused)
        return Answer(version=version)

    def look_up(self) -> VersionDocument | None:
        """The version that the last commit has become, if it has."""
        return self.client.find_commit(self.line.policy, self._last().record.digest)

    def _last(self) -> _Letter:
        assert self._letter is not None
        return self._letter

    def _send(self, letter: _Letter) -> VersionDocument:
        return commit_version(
            self.client,
            policy=self.line.policy,
            channel=self.line.channel,
            record=letter.record,
            manifest=letter.manifest,
            expected_head=letter.standing.head,
            expected_generation=letter.standing.generation,
            actor=self.line.actor,
        )

    def _write(
        self, parts: Sequence[Part], standing: Standing, metadata: Mapping[str, Any]
    ) -> _Letter:
        """The commit of all parts; whatever it refers to is made known."""
        line, parent = self.line, standing.parent
        begins = parent is None
        cut = line.share(begins=begins).cut.cut
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        if chunks and cut.digest not in self._known:
            self._known.add(put_cut(self.client, cut))
        target = sum((part.fingerprint for part in parts), ZERO)
        side_files = line.side_files if begins else None
        manifest = Manifest(
            kind="anchor" if begins else "delta",
            layout=line.layout.digest,
            cut=cut.digest if chunks else None,
            base=None if parent is None else Fingerprint.parse(parent.fingerprint),
            target=target,
            chunks=chunks,
            statistics=_added_up([part.statistics for part in parts], line.layout, begins),
            external=begins and line.external,
            side_files=() if side_files is None else upload_side_files(self.client, side_files),
        )
        record = VersionRecord(
            policy=line.policy,
            layout=line.layout.digest,
            parent=None if parent is None else parent.version_digest,
            fingerprint=target,
            proof="unproven" if manifest.external else _weakest(part.proof for part in parts),
            nonce=secrets.token_hex(16),
            metadata=metadata,
        )
        return _Letter(record, manifest, standing)

    def _create_policy(self) -> None:
        try:
            self.client.create_policy(self.line.policy)
        except AlreadyExists:
            logger.debug("policy %r was created meanwhile", self.line.policy)


def _refusal(error: Exception) -> Answer:
    return Answer(error=Outcome[object](error=error).told().error)


def _weakest(proofs: Iterable[Proof]) -> Proof:
    return max(proofs, key=_PROOFS.index)


def _added_up(parts: Sequence[Statistics], layout: Layout, begins: bool) -> Statistics:
    whole = statistics_of(layout, None if begins else {}, sum(p.chunk_bytes for p in parts))
    if begins:
        return whole
    return replace(
        whole,
        changed_elements=sum(part.changed_elements for part in parts),
        changed_bytes=sum(part.changed_bytes for part in parts),
    )
