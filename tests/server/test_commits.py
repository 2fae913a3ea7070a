"""Commits that go through: what they make, and that a repeat makes nothing."""

from concurrent.futures import ThreadPoolExecutor

from fastapi.testclient import TestClient

from plait.cut import plain_cut
from plait.manifest import Manifest
from plait.version_record import VersionRecord
from tests.server.lines import LAYOUT, OTHER_LAYOUT, Line, code_of, grown_line, new_line


def test_a_commit_makes_a_version_and_moves_the_channel(http: TestClient) -> None:
    line = new_line(http)
    parts = line.anchor()
    line.send(parts)
    answer = line.post(parts)
    assert answer.status_code == 201
    version = answer.json()
    assert answer.headers["location"] == f"/v1/policies/{line.policy}/versions/1"
    expected = {
        "policy": line.policy, "seq": 1, "parent": None, "parent_digest": None, "kind": "anchor",
        "external": False, "channel": "main", "generation": 1,
        "fingerprint": str(parts.record.fingerprint), "proof": "full",
        "layout_digest": LAYOUT.digest, "version_digest": parts.record.digest,
        "manifest_digest": parts.manifest.digest, "cut_digest": parts.manifest.cut,
        "total_elements": LAYOUT.total_elements, "dense_bytes": LAYOUT.dense_bytes,
        "metadata": {"step": 7, "lr": 1e-06}, "actor": "trainer-1",
    }  # fmt: skip
    assert {name: version[name] for name in expected} == expected
    channel = http.get(f"/v1/policies/{line.policy}/channels/main").json()
    assert (channel["seq"], channel["generation"], channel["kind"]) == (1, 1, "commit")
    assert channel["version_digest"] == version["version_digest"]


def test_payload_is_what_a_follower_at_the_base_fetches(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    version = line.commit(parts)
    assert parts.cut is not None
    sizes = [len(data) for data in parts.chunks.values()]
    expected = sum(sizes) + len(parts.manifest.data) + len(parts.cut.serialize())
    assert version["payload_bytes"] == expected


def test_an_external_anchor_has_no_chunks_and_its_deltas_follow(http: TestClient) -> None:
    line = new_line(http)
    anchor = line.anchor(external=True)
    version = line.commit(anchor)
    assert version["external"] is True
    assert version["payload_bytes"] == len(anchor.manifest.data)
    assert line.commit(line.delta())["parent"] == 1


def test_a_publish_that_changes_nothing_still_makes_a_version(http: TestClient) -> None:
    line = grown_line(http, 1)
    version = line.commit(line.delta(empty=True))
    assert (version["seq"], version["changed_elements"]) == (3, 0)
    assert version["fingerprint"] == line.seen[-2]["fingerprint"]


def test_the_same_commit_again_gets_the_first_answer(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    request = line.request(parts)
    first = line.commit(parts)
    line.commit(line.delta())
    again = http.post(f"/v1/policies/{line.policy}/commits", json=request)
    assert again.status_code == 200
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first
    asked = http.get(f"/v1/policies/{line.policy}/commits/{parts.record.digest}")
    assert asked.json() == first
    assert http.get(f"/v1/policies/{line.policy}").json()["versions"] == 3


def test_a_commit_that_never_came_is_not_found_by_its_digest(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.send(parts)
    asked = http.get(f"/v1/policies/{line.policy}/commits/{parts.record.digest}")
    assert (asked.status_code, code_of(asked)) == (404, "not_found")


def test_many_senders_of_one_commit_make_one_version(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.send(parts)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: line.post(parts), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.text for answer in answers}) == 1
    assert http.get(f"/v1/policies/{line.policy}").json()["versions"] == 2


def test_one_version_can_not_be_committed_to_two_channels(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.commit(parts)
    other = line.post(parts, channel="eval", expected_head=None, expected_generation=0)
    assert (other.status_code, code_of(other)) == (409, "exists")


def test_a_second_channel_grows_from_an_older_version(http: TestClient) -> None:
    line = grown_line(http, 3)
    side = Line(http, policy=line.policy, channel="side")
    side.stand_on(line.seen[1])
    side.head, side.generation = None, 0
    version = side.commit(side.delta())
    assert (version["seq"], version["parent"], version["generation"]) == (5, 2, 1)
    assert http.get(f"/v1/policies/{line.policy}/channels/main").json()["seq"] == 4


def test_a_new_layout_comes_with_an_anchor(http: TestClient) -> None:
    line = grown_line(http, 1)
    line.layout = OTHER_LAYOUT
    version = line.commit(line.anchor())
    assert (version["seq"], version["parent"]) == (3, 2)
    assert version["layout_digest"] == OTHER_LAYOUT.digest
    assert line.commit(line.delta())["seq"] == 4


def test_documents_come_back_as_the_bytes_that_were_named(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.commit(parts)
    record = http.get(f"/v1/documents/{parts.record.digest}")
    manifest = http.get(f"/v1/documents/{parts.manifest.digest}")
    assert VersionRecord.parse(record.content).digest == parts.record.digest
    assert Manifest.parse(manifest.content) == parts.manifest
    assert http.get(f"/v1/documents/{LAYOUT.digest}").content == LAYOUT.serialize()
    cut = plain_cut(LAYOUT, for_anchor=False)
    answer = http.get(f"/v1/documents/{cut.digest}")
    assert answer.content == cut.serialize()
    assert "immutable" in answer.headers["cache-control"]
    same = http.get(
        f"/v1/documents/{cut.digest}", headers={"if-none-match": answer.headers["etag"]}
    )
    assert same.status_code == 304


def test_numbers_have_no_gaps_after_refused_commits(http: TestClient) -> None:
    line = grown_line(http, 0)
    for _ in range(3):
        parts = line.delta()
        line.send(parts)
        assert line.post(parts, expected_generation=99).status_code == 409
        line.commit(line.delta())
    page = http.get(f"/v1/policies/{line.policy}/versions").json()
    assert [version["seq"] for version in page["versions"]] == [4, 3, 2, 1]
