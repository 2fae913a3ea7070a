"""Replicas: their reports, judged."""

import time
from typing import Any

from fastapi.testclient import TestClient

from tests.server.lines import Line, grown_line, move, some_fingerprint


def report(line: Line, version: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    body = {
        "channel": "main", "engine": "sglang", "location": "dc-eu-1", "phase": "serving",
        "seq": version and version["seq"],
        "layout_digest": version and version["layout_digest"],
        "fingerprint": version and version["fingerprint"],
        "seen_generation": 1, "durations": {"pause": 0.01},
    } | changes  # fmt: skip
    answer = line.http.put(f"/v1/policies/{line.policy}/replicas/engine-0", json=body)
    assert answer.status_code == 200, answer.text
    judged: dict[str, Any] = answer.json()
    return judged


def test_a_replica_at_the_head_has_no_lag(http: TestClient) -> None:
    line = grown_line(http, 2)
    judged = report(line, line.seen[2])
    assert (judged["head_seq"], judged["generation"]) == (3, 3)
    assert (judged["lag_versions"], judged["lag_seconds"]) == (0, 0.0)
    assert (judged["drifted"], judged["lost"]) == (False, False)


def test_lag_is_counted_along_the_parents(http: TestClient) -> None:
    line = grown_line(http, 3)
    judged = report(line, line.seen[0])
    assert judged["lag_versions"] == 3
    assert judged["lag_seconds"] > 0


def test_a_replica_beside_the_lineage_has_an_unknown_lag(http: TestClient) -> None:
    line = grown_line(http, 3)
    move(line, "2", "rollback", 4)
    judged = report(line, line.seen[3])
    assert judged["lag_versions"] is None
    assert judged["lag_seconds"] > 0
    assert judged["drifted"] is False
    assert report(line, None, phase="attaching")["lag_versions"] is None


def test_other_weights_than_recorded_are_drift(http: TestClient) -> None:
    line = grown_line(http, 1)
    assert report(line, line.seen[1], fingerprint=str(some_fingerprint()))["drifted"] is True
    assert report(line, line.seen[1], seq=77)["drifted"] is True


def test_a_silent_replica_is_lost_and_a_report_brings_it_back(http: TestClient) -> None:
    line = grown_line(http, 0)
    report(line, line.seen[0], ttl_seconds=0.05)
    deadline = time.monotonic() + 30
    while True:
        fleet = http.get(f"/v1/policies/{line.policy}/replicas").json()["replicas"]
        if fleet[0]["lost"]:
            break
        assert time.monotonic() < deadline
    assert report(line, line.seen[0])["lost"] is False


def test_the_fleet_is_every_replica_by_name(http: TestClient) -> None:
    line = grown_line(http, 0)
    report(line, line.seen[0])
    body = report(line, line.seen[0])["report"]
    assert http.put(f"/v1/policies/{line.policy}/replicas/a-1", json=body).status_code == 200
    fleet = http.get(f"/v1/policies/{line.policy}/replicas").json()["replicas"]
    assert [row["replica"] for row in fleet] == ["a-1", "engine-0"]
    assert fleet[0]["report"] == body


def test_a_report_before_there_is_a_channel_is_kept(http: TestClient) -> None:
    http.post("/v1/policies", json={"name": "empty"})
    line = Line(http, policy="empty")
    judged = report(line, None, phase="attaching", seen_generation=0)
    assert (judged["head_seq"], judged["generation"]) == (None, 0)
