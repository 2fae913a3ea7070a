"""Metadata of a publish: what training code has at hand becomes JSON, or is refused by name."""

import numpy as np
import pytest
import torch

from plait.errors import DocumentInvalid, LimitExceeded, UsageError
from plait_trainer.facts import facts_of


def test_numbers_of_torch_and_numpy_are_numbers() -> None:
    found = facts_of(
        {
            "loss": torch.tensor(0.5, requires_grad=True),
            "reward": np.float32(1.5),
            "count": np.int64(3),
            "parts": {"kl": [torch.tensor([2.0]), np.bool_(True)]},
        }
    )
    assert found == {"loss": 0.5, "reward": 1.5, "count": 3, "parts": {"kl": [2.0, True]}}


def test_what_is_not_finite_is_kept_as_text() -> None:
    nan, inf = float("nan"), float("inf")
    found = facts_of(
        {"loss": nan, "low": -inf, "norm": torch.tensor(inf), "all": [np.float16(nan)]}
    )
    assert found == {"loss": "nan", "low": "-inf", "norm": "inf", "all": ["nan"]}


@pytest.mark.parametrize("value", [torch.zeros(2), object(), {1, 2}, 2**60, "\ud800"])
def test_what_json_cannot_hold_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(DocumentInvalid, match="'odd'") as refused:
        facts_of({"fine": 1, "odd": value})
    assert refused.value.remedy


@pytest.mark.parametrize("metadata", [[1], "abc", None, {1: 2}])
def test_metadata_maps_names_to_values(metadata: object) -> None:
    with pytest.raises(UsageError, match="metadata"):
        facts_of(metadata)  # type: ignore[arg-type]


def test_metadata_stays_small() -> None:
    with pytest.raises(LimitExceeded):
        facts_of({f"part {number}": "x" * 1000 for number in range(100)})
