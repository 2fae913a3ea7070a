"""Finding versions: by REF, page by page, by their weights."""

from fastapi.testclient import TestClient

from tests.server.lines import OTHER_LAYOUT, Line, code_of, grown_line, move


def test_a_ref_is_a_number_a_channel_a_step_back_or_a_digest(http: TestClient) -> None:
    line = grown_line(http, 4)
    move(line, "3", "rollback", 5)
    url = f"/v1/policies/{line.policy}/versions"
    expected = {"5": 5, "main": 3, "main~0": 3, "main~1": 2, "main~2": 1, str(line.head): 5}
    assert {ref: http.get(f"{url}/{ref}").json()["seq"] for ref in expected} == expected


def test_refs_that_lead_nowhere_are_not_found(http: TestClient) -> None:
    line = grown_line(http, 1)
    for ref in ("3", "main~2", "main~9007199254740991", "eval", "sha256:" + "0" * 64):
        answer = http.get(f"/v1/policies/{line.policy}/versions/{ref}")
        assert (answer.status_code, code_of(answer)) == (404, "not_found"), ref
    for ref in ("0", "main~", "~1", "main~x", "99999999999999999999"):
        answer = http.get(f"/v1/policies/{line.policy}/versions/{ref}")
        assert answer.status_code == 400, ref


def test_steps_back_follow_parents_and_not_numbers(http: TestClient) -> None:
    line = grown_line(http, 2)
    side = Line(http, policy=line.policy, channel="side")
    side.stand_on(line.seen[0])
    side.head, side.generation = None, 0
    side.commit(side.delta())
    found = http.get(f"/v1/policies/{line.policy}/versions/side~1").json()
    assert found["seq"] == 1


def test_pages_hold_every_version_once(http: TestClient) -> None:
    line = grown_line(http, 6)
    url = f"/v1/policies/{line.policy}/versions"
    seen, before = [], None
    while True:
        page = http.get(url, params={"limit": 3} | ({"before": before} if before else {})).json()
        seen += [version["seq"] for version in page["versions"]]
        before = page["before"]
        if before is None:
            break
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_weights_are_found_by_what_they_are(http: TestClient) -> None:
    line = grown_line(http, 1)
    line.commit(line.delta(empty=True))
    version = line.seen[-1]
    url = f"/v1/policies/{line.policy}/states"
    found = http.get(f"{url}/{version['layout_digest']}/{version['fingerprint']}").json()
    assert [row["seq"] for row in found["versions"]] == [3, 2]
    for layout, fingerprint in (
        (OTHER_LAYOUT.digest, version["fingerprint"]),
        (version["layout_digest"], "0" * 32),
    ):
        answer = http.get(f"{url}/{layout}/{fingerprint}")
        assert (answer.status_code, code_of(answer)) == (404, "unknown_base")
