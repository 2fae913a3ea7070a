"""The registry client over a scripted transport: errors, retries, commits of unknown outcome."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from plait.canonical import digest_of
from plait.errors import (
    ChunkMissing,
    CommitUnknown,
    DigestMismatch,
    GenerationMoved,
    HeadMoved,
    NotFound,
    PlaitError,
    RegistryUnavailable,
    RequestRejected,
    ServiceError,
    SizeMismatch,
    UsageError,
)
from plait.fingerprint import ZERO
from plait.layout import Layout
from plait.manifest import Manifest, Statistics
from plait.version_record import VersionRecord
from plait.wire import MoveRequest, problem_of
from plait_client import transport
from plait_client.registry import RegistryClient, etag_of
from plait_client.upload import commit_version

Answer = httpx.Response | Exception
LAYOUT = Layout.of([]).digest
CONFIG = {
    "version": "1",
    "epoch": "e",
    "formats": [],
    "chunk_bytes_max": 1,
    "document_bytes_max": 1,
    "wait_seconds_max": 1.0,
}


class Script:
    """Answers in order, and what was asked."""

    def __init__(self, *answers: Answer) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def calls(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.asked]


def client_of(script: Script) -> RegistryClient:
    return RegistryClient("http://registry", transport=httpx.MockTransport(script))


def ok(document: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=document)


def refusal(error: PlaitError, **headers: str) -> httpx.Response:
    problem = problem_of(error)
    return httpx.Response(problem.status, content=problem.model_dump_json(), headers=headers)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps in these tests; how long they would have is written down."""
    slept: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", slept.append)
    return slept


def test_a_lost_connection_is_tried_again_and_then_said(pauses: list[float]) -> None:
    script = Script(httpx.ConnectError("refused"), httpx.ReadTimeout(""), ok(CONFIG))
    assert client_of(script).config().epoch == "e"
    assert len(pauses) == 2
    script = Script(*[httpx.RemoteProtocolError("cut off")] * 4)
    with pytest.raises(RegistryUnavailable, match="cut off"):
        client_of(script).config()
    assert len(script.asked) == 4


def test_pauses_grow_and_never_undercut_retry_after(pauses: list[float]) -> None:
    busy = refusal(RegistryUnavailable("busy"))
    script = Script(
        busy, busy, refusal(RegistryUnavailable("busy"), **{"Retry-After": "7"}), ok(CONFIG)
    )
    client_of(script).config()
    assert pauses[0] <= 0.25
    assert pauses[0] < pauses[1] <= 0.5
    assert pauses[2] == 7


@pytest.mark.parametrize("asked", ["\u00b2", "9" * 5000, "soon"])
def test_a_retry_after_that_is_no_number_of_seconds_is_ignored(
    pauses: list[float], asked: str
) -> None:
    later = refusal(RegistryUnavailable("busy"))
    later.headers = httpx.Headers({b"Retry-After": asked.encode("latin-1")})
    client_of(Script(later, ok(CONFIG))).config()
    assert pauses[0] <= 0.25


@pytest.mark.parametrize("error", [NotFound("x"), ChunkMissing("x", missing=["d"]), HeadMoved("x")])
def test_a_refusal_is_not_tried_again_and_keeps_its_class(error: PlaitError) -> None:
    script = Script(refusal(error))
    with pytest.raises(type(error)) as caught:
        client_of(script).config()
    assert len(script.asked) == 1
    assert error.details.items() <= caught.value.details.items()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (502, RegistryUnavailable),
        (429, RegistryUnavailable),
        (500, ServiceError),
        (404, RequestRejected),
    ],
)
def test_a_page_that_is_no_problem_document_is_judged_by_its_status(
    status: int, expected: type[PlaitError]
) -> None:
    page = httpx.Response(status, html="<h1>proxy</h1>")
    with pytest.raises(expected, match=str(status)):
        client_of(Script(*[page] * 4)).config()


