"""Errors cross HTTP as problem documents and come out as the same class."""

from operator import attrgetter
from typing import Any

import pytest

from plait.errors import (
    HeadMoved,
    PlaitError,
    RegistryUnavailable,
    RequestRejected,
    ServiceError,
    type_registry,
)
from plait.wire.problem import Problem, error_of, problem_of


@pytest.mark.parametrize("cls", sorted(type_registry.values(), key=attrgetter("code")))
def test_every_error_survives_its_document(cls: type[PlaitError]) -> None:
    error = cls("what went wrong", remedy="what helps", found=5)
    again = error_of(Problem.model_validate_json(problem_of(error).model_dump_json()))
    assert type(again) is cls
    assert (again.message, again.remedy, again.details) == (
        "what went wrong", "what helps", {"found": 5},
    )  # fmt: skip


def problem(**fields: Any) -> Problem:
    known = {"type": "/problems/x", "title": "x", "status": 409, "detail": "no", "code": "x"}
    return Problem.model_validate(known | fields)


def test_details_of_any_name_are_carried() -> None:
    details = {"remedy": 1, "message": 2, "self": 3}
    error = error_of(problem(code="head_moved", remedy="rebase", details=details))
    assert isinstance(error, HeadMoved)
    assert (error.message, error.remedy, error.details) == ("no", "rebase", details)


@pytest.mark.parametrize(
    ("status", "cls"),
    [(503, RegistryUnavailable), (429, RegistryUnavailable), (409, RequestRejected),
     (500, ServiceError)],
)  # fmt: skip
def test_an_unknown_code_means_what_its_status_says(status: int, cls: type[PlaitError]) -> None:
    assert type(error_of(problem(code="from_the_future", status=status))) is cls
