"""Channels: creation, promotion, rollback, and the history of it all."""

import secrets

from fastapi.testclient import TestClient

from tests.server.lines import code_of, grown_line, move


def test_a_rollback_goes_back_in_seq_and_on_in_generation(http: TestClient) -> None:
    line = grown_line(http, 3)
    moved = move(line, "main~2", "rollback", 4).json()
    assert (moved["seq"], moved["generation"], moved["kind"]) == (2, 5, "rollback")
    assert (moved["reason"], moved["actor"]) == ("eval got worse", "on-call")
    assert http.get(f"/v1/policies/{line.policy}/channels/main").json() == moved
    assert http.get(f"/v1/policies/{line.policy}/versions/main").json()["seq"] == 2


def test_a_rollback_needs_a_reason(http: TestClient) -> None:
    line = grown_line(http, 1)
    answer = move(line, "1", "rollback", 2, reason=" ")
    assert (answer.status_code, code_of(answer)) == (400, "usage")
    assert http.get(f"/v1/policies/{line.policy}/channels/main").json()["generation"] == 2


def test_a_move_with_an_old_generation_is_refused_and_says_what_happened(
    http: TestClient,
) -> None:
    line = grown_line(http, 2)
    answer = move(line, "1", "rollback", 2)
    assert (answer.status_code, code_of(answer)) == (409, "generation_moved")
    details = answer.json()["details"]
    assert (details["generation"], details["head"]["seq"]) == (3, 3)
    assert details["event"]["kind"] == "commit"


def test_the_same_move_again_gets_the_first_answer(http: TestClient) -> None:
    line = grown_line(http, 3)
    move_id = secrets.token_hex(16)
    first = move(line, "main~1", "rollback", 4, move_id=move_id)
    move(line, "4", "promote", 5)
    again = move(line, "main~1", "rollback", 4, move_id=move_id)
    assert again.status_code == 200
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first.json()
    assert http.get(f"/v1/policies/{line.policy}/channels/main").json()["generation"] == 6
    reused = move(line, "1", "promote", 6, move_id=move_id)
    assert (reused.status_code, code_of(reused)) == (409, "exists")


def test_a_move_id_is_not_the_answer_to_another_move(http: TestClient) -> None:
    line = grown_line(http, 2)
    move_id = secrets.token_hex(16)
    assert move(line, "2", "rollback", 3, move_id=move_id).status_code == 200
    digest = line.seen[0]["version_digest"]
    for to, generation in (("1", 3), (digest, 3), ("2", 4)):
        other = move(line, to, "rollback", generation, move_id=move_id)
        assert (other.status_code, code_of(other)) == (409, "exists")
    assert http.get(f"/v1/policies/{line.policy}/channels/main").json()["seq"] == 2


def test_a_long_history_comes_in_pages(http: TestClient) -> None:
    line = grown_line(http, 4)
    url = f"/v1/policies/{line.policy}/channels/main/history"
    pages = [http.get(url, params={"limit": 2, "before": before}) for before in (6, 4, 2, 1)]
    generations = [[e["generation"] for e in page.json()["events"]] for page in pages]
    assert generations == [[5, 4], [3, 2], [1], []]


def test_the_history_keeps_every_movement(http: TestClient) -> None:
    line = grown_line(http, 2)
    move(line, "1", "rollback", 3)
    move(line, "3", "promote", 4, reason="it was the data")
    events = http.get(f"/v1/policies/{line.policy}/channels/main/history").json()["events"]
    rows = [(e["generation"], e["from_seq"], e["to_seq"], e["kind"]) for e in events]
    assert rows == [
        (5, 1, 3, "promote"),
        (4, 3, 1, "rollback"),
        (3, 2, 3, "commit"),
        (2, 1, 2, "commit"),
        (1, None, 1, "commit"),
    ]
    assert [event["reason"] for event in events[:2]] == ["it was the data", "eval got worse"]


def test_a_channel_is_created_at_any_version(http: TestClient) -> None:
    line = grown_line(http, 3)
    url = f"/v1/policies/{line.policy}/channels"
    created = http.post(url, json={"name": "stable", "to": "main~1", "actor": "ops"})
    assert created.status_code == 201
    assert (created.json()["seq"], created.json()["generation"]) == (3, 1)
    again = http.post(url, json={"name": "stable", "to": "1"})
    assert (again.status_code, code_of(again)) == (409, "exists")
    nowhere = http.post(url, json={"name": "other", "to": "99"})
    assert (nowhere.status_code, code_of(nowhere)) == (404, "not_found")
    names = [channel["channel"] for channel in http.get(url).json()["channels"]]
    assert names == ["main", "stable"]


def test_a_channel_that_is_not_there_is_not_found(http: TestClient) -> None:
    line = grown_line(http, 0)
    url = f"/v1/policies/{line.policy}/channels/nope"
    for answer in (http.get(url), http.get(f"{url}/history"), http.get(f"{url[:-4]}main~1")):
        assert answer.status_code in (404, 422)
    line.channel = "nope"
    assert move(line, "1", "promote", 1).status_code == 404
