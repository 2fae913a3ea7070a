"""Chunks: in by digest, out by range, and never believed unread."""

import secrets

import pytest
from fastapi.testclient import TestClient

from plait.canonical import digest_of
from plait.limits import CHUNK_BYTES_MAX
from plait.store import MemoryStore, object_key
from tests.server.lines import code_of, grown_line, held, plan


def uploaded(http: TestClient, size: int = 1000) -> tuple[str, bytes]:
    data = secrets.token_bytes(size)
    assert http.put(f"/v1/chunks/{digest_of(data)}", content=data).status_code == 201
    return digest_of(data), data


def missing(http: TestClient, digest: str) -> list[str]:
    answer = http.post("/v1/chunks:missing", json={"digests": [digest]})
    found: list[str] = answer.json()["missing"]
    return found


def test_a_chunk_comes_back_whole_and_cacheable_for_ever(http: TestClient) -> None:
    digest, data = uploaded(http)
    answer = http.get(f"/v1/chunks/{digest}")
    assert answer.content == data
    assert answer.headers["etag"] == f'"{digest}"'
    assert "immutable" in answer.headers["cache-control"]
    head = http.head(f"/v1/chunks/{digest}")
    assert (head.status_code, head.headers["content-length"]) == (200, "1000")
    assert head.content == b""
    same = http.get(f"/v1/chunks/{digest}", headers={"if-none-match": f'"{digest}"'})
    assert (same.status_code, same.content) == (304, b"")


def test_an_empty_chunk_is_a_chunk(http: TestClient) -> None:
    digest = digest_of(b"")
    assert http.put(f"/v1/chunks/{digest}", content=b"").status_code in (200, 201)
    answer = http.get(f"/v1/chunks/{digest}")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_chunk_larger_than_a_slice_comes_back_whole(http: TestClient) -> None:
    digest, data = uploaded(http, (17 << 20) + 3)
    assert http.get(f"/v1/chunks/{digest}").content == data
    part = http.get(f"/v1/chunks/{digest}", headers={"range": f"bytes=5-{(9 << 20)}"})
    assert part.content == data[5 : (9 << 20) + 1]


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [("bytes=0-9", 0, 10), ("bytes=990-", 990, 1000), ("bytes=-10", 990, 1000),
     ("bytes=5-99999", 5, 1000), ("bytes=999-999", 999, 1000), ("bytes=-5000", 0, 1000)],
)  # fmt: skip
def test_a_range_is_answered_with_that_range(
    http: TestClient, header: str, start: int, end: int
) -> None:
    digest, data = uploaded(http)
    answer = http.get(f"/v1/chunks/{digest}", headers={"range": header})
    assert answer.status_code == 206
    assert answer.content == data[start:end]
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/1000"


@pytest.mark.parametrize("header", ["bytes=1000-", "bytes=2000-3000", "bytes=-0"])
def test_a_range_beyond_the_end_is_refused(http: TestClient, header: str) -> None:
    digest, _ = uploaded(http)
    answer = http.get(f"/v1/chunks/{digest}", headers={"range": header})
    assert (answer.status_code, code_of(answer)) == (416, "request_rejected")
    assert answer.headers["content-range"] == "bytes */1000"


@pytest.mark.parametrize("header", ["bytes=0-1,4-5", "items=0-1", "bytes=9-3", "bytes=-", "x"])
def test_a_range_that_can_not_be_read_gets_the_whole(http: TestClient, header: str) -> None:
    digest, data = uploaded(http)
    answer = http.get(f"/v1/chunks/{digest}", headers={"range": header})
    assert (answer.status_code, answer.content) == (200, data)


def test_other_bytes_than_the_name_says_are_not_stored(
    http: TestClient, store: MemoryStore
) -> None:
    data = secrets.token_bytes(100)
    before = {found.key for found in store.list()}
    for wrong in (data[:-1], data + b"x", data[:50] + bytes([data[50] ^ 1]) + data[51:]):
        answer = http.put(f"/v1/chunks/{digest_of(data)}", content=wrong)
        assert (answer.status_code, code_of(answer)) == (422, "digest_mismatch")
    assert http.get(f"/v1/chunks/{digest_of(data)}").status_code == 404
    assert {found.key for found in store.list()} == before


def test_a_chunk_beyond_the_limit_is_refused_by_its_announced_size(http: TestClient) -> None:
    headers = {"content-length": str(CHUNK_BYTES_MAX + 1)}
    answer = http.put(f"/v1/chunks/{digest_of(b'x')}", content=b"x", headers=headers)
    assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")
    unannounced = (b"\0" * (1 << 20) for _ in range(65))
    answer = http.put(f"/v1/chunks/{digest_of(b'x')}", content=unannounced)
    assert (answer.status_code, code_of(answer)) == (413, "limit_exceeded")