@pytest.mark.parametrize("body", ["<html>", "[]", '{"version": 3}'])
def test_an_answer_that_is_no_document_is_said(body: str) -> None:
    with pytest.raises(ServiceError, match="ConfigDocument"):
        client_of(Script(httpx.Response(200, text=body))).config()


def test_a_redirect_is_not_followed_with_the_token() -> None:
    script = Script(httpx.Response(302, headers={"Location": "http://elsewhere/"}))
    with pytest.raises(ServiceError, match="redirects"):
        client_of(script).config()
    assert len(script.asked) == 1


@pytest.mark.parametrize("url", ["", "registry:80", "ftp://x", "http://", "http://a:b"])
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError):
        RegistryClient(url)


def test_the_token_travels_as_a_bearer() -> None:
    script = Script(ok(CONFIG))
    RegistryClient("http://r", token="t", transport=httpx.MockTransport(script)).config()
    assert script.asked[0].headers["Authorization"] == "Bearer t"


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "secrét", "sec\0ret"])
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(UsageError, match="PLAIT_TOKEN") as caught:
        RegistryClient("http://r", token=token)
    assert "sec" not in str(caught.value)


def test_a_request_that_no_registry_would_take_is_wrong_usage() -> None:
    client = client_of(Script())
    with pytest.raises(UsageError, match="name: "):
        client.create_channel("p", "x y", to="1")
    with pytest.raises(UsageError, match="reason: "):
        MoveRequest.of(
            to="1", expected_generation=1, kind="rollback", move_id="0" * 16, reason="x" * 10**5
        )


def test_waiting_is_rounded_up_to_full_seconds() -> None:
    script = Script(httpx.Response(304))
    client_of(script).wait_channel("p", "main", '"e.6"', 0.2)
    assert script.asked[0].headers["Prefer"] == "wait=1"


def test_downloads_are_proven_by_digest_and_size() -> None:
    digest = digest_of(b"right")
    assert client_of(Script(httpx.Response(200, content=b"right"))).chunk(digest, 5) == b"right"
    with pytest.raises(DigestMismatch):
        client_of(Script(httpx.Response(200, content=b"wrong"))).chunk(digest, 5)
    with pytest.raises(SizeMismatch):
        client_of(Script(httpx.Response(200, content=b"righ"))).chunk(digest, 5)
    with pytest.raises(DigestMismatch):
        client_of(Script(httpx.Response(200, content=b"{}"))).document(digest)


def test_creating_is_not_repeated_after_a_lost_answer() -> None:
    script = Script(httpx.ReadError("cut"))
    with pytest.raises(RegistryUnavailable):
        client_of(script).create_policy("p")
    assert len(script.asked) == 1


CHANNEL = {
    "policy": "p", "channel": "main", "epoch": "e", "generation": 7, "seq": 1,
    "version_digest": LAYOUT, "layout_digest": LAYOUT, "fingerprint": "0" * 32,
    "kind": "commit", "reason": "", "actor": "", "moved_at": "2026-01-01T00:00:00Z",
}  # fmt: skip


def test_waiting_says_how_long_and_what_is_known() -> None:
    script = Script(httpx.Response(304), ok(CHANNEL))
    client = client_of(script)
    assert client.wait_channel("p", "main", '"e.6"', 20) is None
    moved = client.wait_channel("p", "main", None, 0)
    assert moved is not None
    assert etag_of(moved) == '"e.7"'
    assert script.asked[0].headers["If-None-Match"] == '"e.6"'
    assert script.asked[0].headers["Prefer"] == "wait=20"
    assert script.asked[0].extensions["timeout"]["read"] > 20
    assert "If-None-Match" not in script.asked[1].headers


