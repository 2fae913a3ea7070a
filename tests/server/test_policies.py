"""Policies, and what every answer has in common."""

import pytest
from fastapi.testclient import TestClient

from tests.server.lines import code_of, grown_line


def test_a_policy_is_created_once_and_listed_by_name(http: TestClient) -> None:
    for name in ("zeta", "alpha"):
        assert http.post("/v1/policies", json={"name": name}).status_code == 201
    again = http.post("/v1/policies", json={"name": "zeta"})
    assert (again.status_code, code_of(again)) == (409, "exists")
    listed = http.get("/v1/policies").json()["policies"]
    assert [policy["name"] for policy in listed] == ["alpha", "zeta"]
    assert (listed[0]["versions"], listed[0]["channels"]) == (0, [])


def test_a_policy_counts_its_versions_and_names_its_channels(http: TestClient) -> None:
    line = grown_line(http, 2)
    http.post(f"/v1/policies/{line.policy}/channels", json={"name": "eval", "to": "2"})
    found = http.get(f"/v1/policies/{line.policy}").json()
    assert (found["versions"], found["channels"]) == (3, ["eval", "main"])


@pytest.mark.parametrize("name", ["41", "", "a/b", "-a", "a" * 129, "a\0b", "ä", "main~3"])
def test_names_that_could_be_taken_for_something_else_are_refused(
    http: TestClient, name: str
) -> None:
    before = http.get("/v1/policies").json()
    answer = http.post("/v1/policies", json={"name": name})
    assert answer.status_code == 422
    assert code_of(answer) in ("document_invalid", "request_rejected")
    assert http.get("/v1/policies").json() == before


def test_every_kind_of_refusal_is_a_problem_document_with_the_requests_id(
    http: TestClient,
) -> None:
    refusals = [
        (http.get("/v1/policies/p/versions/1"), 404, "not_found"),
        (http.get("/nowhere"), 404, "not_found"),
        (http.delete("/v1/policies"), 405, "request_rejected"),
        (http.post("/v1/policies", content=b"{"), 422, "request_rejected"),
        (http.post("/v1/policies", json={"name": "p", "nme": 1}), 422, "request_rejected"),
        (http.get("/v1/policies/p/versions/no~~such"), 400, "usage"),
    ]
    for answer, status, code in refusals:
        assert (answer.status_code, code_of(answer)) == (status, code), answer.text
        problem = answer.json()
        assert problem["status"] == status
        assert problem["request_id"] == answer.headers["x-request-id"]
        assert problem["type"] == f"/problems/{code}"
    named = http.get("/nowhere", headers={"x-request-id": "trace-7"})
    assert named.json()["request_id"] == "trace-7"


def test_a_body_beyond_every_limit_is_refused_before_it_is_read(http: TestClient) -> None:
    answer = http.post("/v1/policies", content=b"{}", headers={"content-length": str(1 << 40)})
    assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")
    endless = (b"x" * (1 << 20) for _ in range(80))
    answer = http.post("/v1/policies", content=endless)
    assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")
