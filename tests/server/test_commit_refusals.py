"""Commits that are refused: each with its code, and with nothing written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from plait.canonical import digest_of
from plait.errors import NoSpace
from plait.fingerprint import Fingerprint
from plait.layout import Layout, TensorSpec
from plait.store import MemoryStore
from tests.server.lines import (
    OTHER_LAYOUT,
    Line,
    Parts,
    code_of,
    grown_line,
    move,
    new_line,
    some_fingerprint,
)


def refused(line: Line, parts: Parts, status: int, code: str, **changes: Any) -> dict[str, Any]:
    """Posts; the answer's problem. The policy must be as it was."""
    before = line.http.get(f"/v1/policies/{line.policy}").json()
    events = line.http.get("/v1/events").json()["revision"]
    answer = line.post(parts, **changes)
    assert (answer.status_code, code_of(answer)) == (status, code), answer.text
    assert line.http.get(f"/v1/policies/{line.policy}").json() == before
    assert line.http.get("/v1/events").json()["revision"] == events
    problem: dict[str, Any] = answer.json()
    return problem


def test_after_an_operators_rollback_the_trainer_learns_head_and_reason(http: TestClient) -> None:
    line = grown_line(http, 3)
    assert move(line, "2", "rollback", 4).status_code == 200
    parts = line.delta()
    line.send(parts)
    details = refused(line, parts, 409, "head_moved")["details"]
    assert details["head"]["seq"] == 2
    assert details["head"] == http.get(f"/v1/policies/{line.policy}/versions/2").json()
    assert details["generation"] == 5
    event = details["event"]
    assert (event["kind"], event["reason"], event["actor"]) == (
        "rollback", "eval got worse", "on-call",
    )  # fmt: skip


def test_a_head_that_came_back_only_costs_the_new_generation(http: TestClient) -> None:
    line = grown_line(http, 2)
    move(line, "2", "rollback", 3)
    move(line, "3", "promote", 4)
    parts = line.delta()
    line.send(parts)
    problem = refused(line, parts, 409, "generation_moved")
    assert problem["details"]["head"]["version_digest"] == line.head
    line.generation = problem["details"]["generation"]
    assert line.commit(parts)["generation"] == 6


def test_the_true_head_in_the_refusal_lets_the_loser_go_on(http: TestClient) -> None:
    winner = grown_line(http, 0)
    loser = Line(http, policy=winner.policy)
    loser.stand_on(winner.seen[0])
    winner.commit(winner.delta())
    parts = loser.delta()
    loser.send(parts)
    problem = refused(loser, parts, 409, "head_moved")
    loser.stand_on(problem["details"]["head"] | {"generation": problem["details"]["generation"]})
    assert loser.commit(loser.delta())["seq"] == 3


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"expected_head": None, "expected_generation": 0}, "head_moved"),
        ({"expected_head": "sha256:" + "0" * 64}, "head_moved"),
        ({"expected_generation": 1}, "generation_moved"),
        ({"channel": "new"}, "head_moved"),
        (
            {"channel": "new", "expected_head": None, "expected_generation": 3},
            "generation_moved",
        ),
    ],
)
def test_a_wrong_belief_about_the_channel_is_refused(
    http: TestClient, changes: dict[str, Any], code: str
) -> None:
    line = grown_line(http, 1)
    parts = line.delta()
    line.send(parts)
    refused(line, parts, 409, code, **changes)


def test_a_delta_without_its_parent_is_refused(http: TestClient) -> None:
    line = grown_line(http, 1)
    orphan = line.delta(parent=None)
    stranger = line.delta(parent="sha256:" + "1" * 64)
    for parts in (orphan, stranger):
        line.send(parts)
    refused(line, orphan, 422, "document_invalid")
    refused(line, stranger, 409, "unknown_base")


def test_a_delta_from_another_base_than_its_parents_weights_is_refused(http: TestClient) -> None:
    line = grown_line(http, 1)
    line.fingerprint = some_fingerprint()
    parts = line.delta()
    line.send(parts)
    problem = refused(line, parts, 409, "base_mismatch")
    assert problem["details"]["expected"] == line.seen[-1]["fingerprint"]


def test_a_layout_change_without_an_anchor_names_the_tensors(http: TestClient) -> None:
    line = grown_line(http, 1)
    line.layout = OTHER_LAYOUT
    parts = line.delta()
    line.send(parts)
    problem = refused(line, parts, 409, "layout_changed")
    for words in ("'embed'", "'head' is missing", "'new' is new"):
        assert words in problem["detail"]
    assert "--new-anchor" in problem["remedy"]


