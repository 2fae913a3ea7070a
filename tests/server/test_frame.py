"""The outermost layer: the token before the body, bounds on bodies, and a free event loop."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait import canonical
from plait.limits import MIB
from plait.store import MemoryStore
from plait_server.app import create_app
from plait_server.budget import ByteBudget
from plait_server.catalog import SqlCatalog
from plait_server.frame import RequestFrame
from plait_server.metrics import Metrics
from plait_server.settings import Settings
from tests.server.lines import code_of, new_line


def call(app: ASGIApp, receive: Receive, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and problem that an ASGI application answers a POST with."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "scheme": "http", "http_version": "1.1", "root_path": "",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body)


async def unread() -> Message:
    raise AssertionError("the body was read")


def test_who_has_no_token_gets_no_body_read(tmp_path: Path) -> None:
    settings = Settings(token=SecretStr("s3cret"))
    database = f"sqlite:///{tmp_path}/p.db"
    app = create_app(settings, catalog=SqlCatalog(database), store=MemoryStore())
    for path in ("/v1/policies/p/commits", "/v1/policies", "/v1/chunks:missing"):
        status, problem = call(app, unread, path, content_length=str(MIB))
        assert (status, problem["code"]) == (401, "unauthenticated")
    app.state.registry.close()


def test_a_body_that_stops_arriving_is_given_up() -> None:
    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    pieces = iter([{"type": "http.request", "body": b"x", "more_body": True}])

    async def stuck() -> Message:
        for piece in pieces:
            return piece
        await asyncio.Event().wait()
        raise AssertionError

    frame = RequestFrame(reads, Metrics(), None, idle_seconds=0.05)
    status, problem = call(frame, stuck, "/v1/x", content_length="9")
    assert (status, problem["code"]) == (400, "request_rejected")
    assert "nothing of the body arrived" in problem["detail"]


def test_only_what_may_be_large_may_be_large(http: TestClient) -> None:
    filler = " " * (MIB + 1)
    for path in ("/v1/policies", "/v1/policies/p/plan", "/v1/policies/p/channels"):
        answer = http.post(path, content=filler, headers={"content-type": "application/json"})
        assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")
        pieces = (b" " * 65536 for _ in range(17))  # without Content-Length
        answer = http.post(path, content=pieces, headers={"content-type": "application/json"})
        assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")
    body = json.dumps({"digests": []}) + filler
    headers = {"content-type": "application/json"}
    assert http.post("/v1/chunks:missing", content=body, headers=headers).status_code == 200


def test_large_bodies_are_parsed_beside_the_event_loop(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop: list[bool] = []
    read = canonical.read

    def noted(raw: bytes) -> object:
        try:
            asyncio.get_running_loop()
            in_loop.append(True)
        except RuntimeError:
            in_loop.append(False)
        return read(raw)

    monkeypatch.setattr("plait.canonical.read", noted)
    line = new_line(http)
    line.commit(line.anchor())
    assert http.post("/v1/chunks:missing", json={"digests": []}).status_code == 200
    assert in_loop
    assert not any(in_loop)


def test_a_body_that_a_web_page_could_send_is_no_commit(http: TestClient) -> None:
    line = new_line(http)
    parts = line.anchor()
    line.send(parts)
    url = f"/v1/policies/{line.policy}/commits"
    body = json.dumps(line.request(parts))
    answer = http.post(url, content=body, headers={"content-type": "text/plain"})
    assert (answer.status_code, code_of(answer)) == (400, "request_rejected")
    assert line.post(parts).status_code == 201


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" * 100_000, "limit_exceeded"),
        (b'{"a": 1, "a": 2}', "document_invalid"),
        (b'{"a": NaN}', "document_invalid"),
        (b'{"a": 1', "document_invalid"),
        (b"\xff\xfe", "document_invalid"),
        (b'{"\\ud800": 1}', "request_rejected"),
        (b"[]", "request_rejected"),
        (b"", "document_invalid"),
    ],
)
def test_hostile_commits_are_refused_by_name(http: TestClient, body: bytes, code: str) -> None:
    line = new_line(http)
    headers = {"content-type": "application/json"}
    answer = http.post(f"/v1/policies/{line.policy}/commits", content=body, headers=headers)
    status = 413 if code == "limit_exceeded" else 422
    assert (answer.status_code, code_of(answer)) == (status, code)


def test_a_slow_store_keeps_nobody_from_the_database(tmp_path: Path) -> None:
    class SlowStore(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.opened = threading.Event()

        def put(self, key: str, data: bytes) -> None:
            assert self.opened.wait(120)
            super().put(key, data)

    store = SlowStore()
    database = f"sqlite:///{tmp_path}/p.db"
    app = create_app(Settings(), catalog=SqlCatalog(database), store=store)
    answers: list[int] = []
    with TestClient(app) as http:

        def upload(number: int) -> None:
            data = bytes([number])
            answers.append(
                http.put(f"/v1/chunks/{canonical.digest_of(data)}", content=data).status_code
            )

        # More than there are threads for everything else.
        uploads = [threading.Thread(target=upload, args=(number,)) for number in range(50)]
        for thread in uploads:
            thread.start()
        try:
            assert http.post("/v1/policies", json={"name": "p"}).status_code == 201
            assert http.get("/v1/policies/p").status_code == 200
            assert answers == []
        finally:
            store.opened.set()
        for thread in uploads:
            thread.join(120)
    assert answers == [201] * 50


def test_a_budget_never_lends_more_than_it_has_and_nobody_is_passed_by() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        order: list[int] = []
        lent, most = 0, 0

        async def borrow(number: int, size: int) -> None:
            nonlocal lent, most
            async with budget.lend(size):
                order.append(number)
                lent += min(size, 10)
                most = max(most, lent)
                await asyncio.sleep(0)
                lent -= min(size, 10)

        sizes = [4, 4, 99, 1, 6, 10, 3]
        tasks = [asyncio.create_task(borrow(*item)) for item in enumerate(sizes)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[4], asyncio.CancelledError)
        assert order == [0, 1, 2, 3, 5, 6]
        assert most == 10
        async with budget.lend(10):
            pass

    asyncio.run(asyncio.wait_for(main(), 60))
