"""The registry is killed between any two steps: no half a version, and the repeat is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import httpx
import pytest
from fastapi.testclient import TestClient

from plait.canonical import digest_of
from plait.store import LocalStore
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.failpoints import Failpoint
from plait_server.settings import Settings
from tests.server.lines import Line, Parts, grown_line, held, move, plan
from tests.server.processes import registry_process

STEPS = [name for name in get_args(Failpoint) if name.startswith(("chunk", "commit"))]


def check_whole(http: httpx.Client, policy: str) -> dict[str, str]:
    """Every version, its documents, chunks and channel belong together; digests by seq."""
    found = http.get(f"/v1/policies/{policy}/versions").json()["versions"]
    assert [row["seq"] for row in found] == list(range(len(found), 0, -1))
    for row in found:
        for digest in (row["version_digest"], row["manifest_digest"], row["layout_digest"]):
            assert digest_of(http.get(f"/v1/documents/{digest}").content) == digest
        manifest = http.get(f"/v1/documents/{row['manifest_digest']}").json()
        for chunk in manifest["chunks"] + manifest["side_files"]:
            assert digest_of(http.get(f"/v1/chunks/{chunk['digest']}").content) == chunk["digest"]
    channel = http.get(f"/v1/policies/{policy}/channels/main").json()
    events = http.get(f"/v1/policies/{policy}/channels/main/history").json()["events"]
    assert channel["generation"] == len(events) == len(found)
    assert channel["version_digest"] == found[0]["version_digest"]
    assert http.get(f"/v1/policies/{policy}").json()["versions"] == len(found)
    return {row["seq"]: row["version_digest"] for row in found}


@contextmanager
def restarted(folder: Path, database: str) -> Iterator[TestClient]:
    """A registry that opens anew what the others left."""
    store = LocalStore(folder / "objects")
    with TestClient(create_app(Settings(), catalog=SqlCatalog(database), store=store)) as http:
        yield http


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_of_a_commit_the_registry_is_whole_and_the_repeat_is_the_same(
    database: str, tmp_path: Path, step: Failpoint
) -> None:
    with restarted(tmp_path, database) as http:
        line = grown_line(http, 1)
        epoch = http.get("/v1/config").json()["epoch"]
    parts = line.delta()
    with registry_process(tmp_path, database, failpoint=step) as doomed:
        line.http = doomed.http
        with pytest.raises(httpx.TransportError):
            send_and_post(line, parts)
        assert doomed.process.wait(30) == -9
    with restarted(tmp_path, database) as http:
        line.http = http
        assert http.get("/v1/config").json()["epoch"] == epoch
        before = check_whole(http, line.policy)
        assert len(before) == (3 if step == "commit.committed" else 2)
        answer = send_and_post(line, parts)
        assert answer.status_code == (200 if step == "commit.committed" else 201)
        assert answer.json()["seq"] == 3
        assert line.post(parts).json() == answer.json()
        assert len(check_whole(http, line.policy)) == 3
        line.stand_on(answer.json())
        steps = plan(line, "main", held(line.seen[0])).json()["steps"]
        assert [row["to_seq"] for row in steps] == [2, 3]
        line.commit(line.delta())


def send_and_post(line: Line, parts: Parts) -> httpx.Response:
    line.send(parts)
    return line.post(parts)


@pytest.mark.parametrize("step", ["move.written", "move.committed"])
def test_killed_in_a_rollback_the_same_move_id_finds_its_answer(
    database: str, tmp_path: Path, step: Failpoint
) -> None:
    with restarted(tmp_path, database) as http:
        line = grown_line(http, 2)
    move_id = "0123456789abcdef"
    with registry_process(tmp_path, database, failpoint=step) as doomed:
        line.http = doomed.http
        with pytest.raises(httpx.TransportError):
            move(line, "1", "rollback", 3, move_id=move_id)
    with restarted(tmp_path, database) as http:
        line.http = http
        answers = [move(line, "1", "rollback", 3, move_id=move_id) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        moved = answers[0].json()
        assert answers[1].json() == moved
        assert (moved["seq"], moved["generation"]) == (1, 4)


def test_a_killed_and_restarted_process_keeps_the_epoch_and_every_event(
    database: str, tmp_path: Path
) -> None:
    with registry_process(tmp_path, database) as registry:
        line = grown_line(registry.http, 2)
        events = registry.http.get("/v1/events").json()
        registry.kill()
    with registry_process(tmp_path, database) as registry:
        assert registry.http.get("/v1/events").json() == events
        line = Line(registry.http, policy=line.policy)
        line.stand_on(registry.http.get(f"/v1/policies/{line.policy}/versions/main").json())
        assert line.commit(line.delta())["seq"] == 4
        check_whole(registry.http, line.policy)