def test_missing_chunks_are_named(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    uploaded, *absent = parts.chunks
    line.send(dataclasses.replace(parts, chunks={uploaded: parts.chunks[uploaded]}))
    problem = refused(line, parts, 422, "chunk_missing")
    assert problem["details"]["missing"] == sorted(absent)
    line.commit(parts)


def test_a_chunk_of_another_size_is_refused(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.send(parts)
    document = parts.manifest.to_document()
    document["chunks"][0]["size"] += 1
    document["statistics"]["chunk_bytes"] += 1
    refused(line, parts, 422, "size_mismatch", manifest=document)


def test_unknown_layouts_and_cuts_are_named(http: TestClient) -> None:
    line = new_line(http)
    line.layout = Layout.of([TensorSpec(line.policy, "BF16", (2,))])
    parts = line.anchor()
    problem = refused(line, parts, 422, "document_invalid")
    assert problem["details"]["digest"] == line.layout.digest
    line.send(dataclasses.replace(parts, cut=None))
    problem = refused(line, parts, 422, "document_invalid")
    assert problem["details"]["digest"] == parts.manifest.cut


def manifest_that(change: Callable[[dict[str, Any]], object]) -> Callable[[Parts], dict[str, Any]]:
    def changed(parts: Parts) -> dict[str, Any]:
        document = parts.manifest.to_document()
        change(document)
        return {"manifest": document}

    return changed


def record_that(**changes: Any) -> Callable[[Parts], dict[str, Any]]:
    return lambda parts: {"record": parts.record.to_document() | changes}


OTHER = str(Fingerprint(1, 2))
CASES: list[tuple[str, Callable[[Parts], dict[str, Any]], int, str]] = [
    ("lost change", manifest_that(lambda m: m["chunks"][0].update(increment=OTHER)),
     409, "fingerprint_mismatch"),
    ("record of other weights", record_that(fingerprint=OTHER), 409, "fingerprint_mismatch"),
    ("other policy", record_that(policy="elsewhere"), 422, "document_invalid"),
    ("other layout", record_that(layout=OTHER_LAYOUT.digest), 422, "document_invalid"),
    ("unknown format", manifest_that(lambda m: m.update(format="plait-manifest/9")),
     422, "unsupported_format"),
    ("unknown feature", manifest_that(lambda m: m.update(requires=["holograms"])),
     422, "unsupported_format"),
    ("frame beyond the cut", manifest_that(lambda m: m["chunks"][0].update(frames=[999])),
     422, "document_invalid"),
    ("frame twice", manifest_that(lambda m: m["chunks"][1].update(frames=[0])),
     422, "document_invalid"),
    ("no cut", manifest_that(lambda m: m.update(cut=None)), 422, "document_invalid"),
    ("layout as cut", manifest_that(lambda m: m.update(cut=m["layout"])), 422, "document_invalid"),
    ("wrong count", manifest_that(lambda m: m["statistics"].update(total_elements=1)),
     422, "document_invalid"),
    ("wrong sum", manifest_that(lambda m: m["statistics"].update(chunk_bytes=1)),
     422, "document_invalid"),
    ("surrogate", record_that(metadata={"note": "\ud800"}), 422, "document_invalid"),
    ("integer beyond 2^53", record_that(metadata={"n": 1 << 60}), 422, "document_invalid"),
    ("not an object", lambda parts: {"manifest": []}, 422, "request_rejected"),
    ("channel like a number", lambda parts: {"channel": "17"}, 422, "document_invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "change", "status", "code"), CASES, ids=[c[0] for c in CASES])
def test_a_commit_that_contradicts_itself_is_refused(
    http: TestClient,
    why: str,
    change: Callable[[Parts], dict[str, Any]],
    status: int,
    code: str,
) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.send(parts)
    refused(line, parts, status, code, **change(parts))
    line.commit(parts)


def test_an_anchor_that_lacks_a_frame_is_refused(http: TestClient) -> None:
    line = new_line(http)
    parts = line.anchor()
    line.send(parts)
    document = parts.manifest.to_document()
    gone = document["chunks"].pop()
    document["statistics"]["chunk_bytes"] -= gone["size"]
    refused(line, parts, 422, "document_invalid", manifest=document)


def test_a_document_of_other_bytes_than_its_name_is_refused(http: TestClient) -> None:
    line = new_line(http)
    data = line.layout.serialize()
    wrong = http.put(f"/v1/documents/{digest_of(b'else')}", content=data)
    assert (wrong.status_code, code_of(wrong)) == (422, "digest_mismatch")
    for body in (b"", b"[]", b"{}", data + b" ", b'{"format":"plait-manifest/1"}'):
        odd = http.put(f"/v1/documents/{digest_of(body)}", content=body)
        assert odd.status_code == 422, body
        assert http.get(f"/v1/documents/{digest_of(body)}").status_code == 404


def test_a_full_disk_refuses_the_upload_and_records_nothing(
    http: TestClient, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = grown_line(http, 0)
    parts = line.delta()

    def full(key: str, data: bytes) -> None:
        raise NoSpace("no space left on the store's disk", remedy="free space")

    digest, data = next(iter(parts.chunks.items()))
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", full)
        answer = http.put(f"/v1/chunks/{digest}", content=data)
    assert (answer.status_code, code_of(answer)) == (507, "no_space")
    assert http.head(f"/v1/chunks/{digest}").status_code == 404
    assert http.post("/v1/chunks:missing", json={"digests": [digest]}).json()["missing"] == [digest]
    line.commit(parts)


@pytest.mark.parametrize("depth", [65, 300])
def test_metadata_that_no_listing_could_show_is_refused(http: TestClient, depth: int) -> None:
    line = grown_line(http, 0)
    nested: dict[str, Any] = {}
    for _ in range(depth - 1):
        nested = {"a": nested} if depth % 2 else {"a": [nested]}
    parts = line.delta()
    line.send(parts)
    record = parts.record.to_document() | {"metadata": {"a": nested}}
    refused(line, parts, 413, "limit_exceeded", record=record)


def test_metadata_of_ordinary_depth_is_shown_as_it_was(http: TestClient) -> None:
    line = grown_line(http, 0)
    nested: Any = 1
    for _ in range(60):
        nested = {"a": nested}
    version = line.commit(line.delta(metadata=nested))
    page = http.get(f"/v1/policies/{line.policy}/versions").json()
    assert page["versions"][0]["metadata"] == version["metadata"] == nested


def test_a_refusal_can_quote_what_is_no_text(http: TestClient) -> None:
    line = grown_line(http, 0)
    parts = line.delta()
    line.send(parts)
    manifest = parts.manifest.to_document() | {"\ud800": 1}
    problem = refused(line, parts, 422, "document_invalid", manifest=manifest)
    assert "unknown fields" in problem["detail"]
