"""A publisher without a codec: valid documents and chunks whose increments add up.

The registry never looks into a chunk, so its bytes may be anything; layouts, cuts, manifests and
records are real.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

import httpx

from plait.canonical import digest_of
from plait.cut import Cut, plain_cut
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec
from plait.manifest import ChunkEntry, Manifest, SideFile, Statistics
from plait.version_record import VersionRecord

LAYOUT = Layout.of(
    [
        TensorSpec("embed", "BF16", (8, 4)),
        TensorSpec("head", "F32", (4,)),
        TensorSpec("s", "U8", ()),
    ]
)
OTHER_LAYOUT = Layout.of([TensorSpec("embed", "BF16", (8, 8)), TensorSpec("new", "BF16", (2,))])


def some_fingerprint() -> Fingerprint:
    return Fingerprint(secrets.randbits(64), secrets.randbits(64))


@dataclass
class Parts:
    """A commit's documents and chunks before they are sent."""

    layout: Layout
    cut: Cut | None
    chunks: dict[str, bytes]
    manifest: Manifest
    record: VersionRecord


@dataclass
class Line:
    """One publisher: what it believes of its channel, and its HTTP client."""

    http: httpx.Client
    policy: str = "p"
    channel: str = "main"
    layout: Layout = LAYOUT
    head: str | None = None
    generation: int = 0
    parent: str | None = None
    fingerprint: Fingerprint | None = None
    actor: str = "trainer-1"
    seen: list[dict[str, Any]] = field(default_factory=list)

    def anchor(self, *, external: bool = False, **record: Any) -> Parts:
        target = record.pop("fingerprint", None) or some_fingerprint()
        cut = None if external else plain_cut(self.layout, for_anchor=True)
        side = b'{"vocab": %d}' % secrets.randbits(60)
        chunks, entries = _split(cut, target)
        side_files = ()
        if not external:
            side_files = (SideFile("config.json", digest_of(side), len(side)),)
            chunks[digest_of(side)] = side
        manifest = Manifest(
            kind="anchor", layout=self.layout.digest, cut=cut and cut.digest, base=None,
            target=target, chunks=entries, external=external, side_files=side_files,
            statistics=_statistics(self.layout, entries, self.layout.total_elements),
        )  # fmt: skip
        return Parts(self.layout, cut, chunks, manifest, self._record(manifest, record))

    def delta(self, *, empty: bool = False, size: int = 100, **record: Any) -> Parts:
        assert self.fingerprint is not None
        increment = ZERO if empty else record.pop("increment", None) or some_fingerprint()
        cut = None if empty else plain_cut(self.layout, for_anchor=False)
        chunks, entries = _split(cut, increment, size)
        manifest = Manifest(
            kind="delta", layout=self.layout.digest, cut=cut and cut.digest, base=self.fingerprint,
            target=self.fingerprint + increment, chunks=entries,
            statistics=_statistics(self.layout, entries, 0 if empty else 3),
        )  # fmt: skip
        return Parts(self.layout, cut, chunks, manifest, self._record(manifest, record))

    def send(self, parts: Parts) -> None:
        """Documents and chunks, but no commit."""
        for document in (parts.layout, parts.cut):
            if document is not None:
                url = f"/v1/documents/{document.digest}"
                answer = self.http.put(url, content=document.serialize())
                assert answer.status_code in (200, 201), answer.text
        for digest, data in parts.chunks.items():
            answer = self.http.put(f"/v1/chunks/{digest}", content=data)
            assert answer.status_code in (200, 201), answer.text

    def request(self, parts: Parts, **changes: Any) -> dict[str, Any]:
        return {
            "channel": self.channel,
            "expected_head": self.head,
            "expected_generation": self.generation,
            "record": parts.record.to_document(),
            "manifest": parts.manifest.to_document(),
            "actor": self.actor,
        } | changes

    def post(self, parts: Parts, **changes: Any) -> httpx.Response:
        """The commit alone; believes nothing."""
        # As ASCII, so that a test can send a lone surrogate.
        body = json.dumps(self.request(parts, **changes))
        url = f"/v1/policies/{self.policy}/commits"
        return self.http.post(url, content=body, headers={"content-type": "application/json"})

    def commit(self, parts: Parts, **changes: Any) -> dict[str, Any]:
        """Everything; on success this publisher stands on the new version."""
        self.send(parts)
        answer = self.post(parts, **changes)
        assert answer.status_code == 201, answer.text
        return self.stand_on(answer.json())

    def stand_on(self, version: dict[str, Any]) -> dict[str, Any]:
        self.head = self.parent = version["version_digest"]
        self.generation = version["generation"]
        self.fingerprint = Fingerprint.parse(version["fingerprint"])
        self.seen.append(version)
        return version

    def _record(self, manifest: Manifest, changes: dict[str, Any]) -> VersionRecord:
        fields: dict[str, Any] = {
            "policy": self.policy,
            "layout": self.layout.digest,
            "parent": self.parent,
            "fingerprint": manifest.target,
            "proof": "unproven" if manifest.external else "full",
            "nonce": secrets.token_hex(16),
            "metadata": {"step": 7, "lr": 1e-06},
        }
        return VersionRecord(**(fields | changes))


def new_line(http: httpx.Client, policy: str | None = None) -> Line:
    """A publisher of a new policy."""
    name = policy or f"p-{secrets.token_hex(4)}"
    assert http.post("/v1/policies", json={"name": name}).status_code == 201
    return Line(http, policy=name)


def grown_line(http: httpx.Client, deltas: int, policy: str | None = None) -> Line:
    """A publisher whose policy has an anchor and some deltas."""
    line = new_line(http, policy)
    line.commit(line.anchor())
    for _ in range(deltas):
        line.commit(line.delta())
    return line


def move(line: Line, to: str, kind: str, generation: int, **changes: Any) -> httpx.Response:
    body = {
        "to": to, "kind": kind, "expected_generation": generation,
        "move_id": secrets.token_hex(16), "reason": "eval got worse", "actor": "on-call",
    } | changes  # fmt: skip
    return line.http.post(f"/v1/policies/{line.policy}/channels/{line.channel}/moves", json=body)


def plan(line: Line, to: object, base: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
    body = {"from": base, "to": str(to)} | more
    return line.http.post(f"/v1/policies/{line.policy}/plan", json=body)


def held(version: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a replica that has this version says that it holds."""
    named = {name: version[name] for name in ("layout_digest", "fingerprint")}
    return named | more


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(json.loads(answer.text)["code"])


def _split(
    cut: Cut | None, increment: Fingerprint, size: int = 100
) -> tuple[dict[str, bytes], tuple[ChunkEntry, ...]]:
    """One chunk a frame, the first of which carries the increment."""
    chunks, entries = {}, []
    for number in range(len(cut.frames) if cut else 0):
        data = secrets.token_bytes(size + number)
        chunks[digest_of(data)] = data
        part = increment if number == 0 else ZERO
        entries.append(ChunkEntry(digest_of(data), len(data), 0, (number,), part))
    return chunks, tuple(entries)


def _statistics(layout: Layout, entries: tuple[ChunkEntry, ...], changed: int) -> Statistics:
    return Statistics(
        changed_elements=changed,
        changed_bytes=changed,
        total_elements=layout.total_elements,
        dense_bytes=layout.dense_bytes,
        chunk_bytes=sum(entry.size for entry in entries),
    )