def test_only_what_is_missing_has_to_be_uploaded(http: TestClient) -> None:
    there, _ = uploaded(http)
    absent = [digest_of(bytes([n])) for n in range(3)]
    answer = http.post("/v1/chunks:missing", json={"digests": [absent[0], there, *absent]})
    assert answer.json() == {"missing": absent}
    assert http.post("/v1/chunks:missing", json={"digests": []}).json() == {"missing": []}
    assert http.post("/v1/chunks:missing", json={"digests": ["md5:1"]}).status_code == 422


def test_the_same_chunk_again_is_kept_under_its_key(http: TestClient) -> None:
    digest, data = uploaded(http)
    first = http.put(f"/v1/chunks/{digest}", content=data)
    assert first.status_code == 200
    assert http.put(f"/v1/chunks/{digest}", content=data).json() == first.json()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_object_under_the_right_name_is_mended_by_the_next_upload(
    http: TestClient, store: MemoryStore, damage: str
) -> None:
    line = grown_line(http, 1)
    base = held(line.seen[0])
    step = plan(line, "main", base).json()["steps"][0]
    digest, key = step["chunks"][0]["digest"], step["chunks"][0]["key"]
    data = store.get(key)
    if damage == "gone":
        store.delete(key)
    else:
        broken = data[:-3] if damage == "truncated" else bytes([data[0] ^ 1]) + data[1:]
        store.put(key, broken)
    # Sizes are compared when a publisher asks; bytes when somebody reads them.
    assert missing(http, digest) == ([] if damage == "flipped" else [digest])
    http.get(f"/v1/chunks/{digest}")
    assert missing(http, digest) == [digest]
    mended = http.put(f"/v1/chunks/{digest}", content=data)
    assert mended.status_code == 201
    assert mended.json()["key"] != key
    assert missing(http, digest) == []
    assert http.get(f"/v1/chunks/{digest}").content == data
    # The committed version finds the new object.
    again = plan(line, "main", base).json()["steps"][0]["chunks"][0]
    assert (again["digest"], again["key"]) == (digest, mended.json()["key"])


def test_a_chunk_that_the_store_gives_back_right_again_is_sound_again(
    http: TestClient, store: MemoryStore
) -> None:
    digest, data = uploaded(http, (5 << 20) + 1)
    key = http.put(f"/v1/chunks/{digest}", content=data).json()["key"]
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    http.get(f"/v1/chunks/{digest}", headers={"range": "bytes=1-"})
    assert missing(http, digest) == []  # a part proves nothing
    http.get(f"/v1/chunks/{digest}")
    assert missing(http, digest) == [digest]
    store.put(key, data)
    assert http.put(f"/v1/chunks/{digest}", content=data).json()["key"] == key
    assert missing(http, digest) == []


def test_a_lost_object_is_a_typed_answer(http: TestClient, store: MemoryStore) -> None:
    digest, data = uploaded(http)
    key = http.put(f"/v1/chunks/{digest}", content=data).json()["key"]
    store.delete(key)
    answer = http.get(f"/v1/chunks/{digest}")
    assert (answer.status_code, code_of(answer)) == (404, "object_missing")


def test_an_object_that_an_agent_wrote_is_adopted_once_it_has_been_read(
    http: TestClient, store: MemoryStore
) -> None:
    data = secrets.token_bytes(500)
    digest = digest_of(data)
    key = object_key(digest)
    url = f"/v1/chunks/{digest}:adopt"
    absent = http.post(url, json={"key": key, "size": 500})
    assert (absent.status_code, code_of(absent)) == (404, "object_missing")
    store.put(key, data[:-1])
    short = http.post(url, json={"key": key, "size": 500})
    assert (short.status_code, code_of(short)) == (422, "size_mismatch")
    store.put(key, data[:-1] + bytes([data[-1] ^ 255]))
    flipped = http.post(url, json={"key": key, "size": 500})
    assert (flipped.status_code, code_of(flipped)) == (422, "digest_mismatch")
    foreign = http.post(url, json={"key": object_key(digest_of(b"x")), "size": 500})
    assert (foreign.status_code, code_of(foreign)) == (422, "digest_mismatch")
    outside = http.post(url, json={"key": "../../etc/passwd", "size": 500})
    assert outside.status_code == 422
    assert http.head(f"/v1/chunks/{digest}").status_code == 404
    store.put(key, data)
    adopted = http.post(url, json={"key": key, "size": 500})
    assert (adopted.status_code, adopted.json()["key"]) == (201, key)
    assert http.post(url, json={"key": key, "size": 500}).status_code == 200
    assert http.get(f"/v1/chunks/{digest}").content == data
