"""Plans: the cheapest chain, and refusals instead of guesses."""

from fastapi.testclient import TestClient

from tests.server.lines import (
    OTHER_LAYOUT,
    Line,
    code_of,
    grown_line,
    held,
    move,
    new_line,
    plan,
    some_fingerprint,
)


def kinds(answer: dict[str, object]) -> list[str]:
    steps = answer["steps"]
    assert isinstance(steps, list)
    return [f"{step['kind']}>{step['to_seq']}" for step in steps]


def test_from_nothing_the_plan_begins_at_the_anchor(http: TestClient) -> None:
    line = grown_line(http, 2)
    answer = plan(line, "main").json()
    assert kinds(answer) == ["anchor>1", "forward>2", "forward>3"]
    assert answer["total_bytes"] == sum(version["payload_bytes"] for version in line.seen)
    assert (answer["channel"], answer["generation"], answer["seq"]) == ("main", 3, 3)
    assert len(answer["steps"][0]["side_files"]) == 1
    assert answer["steps"][-1]["target"] == line.seen[-1]["fingerprint"]


def test_forwards_and_backwards_use_the_same_deltas(http: TestClient) -> None:
    line = grown_line(http, 30)
    forward = plan(line, 31, held(line.seen[27], seq=28)).json()
    assert kinds(forward) == ["forward>29", "forward>30", "forward>31"]
    back = plan(line, 28, held(line.seen[30], seq=31)).json()
    assert kinds(back) == ["reverse>30", "reverse>29", "reverse>28"]
    manifests = [step["manifest_digest"] for step in forward["steps"]]
    assert [step["manifest_digest"] for step in back["steps"]] == manifests[::-1]
    assert back["steps"][0]["base"] == line.seen[30]["fingerprint"]
    assert back["total_bytes"] == forward["total_bytes"]


def test_who_is_there_already_has_nothing_to_do(http: TestClient) -> None:
    line = grown_line(http, 2)
    line.commit(line.delta(empty=True))
    for version in line.seen[-2:]:
        answer = plan(line, "main", held(version, seq=version["seq"])).json()
        assert (answer["seq"], answer["steps"], answer["total_bytes"]) == (4, [], 0)


def test_an_anchor_is_taken_where_it_is_cheaper_than_the_chain(http: TestClient) -> None:
    line = grown_line(http, 0)
    for _ in range(3):
        line.commit(line.delta(size=5000))
    line.commit(line.anchor())
    assert kinds(plan(line, "main", held(line.seen[0])).json()) == ["anchor>5"]
    # An anchor's state joins the chain only where a delta leads from it.
    line.commit(line.delta())
    assert kinds(plan(line, "main", held(line.seen[0])).json()) == ["anchor>5", "forward>6"]


def test_a_big_delta_is_walked_around(http: TestClient) -> None:
    line = grown_line(http, 1)
    short = line.seen[0]
    line.commit(line.delta(size=10))
    target = line.seen[-1]["fingerprint"]
    side = Line(http, policy=line.policy, channel="side")
    side.stand_on(short)
    side.head, side.generation = None, 0
    increment = line.fingerprint - side.fingerprint  # type: ignore[operator]
    side.commit(side.delta(increment=increment, size=100_000))
    assert side.seen[-1]["fingerprint"] == target
    assert kinds(plan(line, "side", held(short)).json()) == ["forward>2", "forward>4"]


def test_an_external_line_starts_at_weights_that_the_caller_has(http: TestClient) -> None:
    line = new_line(http)
    line.commit(line.anchor(external=True))
    line.commit(line.delta())
    line.commit(line.delta())
    assert kinds(plan(line, "main").json()) == ["external>1", "forward>2", "forward>3"]
    refused = plan(line, "main", allow_external=False)
    assert (refused.status_code, code_of(refused)) == (409, "no_plan")
    back = plan(line, 1, held(line.seen[2])).json()
    assert kinds(back) == ["reverse>2", "reverse>1"]


def test_a_caller_that_can_not_take_an_anchor_gets_deltas_or_a_refusal(http: TestClient) -> None:
    line = grown_line(http, 2)
    first, second = line.seen[0], line.seen[1]
    back = plan(line, 1, held(second), allow_anchor=False)
    assert kinds(back.json()) == ["reverse>1"]
    refused = plan(line, "main", allow_anchor=False)
    assert (refused.status_code, code_of(refused)) == (409, "no_plan")
    assert kinds(plan(line, 2, held(first), allow_anchor=False).json()) == ["forward>2"]


def test_weights_of_no_version_are_not_patched(http: TestClient) -> None:
    line = grown_line(http, 2)
    stranger = held(line.seen[1]) | {"fingerprint": str(some_fingerprint())}
    answer = plan(line, "main", stranger)
    assert (answer.status_code, code_of(answer)) == (409, "unknown_base")
    answer = plan(line, "main", stranger | {"seq": 77})
    assert (answer.status_code, code_of(answer)) == (409, "unknown_base")


def test_the_right_number_with_other_weights_is_refused(http: TestClient) -> None:
    line = grown_line(http, 2)
    for claim in (
        held(line.seen[1]) | {"fingerprint": str(some_fingerprint()), "seq": 2},
        held(line.seen[1], seq=1),
        held(line.seen[1], seq=99),
    ):
        answer = plan(line, "main", claim)
        assert (answer.status_code, code_of(answer)) == (409, "fingerprint_mismatch")


def test_a_changed_layout_needs_a_stored_anchor(http: TestClient) -> None:
    line = grown_line(http, 1)
    line.layout = OTHER_LAYOUT
    line.commit(line.anchor(external=True))
    answer = plan(line, "main", held(line.seen[1]))
    assert (answer.status_code, code_of(answer)) == (409, "layout_changed")
    assert "'embed' is BF16[8, 8], expected BF16[8, 4]" in answer.json()["detail"]
    line.commit(line.anchor())
    assert kinds(plan(line, "main", held(line.seen[1])).json()) == ["anchor>4"]
    # Back again: deltas don't lead across, the old layout's anchor does.
    answer = plan(line, 2, held(line.seen[3])).json()
    assert kinds(answer) == ["anchor>1", "forward>2"]


def test_a_rollback_is_planned_by_the_channel_and_its_generation(http: TestClient) -> None:
    line = grown_line(http, 3)
    move(line, "2", "rollback", 4)
    answer = plan(line, "main", held(line.seen[3], seq=4)).json()
    assert kinds(answer) == ["reverse>3", "reverse>2"]
    assert (answer["seq"], answer["generation"], answer["channel"]) == (2, 5, "main")
    assert plan(line, "main~1", held(line.seen[3])).json()["generation"] is None