RECORD = VersionRecord("p", LAYOUT, None, ZERO, "full", "0" * 32)
MANIFEST = Manifest(
    kind="anchor", layout=LAYOUT, cut=None, base=None, target=ZERO, chunks=(),
    statistics=Statistics(0, 0, 0, 0, 0),
)  # fmt: skip
VERSION = {
    "policy": "p", "seq": 1, "parent": None, "parent_digest": None, "kind": "anchor",
    "external": False, "channel": "main", "generation": 1, "fingerprint": "0" * 32,
    "proof": "full", "layout_digest": LAYOUT, "version_digest": RECORD.digest,
    "manifest_digest": MANIFEST.digest, "cut_digest": None, "changed_elements": 0,
    "changed_bytes": 0, "total_elements": 0, "dense_bytes": 0, "payload_bytes": 0,
    "metadata": {}, "actor": "", "committed_at": "2026-01-01T00:00:00Z",
}  # fmt: skip
COMMIT, ASK = "POST /v1/policies/p/commits", f"GET /v1/policies/p/commits/{RECORD.digest}"


def commit(script: Script) -> int:
    return commit_version(
        client_of(script), policy="p", channel="main", record=RECORD, manifest=MANIFEST,
        expected_head=None, expected_generation=0,
    ).seq  # fmt: skip


@pytest.mark.parametrize(
    "lost", [httpx.ReadError("cut"), httpx.Response(500), refusal(RegistryUnavailable("busy"))]
)
def test_a_commit_whose_answer_was_lost_is_asked_for(lost: Answer) -> None:
    script = Script(lost, ok(VERSION))
    assert commit(script) == 1
    assert script.calls == [COMMIT, ASK]


def test_a_commit_that_never_arrived_is_sent_again_unchanged() -> None:
    script = Script(httpx.ReadError("cut"), refusal(NotFound("no")), ok(VERSION, 201))
    assert commit(script) == 1
    assert script.calls == [COMMIT, ASK, COMMIT]
    assert script.asked[0].content == script.asked[2].content


@pytest.mark.parametrize("refused", [httpx.ConnectError("refused"), httpx.ConnectTimeout("")])
def test_a_commit_that_never_left_is_tried_again_and_is_no_mystery(refused: Exception) -> None:
    script = Script(refused, ok(VERSION, 201))
    assert commit(script) == 1
    assert script.calls == [COMMIT, COMMIT]
    script = Script(*[refused] * 9)
    with pytest.raises(RegistryUnavailable) as caught:
        commit(script)
    assert caught.value.exit_code == 4
    assert set(script.calls) == {COMMIT}


def test_a_commit_that_may_have_arrived_stays_unknown_though_the_registry_is_gone() -> None:
    script = Script(httpx.ReadError("cut"), *[httpx.ConnectError("gone")] * 9)
    with pytest.raises(CommitUnknown):
        commit(script)


def test_a_commit_that_stays_unknown_says_so() -> None:
    script = Script(*[httpx.ReadError("gone")] * 9)
    with pytest.raises(CommitUnknown) as caught:
        commit(script)
    assert caught.value.exit_code == 4
    assert caught.value.details["version_digest"] == RECORD.digest


def test_only_a_moved_generation_is_followed() -> None:
    script = Script(refusal(GenerationMoved("7")), ok(CHANNEL), ok(VERSION, 201))
    assert commit(script) == 1
    again = json.loads(script.asked[2].content)
    assert again["expected_generation"] == 7
    assert again["expected_head"] is None
    script = Script(refusal(HeadMoved("elsewhere", generation=9)))
    with pytest.raises(HeadMoved):
        commit(script)
    assert len(script.asked) == 1


def test_names_can_not_leave_their_place_in_the_address() -> None:
    ask: list[Callable[[RegistryClient], object]] = [
        lambda c: c.policy("../x?y#z"),
        lambda c: c.version("p", "a/b"),
        lambda c: c.channel("p", "%2e"),
    ]
    script = Script(*[refusal(NotFound("no"))] * 3)
    for call in ask:
        with pytest.raises(NotFound):
            call(client_of(script))
    assert [request.url.raw_path for request in script.asked] == [
        b"/v1/policies/..%2Fx%3Fy%23z",
        b"/v1/policies/p/versions/a%2Fb",
        b"/v1/policies/p/channels/%252e",
    ]
