"""The API against its own description: whatever is sent, never a 500."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from plait.store import MemoryStore
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.settings import Settings
from tests.server.lines import grown_line


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("openapi")
    built = create_app(
        Settings(), catalog=SqlCatalog(f"sqlite:///{folder}/plait.db"), store=MemoryStore()
    )
    with TestClient(built) as http:
        grown_line(http, 2, policy="chat-7b")
        yield built


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=12, deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_no_input_makes_the_registry_fail(case: Any) -> None:
    headers = {"accept": "application/json"} if case.path == "/v1/events" else None
    answer = case.call(headers=headers)
    case.validate_response(answer, checks=[not_a_server_error])
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == ["application/problem+json"]


def test_every_operation_is_described(app: FastAPI) -> None:
    described = app.openapi()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len(operations) >= 25
    for operation in operations:
        assert operation["summary"]
        assert operation["description"]
        assert operation["tags"]
        assert "4XX" in operation["responses"]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
