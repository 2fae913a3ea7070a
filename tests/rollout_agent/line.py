"""A policy's line in a real registry: publishes torch states, anchors and rollbacks."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from plait.codec.frames import EncodedFrame, encode_dense
from plait.cut import Cut, plain_cut
from plait.fingerprint import Fingerprint
from plait.manifest import Manifest, Statistics
from plait.tensors import StateDictWeights
from plait.version_record import VersionRecord
from plait.wire import ChannelDocument, MoveRequest, VersionDocument
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, put_layout, upload_frames

from .states import State, changed, copy_of, encoded_delta, fine_cut, fingerprint_of, layout_of


@dataclass
class Line:
    """Publishes to one channel. `states[seq]` is what version `seq` is, bit for bit.

    Attributes:
        whole: its first version's bytes are stored; otherwise it is external.
        items: of a delta's frame, so that a small state makes several.
    """

    client: RegistryClient
    policy: str
    first: State
    whole: bool = False
    channel: str = "main"
    items: int = 400
    states: dict[int, State] = field(default_factory=dict)
    versions: list[VersionDocument] = field(default_factory=list)

    def start(self) -> Self:
        """Makes the policy, with `first` as its version 1."""
        self.client.create_policy(self.policy)
        put_layout(self.client, layout_of(self.first))
        self.commit(self._anchor(self.first), self.first)
        return self

    def branch(self, channel: str, seq: int) -> "Line":
        """Another channel that starts from one of the versions."""
        self.client.create_channel(self.policy, channel, to=str(seq))
        version = next(version for version in self.versions if version.seq == seq)
        return replace(self, channel=channel, states=self.states, versions=[version])

    @property
    def head(self) -> State:
        return self.states[self.versions[-1].seq]

    def publish(
        self, state: State | None = None, *, items: int | None = None, split: bool = False
    ) -> VersionDocument:
        """The next version: the given state, or a small change of the head.

        Args:
            split: a chunk for each frame.
        """
        after = changed(self.head, len(self.versions)) if state is None else copy_of(state)
        cut = fine_cut(layout_of(self.head), items or self.items)
        frames = encoded_delta(cut, self.head, after)
        parts = [[frame] for frame in frames] if split else [frames]
        entries = [e for part in parts for e in upload_frames(self.client, iter(part))]
        if entries:
            put_cut(self.client, cut)
        manifest = Manifest(
            kind="delta",
            layout=cut.layout_digest,
            cut=cut.digest if entries else None,
            base=fingerprint_of(self.head),
            target=fingerprint_of(after),
            chunks=tuple(entries),
            statistics=Statistics(
                changed_elements=sum(frame.count for frame in frames),
                changed_bytes=sum(f.count * cut.frames[f.number].item_bytes for f in frames),
                total_elements=layout_of(after).total_elements,
                dense_bytes=layout_of(after).dense_bytes,
                chunk_bytes=sum(entry.size for entry in entries),
            ),
        )
        return self.commit(manifest, after)

    def publish_anchor(self, state: State) -> VersionDocument:
        """The next version, whole: of another layout, say."""
        put_layout(self.client, layout_of(state))
        return self.commit(self._anchor(state, whole=True), state)

    def move(self, to: int, *, kind: str = "rollback") -> ChannelDocument:
        """Moves the channel to a version."""
        request = MoveRequest(
            to=str(to),
            expected_generation=self.client.channel(self.policy, self.channel).generation,
            kind=kind,  # type: ignore[arg-type]
            move_id=secrets.token_hex(16),
            reason="test",
        )
        return self.client.move_channel(self.policy, self.channel, request)

    def _anchor(self, state: State, *, whole: bool | None = None) -> Manifest:
        layout = layout_of(state)
        stored = self.whole if whole is None else whole
        cut: Cut | None = None
        entries = []
        if stored:
            cut = plain_cut(layout, for_anchor=True)
            put_cut(self.client, cut)
            entries = upload_frames(self.client, self._dense(cut, state))
        return Manifest(
            kind="anchor",
            layout=layout.digest,
            cut=None if cut is None else cut.digest,
            base=None,
            target=fingerprint_of(state),
            chunks=tuple(entries),
            statistics=Statistics(
                changed_elements=layout.total_elements,
                changed_bytes=layout.dense_bytes,
                total_elements=layout.total_elements,
                dense_bytes=layout.dense_bytes,
                chunk_bytes=sum(entry.size for entry in entries),
            ),
            external=not stored,
        )

    def _dense(self, cut: Cut, state: State) -> Iterator[EncodedFrame]:
        weights = StateDictWeights(layout_of(state), state)
        for number, frame in enumerate(cut.frames):
            yield encode_dense(number, frame, weights)

    def commit(self, manifest: Manifest, state: State) -> VersionDocument:
        """The next version, by a manifest whose parts are uploaded."""
        head = self._head()
        record = VersionRecord(
            policy=self.policy,
            layout=manifest.layout,
            parent=None if manifest.base is None else self._parent(manifest.base),
            fingerprint=manifest.target,
            proof="full",
            nonce=secrets.token_hex(16),
        )
        version = commit_version(
            self.client,
            policy=self.policy,
            channel=self.channel,
            record=record,
            manifest=manifest,
            expected_head=None if head is None else head.version_digest,
            expected_generation=0 if head is None else head.generation,
        )
        self.versions.append(version)
        self.states[version.seq] = copy_of(state)
        return version

    def _head(self) -> ChannelDocument | None:
        channels = self.client.channels(self.policy)
        return next((c for c in channels if c.channel == self.channel), None)

    def _parent(self, base: Fingerprint) -> str:
        version = self.versions[-1]
        assert version.fingerprint == str(base)
        return version.version_digest
