"""The local HTTP API beside an engine."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from plait_client.fetch import Fetcher
from plait_rollout.local_api import LocalApi
from plait_rollout.torch_module import TorchModuleEngine

from .line import Line
from .replicas import follower_of
from .states import copy_of, same_bits

NewLine = Callable[..., Line]


@pytest.fixture
def line(new_line: NewLine) -> Line:
    line = new_line()
    line.publish()
    line.publish()
    return line


@pytest.fixture
def live(line: Line) -> dict:  # type: ignore[type-arg]
    return copy_of(line.first)


@pytest.fixture
def http(line: Line, live: dict, fetcher: Fetcher) -> Iterator[httpx.Client]:  # type: ignore[type-arg]
    follower = follower_of(fetcher, line, TorchModuleEngine(live))
    with LocalApi(follower) as api, httpx.Client(base_url=api.url, timeout=30) as http:
        yield http


def test_nothing_is_said_to_be_served_before_it_is_proven(http: httpx.Client) -> None:
    version = http.get("/version")
    assert version.status_code == 200
    assert (version.json()["seq"], version.json()["fingerprint"]) == (None, None)
    ready = http.get("/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)


def test_a_program_beside_the_engine_asks_and_sends(
    http: httpx.Client,
    line: Line,
    live: dict,  # type: ignore[type-arg]
) -> None:
    went = http.post("/goto", json={"ref": "2"})
    assert (went.status_code, went.json()["seq"]) == (200, 2)
    assert same_bits(live, line.states[2])
    assert http.get("/version").json() == went.json()
    assert went.json()["stamp"] == f"{line.policy}@2#3"
    assert http.post("/max-lag", json={"versions": 1}).json()["seq"] == 2
    assert http.post("/at-least", json={"seq": 3, "timeout": 5}).json()["seq"] == 3
    assert http.post("/goto", json={"ref": "main~2"}).json()["seq"] == 1
    assert http.post("/goto", json={"ref": "main"}).json()["seq"] == 3
    assert http.get("/ready").status_code == 200
    status = http.get("/status").json()
    assert (status["phase"], status["moves"], status["pinned"]) == ("serving", 4, False)
    assert same_bits(live, line.head)


@pytest.mark.parametrize(
    ("path", "body", "code", "status"),
    [
        ("/goto", {"ref": "99"}, "not_found", 404),
        ("/goto", {"ref": ""}, "usage", 400),
        ("/goto", {"reff": "1"}, "usage", 400),
        ("/goto", [1], "usage", 400),
        ("/at-least", {"seq": "2"}, "usage", 400),
        ("/at-least", {"seq": 9, "timeout": 0.1}, "not_found", 404),
        ("/max-lag", {"versions": -1}, "usage", 400),
        ("/nowhere", {}, "not_found", 404),
        ("/goto", {"ref": "x" * 5000}, "limit_exceeded", 413),
    ],
)
def test_what_it_refuses_is_a_problem_document(
    http: httpx.Client, path: str, body: object, code: str, status: int
) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.headers["Content-Type"] == "application/problem+json"
    assert http.get("/status").status_code == 200


def test_other_paths_are_not_there(http: httpx.Client) -> None:
    assert http.get("/etc/passwd").status_code == 404
