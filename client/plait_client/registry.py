"""The registry as Python calls: one method per endpoint, wire documents in and out.

Synchronous and safe to share between threads. Every error is plait's own. What is downloaded by
digest is checked against it before it is handed on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from plait.canonical import digest_of
from plait.cut import Cut
from plait.errors import (
    CommitUnknown,
    DigestMismatch,
    NotFound,
    PlaitError,
    RegistryUnavailable,
    ServiceError,
    SizeMismatch,
)
from plait.layout import Layout
from plait.limits import CHUNKS_PER_MANIFEST_MAX, PAGE_SIZE_MAX
from plait.manifest import Manifest
from plait.version_record import VersionRecord
from plait.wire import (
    AdoptRequest,
    ChannelDocument,
    ChannelHistory,
    ChannelList,
    ChunkDocument,
    CommitRequest,
    ConfigDocument,
    CreateChannel,
    CreatePolicy,
    EventPage,
    FleetDocument,
    HeldState,
    MissingRequest,
    MissingResponse,
    MoveRequest,
    PlanDocument,
    PlanRequest,
    PolicyDocument,
    PolicyList,
    ReplicaDocument,
    ReplicaReport,
    VersionDocument,
    VersionPage,
)
from plait.wire.base import WireRequest
from plait_client.transport import ATTEMPTS, HttpTransport, parsed

TIMEOUT_SECONDS: Final = 60.0
_WAIT_SLACK_SECONDS: Final = 15.0
_JSON: Final = {"Content-Type": "application/json"}
_BYTES: Final = {"Content-Type": "application/octet-stream"}


class RegistryClient:
    """One registry.

    Every method raises RegistryUnavailable if no answer comes, and the error of the registry's
    problem document if it refuses. Methods repeat themselves after a lost answer where that is
    safe; `commit` finds out what became of a lost one.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        transport: httpx.BaseTransport | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:
        """Opens no connection yet.

        Args:
            url: http(s) address, without `/v1`.
            token: bearer token.
            timeout: seconds that the registry may be silent.
            transport: httpx's, for tests in one process.
            attempts: how often a repeatable call is made before it counts as failed.

        Raises:
            UsageError: `url` isn't an address.
        """
        self.url = url.rstrip("/")
        self._http = HttpTransport(
            url, token=token, timeout=timeout, transport=transport, attempts=attempts
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # The registry itself ------------------------------------------------------------------------

    def config(self) -> ConfigDocument:
        return parsed(ConfigDocument, self._get("/v1/config"))

    def clock(self) -> str:
        """The registry's `Date` header (RFC 9110), to compare clocks by."""
        return str(self._get("/v1/config").headers.get("Date", ""))

    def events(self, *, after: int = 0, policy: str | None = None) -> EventPage:
        params: dict[str, str | int] = {"after": after}
        if policy is not None:
            params["policy"] = policy
        accept = {"Accept": "application/json"}
        return parsed(EventPage, self._get("/v1/events", params=params, headers=accept))

    # Policies -----------------------------------------------------------------------------------

    def create_policy(self, name: str) -> PolicyDocument:
        """Raises AlreadyExists if it does. Never repeated: a lost answer leaves that open."""
        body = _body(CreatePolicy.of(name=name))
        return parsed(PolicyDocument, self._post("/v1/policies", body, repeatable=False))

    def policies(self) -> list[PolicyDocument]:
        return parsed(PolicyList, self._get("/v1/policies")).policies

    def policy(self, name: str) -> PolicyDocument:
        return parsed(PolicyDocument, self._get(_path("policies", name)))

    # Documents ----------------------------------------------------------------------------------

    def put_document(self, data: bytes) -> str:
        """Store canonical bytes of a layout or cut; returns their digest."""
        digest = digest_of(data)
        self._http.request("PUT", _path("documents", digest), content=data, headers=_JSON)
        return digest

    def document(self, digest: str) -> bytes:
        """Canonical bytes by digest.

        Raises:
            NotFound: the registry has none of this digest.
            DigestMismatch: it sent other bytes.
        """
        return _proven(self._get(_path("documents", digest)).content, digest, "document")

    def layout(self, digest: str) -> Layout:
        return Layout.parse(self.document(digest))

    def cut(self, digest: str) -> Cut:
        return Cut.parse(self.document(digest))

    def manifest(self, digest: str) -> Manifest:
        return Manifest.parse(self.document(digest))

    def record(self, version_digest: str) -> VersionRecord:
        return VersionRecord.parse(self.document(version_digest))

    # Chunks -------------------------------------------------------------------------------------

    def missing_chunks(self, digests: Sequence[str]) -> list[str]:
        """Those that the registry doesn't hold, in the order given."""
        missing: set[str] = set()
        for start in range(0, len(digests), CHUNKS_PER_MANIFEST_MAX):
            part = MissingRequest.of(digests=list(digests[start : start + CHUNKS_PER_MANIFEST_MAX]))
            response = self._post("/v1/chunks:missing", _body(part))
            missing.update(parsed(MissingResponse, response).missing)
        return [digest for digest in digests if digest in missing]

    def put_chunk(self, digest: str, data: bytes) -> ChunkDocument:
        response = self._http.request("PUT", _path("chunks", digest), content=data, headers=_BYTES)
        return parsed(ChunkDocument, response)

    def adopt_chunk(self, digest: str, *, key: str, size: int) -> ChunkDocument:
        """Tell the registry of an object that the caller wrote into the store itself."""
        body = _body(AdoptRequest.of(key=key, size=size))
        return parsed(ChunkDocument, self._post(_path("chunks", digest) + ":adopt", body))

    def chunk(self, digest: str, size: int | None = None) -> bytes:
        """A chunk's bytes, proven by digest.

        Raises:
            NotFound, ObjectMissing: the registry doesn't hold it, or its store lost it.
            SizeMismatch, DigestMismatch: it sent other bytes.
        """
        data = self._get(_path("chunks", digest)).content
        if size is not None and len(data) != size:
            raise SizeMismatch(f"chunk {digest} came with {len(data)} bytes; expected {size}")
        return _proven(data, digest, "chunk")

    # Versions -----------------------------------------------------------------------------------

    def commit(self, policy: str, request: CommitRequest, version_digest: str) -> VersionDocument:
        """Commit a version, and know afterwards whether it is.

        A lost answer or a server error may hide a commit: the registry is asked by version digest,
        and the same request is sent again; the digest makes it replay.

        Raises:
            HeadMoved, GenerationMoved: somebody else was first.
            RegistryUnavailable: the request never reached the registry; nothing is committed.
            CommitUnknown: the registry went away before it could say; ask again by the digest.
        """
        path, body = _path("policies", policy) + "/commits", _body(request)
        try:
            response = self._post(path, body, repeatable=False)
        except (RegistryUnavailable, ServiceError) as error:
            if not _unknown(error) or error.details.get("sent") is False:
                raise
        else:
            return parsed(VersionDocument, response)
        try:
            done = self.find_commit(policy, version_digest)
            return done or parsed(VersionDocument, self._post(path, body))
        except (RegistryUnavailable, ServiceError) as error:
            if not _unknown(error):
                raise
            raise CommitUnknown(
                f"the registry went away before it said whether {version_digest} is committed",
                remedy="publish again: it asks first, and replays the commit if it happened",
                version_digest=version_digest,
            ) from error

    def find_commit(self, policy: str, version_digest: str) -> VersionDocument | None:
        """The version if it was committed, None if it wasn't."""
        path = f"{_path('policies', policy)}/commits/{_quoted(version_digest)}"
        try:
            return parsed(VersionDocument, self._get(path))
        except NotFound:
            return None

    def versions(
        self, policy: str, *, limit: int = PAGE_SIZE_MAX, before: int | None = None
    ) -> VersionPage:
        """One page, newest first."""
        params = {"limit": limit} | ({} if before is None else {"before": before})
        return parsed(
            VersionPage, self._get(_path("policies", policy) + "/versions", params=params)
        )

    def all_versions(self, policy: str) -> Iterator[VersionDocument]:
        """Every version, newest first, page by page."""
        before: int | None = None
        while True:
            page = self.versions(policy, before=before)
            yield from page.versions
            if page.before is None:
                return
            before = page.before

    def version(self, policy: str, ref: str) -> VersionDocument:
        """`ref`: a seq, a channel, `CHANNEL~k`, or a version digest."""
        return parsed(
            VersionDocument, self._get(f"{_path('policies', policy)}/versions/{_quoted(ref)}")
        )

    def versions_with(
        self, policy: str, layout_digest: str, fingerprint: str
    ) -> list[VersionDocument]:
        """Versions that have exactly these weights, newest first.

        Raises:
            UnknownBase: there is none.
        """
        path = f"{_path('policies', policy)}/states/{_quoted(layout_digest)}/{_quoted(fingerprint)}"
        return parsed(VersionPage, self._get(path)).versions

    # Channels -----------------------------------------------------------------------------------

    def channels(self, policy: str) -> list[ChannelDocument]:
        return parsed(ChannelList, self._get(_path("policies", policy) + "/channels")).channels

    def channel(self, policy: str, channel: str) -> ChannelDocument:
        return parsed(ChannelDocument, self._get(_channel(policy, channel)))

    def wait_channel(
        self, policy: str, channel: str, etag: str | None, wait: float
    ) -> ChannelDocument | None:
        """Wait until a channel is elsewhere than `etag` says.

        Args:
            etag: `etag_of` the document that the caller knows; None: answer at once.
            wait: seconds, at most, to the full second; the registry may answer sooner.

        Returns:
            The channel's document, or None: still where it was.
        """
        # Rounded up: a wait of nothing would be answered at once, and asked again at once.
        headers = {"Prefer": f"wait={max(math.ceil(wait), 0)}"}
        if etag is not None:
            headers["If-None-Match"] = etag
        response = self._get(
            _channel(policy, channel), headers=headers, read_timeout=wait + _WAIT_SLACK_SECONDS
        )
        return None if response.status_code == 304 else parsed(ChannelDocument, response)

    def create_channel(
        self, policy: str, channel: str, *, to: str, actor: str = ""
    ) -> ChannelDocument:
        body = _body(CreateChannel.of(name=channel, to=to, actor=actor))
        path = _path("policies", policy) + "/channels"
        return parsed(ChannelDocument, self._post(path, body, repeatable=False))

    def move_channel(self, policy: str, channel: str, request: MoveRequest) -> ChannelDocument:
        """Promote or roll back; `request.move_id` makes a repeat replay."""
        return parsed(
            ChannelDocument, self._post(_channel(policy, channel) + "/moves", _body(request))
        )

    def channel_history(self, policy: str, channel: str) -> ChannelHistory:
        return parsed(ChannelHistory, self._get(_channel(policy, channel) + "/history"))

    # Plans and replicas -------------------------------------------------------------------------

    def plan(
        self,
        policy: str,
        held: HeldState | None,
        to: str,
        *,
        allow_external: bool = True,
        allow_anchor: bool = True,
    ) -> PlanDocument:
        """The cheapest way from what the caller holds (None: nothing) to a REF.

        Args:
            allow_external: a plan from nothing may begin at weights that the registry doesn't
                hold, and that cost nothing because the caller has them.
            allow_anchor: it may begin at an anchor, which leads from any weights to any others but
                replaces all of them; else it is made of deltas alone.

        Raises:
            NoPlan: no chain of what is allowed leads there.
        """
        body = _body(
            PlanRequest.of(
                held=held, to=to, allow_external=allow_external, allow_anchor=allow_anchor
            )
        )
        return parsed(PlanDocument, self._post(_path("policies", policy) + "/plan", body))

    def report_replica(self, policy: str, replica: str, report: ReplicaReport) -> ReplicaDocument:
        path = f"{_path('policies', policy)}/replicas/{_quoted(replica)}"
        response = self._http.request("PUT", path, content=_body(report), headers=_JSON)
        return parsed(ReplicaDocument, response)

    def replicas(self, policy: str) -> list[ReplicaDocument]:
        return parsed(FleetDocument, self._get(_path("policies", policy) + "/replicas")).replicas

    # --------------------------------------------------------------------------------------------

    def _get(self, path: str, **content: Any) -> httpx.Response:
        return self._http.request("GET", path, **content)

    def _post(self, path: str, body: bytes, *, repeatable: bool = True) -> httpx.Response:
        return self._http.request("POST", path, repeatable=repeatable, content=body, headers=_JSON)


def etag_of(channel: ChannelDocument) -> str:
    """The ETag of a channel at this document."""
    return f'"{channel.epoch}.{channel.generation}"'


def _body(request: WireRequest) -> bytes:
    return request.model_dump_json(by_alias=True).encode()


def _quoted(part: str) -> str:
    return quote(part, safe=":~@")


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(_quoted(part) for part in parts)


def _channel(policy: str, channel: str) -> str:
    return f"{_path('policies', policy)}/channels/{_quoted(channel)}"


def _unknown(error: PlaitError) -> bool:
    """True if the request may have been carried out all the same."""
    return isinstance(error, RegistryUnavailable) or int(error.details.get("status", 0)) >= 500


def _proven(data: bytes, digest: str, noun: str) -> bytes:
    found = digest_of(data)
    if found != digest:
        raise DigestMismatch(
            f"{noun} {digest} came with other bytes ({found}, {len(data)} bytes)",
            expected=digest,
            found=found,
        )
    return data
