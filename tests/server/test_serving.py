"""Starting, settings, tokens and health."""

import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from plait.errors import RegistryUnavailable, StoreUnavailable, UsageError
from plait.store import MemoryStore
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.catalog.database import Database
from plait_server.catalog.locking import filesystem_of, require_locking
from plait_server.serving import prepare
from plait_server.settings import Settings
from tests.server.lines import code_of, grown_line

SERVE = "from plait_client.cli import main; main()"


def test_readiness_asks_database_and_store_but_health_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    app = create_app(Settings(), catalog=SqlCatalog(f"sqlite:///{tmp_path}/p.db"), store=store)
    monkeypatch.setattr("plait_server.registry._READY_SECONDS", 0.0)
    with TestClient(app) as http:
        assert http.get("/readyz").json() == {"status": "ready"}

        def away(key: str, data: bytes) -> None:
            raise StoreUnavailable("the bucket doesn't answer")

        monkeypatch.setattr(store, "put", away)
        answer = http.get("/readyz")
        assert (answer.status_code, code_of(answer)) == (503, "registry_unavailable")
        assert "the bucket doesn't answer" in answer.json()["detail"]
        assert answer.headers["retry-after"] == "1"
        assert http.get("/healthz").status_code == 200


def test_metrics_count_commits_by_result(tmp_path: Path) -> None:
    app = create_app(
        Settings(), catalog=SqlCatalog(f"sqlite:///{tmp_path}/p.db"), store=MemoryStore()
    )
    with TestClient(app) as http:
        line = grown_line(http, 1)
        line.post(line.delta(), expected_generation=9)
        rows = http.get("/metrics").text.splitlines()
    assert 'plait_commits_total{result="committed"} 2.0' in rows
    assert 'plait_commits_total{result="chunk_missing"} 1.0' in rows
    assert any(row.startswith("plait_chunk_bytes_total") for row in rows)


def test_with_a_token_set_every_v1_route_asks_for_it(tmp_path: Path) -> None:
    settings = Settings(token=SecretStr("s3cret"))
    app = create_app(
        settings, catalog=SqlCatalog(f"sqlite:///{tmp_path}/p.db"), store=MemoryStore()
    )
    with TestClient(app) as http:
        for headers in (
            {}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"},
            {"authorization": "s3cret"},
        ):  # fmt: skip
            answer = http.get("/v1/policies", headers=headers)
            assert (answer.status_code, code_of(answer)) == (401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
        right = http.get("/v1/policies", headers={"authorization": "bearer s3cret"})
        assert right.status_code == 200
        assert http.get("/healthz").status_code == 200


def test_an_unforeseen_error_is_a_problem_document_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = SqlCatalog(f"sqlite:///{tmp_path}/p.db")

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(catalog, "policies", broken)
    app = create_app(Settings(), catalog=catalog, store=MemoryStore())
    with TestClient(app) as http:
        answer = http.get("/v1/policies")
    assert (answer.status_code, code_of(answer)) == (500, "service_failed")
    assert "a bug" not in answer.text
    assert answer.json()["request_id"] in answer.json()["remedy"]


def test_a_locked_or_unreachable_database_is_a_typed_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait_server.catalog.database._BUSY_SECONDS", 0.1)
    file = tmp_path / "p.db"
    app = create_app(Settings(), catalog=SqlCatalog(f"sqlite:///{file}"), store=MemoryStore())
    holder = sqlite3.connect(file, isolation_level=None)
    with TestClient(app) as http:
        holder.execute("BEGIN IMMEDIATE")
        answer = http.post("/v1/policies", json={"name": "p"})
        assert (answer.status_code, code_of(answer)) == (503, "registry_unavailable")
        assert answer.json()["retryable"] is True
        assert http.get("/v1/policies").status_code == 200  # reading goes on
        holder.execute("ROLLBACK")
        assert http.post("/v1/policies", json={"name": "p"}).status_code == 201
    holder.close()


@pytest.mark.parametrize("damage", [b"this is no database", b"SQLite format 3\0" + bytes(4096)])
def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "plait.db").write_bytes(damage)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, "serve", "--data", str(tmp_path), "--port", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "plait.db is damaged, or is none" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_listening_is_unreachable_and_the_password_stays_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RegistryUnavailable) as caught:
        SqlCatalog(f"postgresql://plait:hunter2@127.0.0.1:{port}/plait")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://x/y", "nonsense", "", "sqlite3:///x"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Database(url)


def test_sqlite_on_a_network_filesystem_is_refused_in_plain_words(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    share = tmp_path / "a share"
    share.mkdir()
    written = str(share).replace(" ", "\\040")
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nnas:/x {written} nfs4 rw 0 0\n")
    assert filesystem_of(share / "data", mounts) == "nfs4"
    with pytest.raises(UsageError, match="network filesystem"):
        require_locking(share, mounts=mounts)
    assert list(share.iterdir()) == []
    require_locking(tmp_path, mounts=mounts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a share", "mounts"]


def test_a_filesystem_whose_locks_fail_is_refused_before_a_database_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        path.write_bytes(b"half a database")
        raise sqlite3.OperationalError("locking protocol")

    monkeypatch.setattr("plait_server.catalog.locking._try_locks", failing)
    with pytest.raises(UsageError, match="locking protocol"):
        prepare(Settings(data=tmp_path / "data"))
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "99999"], "port"),
        (["--database", "mysql://x/y"], "mysql"),
        (["--host", "203.0.113.7"], "can't listen"),
    ],
)
def test_settings_that_can_not_work_end_the_start_with_exit_code_2(
    tmp_path: Path, options: list[str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, "serve", "--data", str(tmp_path), "--port", "0", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
