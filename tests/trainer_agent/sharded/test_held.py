"""Two looks at a model: what a process holds of it must stay the same."""

import pytest
import torch

from plait.errors import LayoutChanged, LayoutInvalid
from plait_trainer.held import Held
from plait_trainer.live import LiveTensor, ShardView, TensorView


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> LiveTensor:
    return TensorView(name, torch.ones(shape), dtype)


def rows(name: str, first: int, count: int) -> LiveTensor:
    """Some rows of six."""
    return ShardView(name, torch.ones(count, 2), torch.float32, (6, 2), (first, 0), (count, 2))


FIRST = Held.of([whole("b", 3), rows("a", 0, 2)])


def test_the_same_tensors_in_another_order_are_the_same() -> None:
    FIRST.require_same(Held.of([rows("a", 0, 2), whole("b", 3)]))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ([rows("a", 0, 2)], "'b'"),
        ([rows("a", 0, 2), whole("b", 4)], "'b'"),
        ([rows("a", 0, 2), whole("b", 3, dtype=torch.bfloat16)], "'b'"),
        (
            [rows("a", 2, 2), whole("b", 3)],
            r"holds the block at \[2, 0\] of \[2, 2\] of 'a', and held the one at \[0, 0\]",
        ),
    ],
    ids=["gone", "another shape", "another dtype", "other rows"],
)
def test_another_look_that_shows_something_else_is_refused(
    now: list[LiveTensor], message: str
) -> None:
    with pytest.raises(LayoutChanged, match=message):
        FIRST.require_same(Held.of(now))


def test_a_process_holds_one_block_of_a_tensor() -> None:
    with pytest.raises(LayoutInvalid, match="occur twice: a"):
        Held.of([rows("a", 0, 2), rows("a", 2, 2)])
