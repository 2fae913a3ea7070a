"""The map read off a loader, without an engine: what becomes pieces, and what is refused."""

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import MapUnproven
from plait.layout import Layout, TensorSpec
from plait_rollout.sglang.pieces import Piece
from plait_rollout.sglang.recorder import live_tensors, record_map

Weights = Iterable[tuple[str, torch.Tensor]]

LAYOUT = Layout.of([TensorSpec("q", "BF16", (8, 6)), TensorSpec("s", "BF16", ())])


class Model(nn.Module):
    """A fused parameter, a scalar, and a loader made of two functions."""

    def __init__(self, load_q: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.full((12, 6), 7.0).bfloat16(), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 7.0).bfloat16(), requires_grad=False)
        self._load_q = load_q

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "q":
                self._load_q(self.fused.data, weight)
            else:
                self.scale.data.fill_(weight.item())


def mapped(load_q: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[Piece]:
    model = Model(load_q)
    try:
        return record_map(model.load_weights, live_tensors(model), LAYOUT)
    finally:
        # Whatever the loader did, recorded or refused, nothing reached the parameters.
        assert all(bool((tensor == 7).all()) for tensor in live_tensors(model).values())


def of_q(pieces: list[Piece]) -> Piece:
    (piece,) = (piece for piece in pieces if piece.tensor == "q")
    return piece


def test_rows_and_a_scalar_become_pieces() -> None:
    pieces = mapped(lambda p, w: p.narrow(0, 4, 4).copy_(w.narrow(0, 2, 4)))
    assert of_q(pieces) == Piece("q", "fused", (24,), 12, (1,), 24, (1,))
    assert Piece("s", "scale", (1,), 0, (1,), 0, (1,)) in pieces


def test_columns_become_a_piece_of_two_sides() -> None:
    pieces = mapped(lambda p, w: p[:8, :3].copy_(w[:, 3:]))
    assert of_q(pieces) == Piece("q", "fused", (8, 3), 3, (6, 1), 0, (6, 1))


def test_a_transposed_copy_is_sorted_by_the_tensors_own_order() -> None:
    pieces = mapped(lambda p, w: p.view(-1)[:48].view(6, 8).copy_(w.t()))
    assert of_q(pieces) == Piece("q", "fused", (8, 6), 0, (6, 1), 0, (1, 8))


def test_padding_and_copies_of_nothing_are_left_alone() -> None:
    def load(p: torch.Tensor, w: torch.Tensor) -> None:
        p[8:].zero_()
        p[8:].fill_(0)
        p[12:].copy_(w[:0])
        p[:8].copy_(w)

    assert of_q(mapped(load)).items == 48


def test_a_copy_of_the_probe_is_as_good_as_the_probe() -> None:
    load = mapped(lambda p, w: p[:8].copy_(w.to("cpu").contiguous().clone()))
    assert of_q(load) == Piece("q", "fused", (48,), 0, (1,), 0, (1,))


def test_a_tie_that_is_loaded_twice_is_one_piece() -> None:
    assert of_q(mapped(lambda p, w: (p[:8].copy_(w), p[:8].copy_(w)))).items == 48


def test_copies_from_a_thread_pool_are_recorded() -> None:
    def load(p: torch.Tensor, w: torch.Tensor) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [pool.submit(p[row].copy_, w[row]) for row in range(8)]
            assert all(job.result() is not None for job in jobs)

    assert sum(piece.items for piece in mapped(load) if piece.tensor == "q") == 48


def test_a_copy_that_escapes_to_another_thread_cannot_write() -> None:
    import threading

    failures: list[BaseException] = []

    def escaped(p: torch.Tensor, w: torch.Tensor) -> None:
        try:
            p[:8].copy_(w)
        except BaseException as error:  # noqa: BLE001 - what the thread would have died of
            failures.append(error)

    def load(p: torch.Tensor, w: torch.Tensor) -> None:
        thread = threading.Thread(target=escaped, args=(p, w))
        thread.start()
        thread.join()

    assert [piece.tensor for piece in mapped(load)] == ["s"]
    assert isinstance(failures[0], NotImplementedError)


@pytest.mark.parametrize(
    ("load", "match"),
    [
        (lambda p, w: p[:8].copy_(w * 2), "computes"),
        (lambda p, w: p[:8].add_(w), "add_"),
        (lambda p, w: torch.add(p[:8], 1, out=p[:8]), "add.out"),
        (lambda p, w: p[:8].copy_(w.float()), "casts"),
        (lambda p, w: p[:8].copy_(torch.cat([w[:4], w[4:]])), "computes"),
        (lambda p, w: p[:8].copy_(w[:1]), "nested block"),
        (lambda p, w: (p[:4].copy_(w[:4]), p[2:6].copy_(w[4:])), "two places"),
        (lambda p, w: p.copy_(w), "refuses 'q'"),
        (lambda p, w: p[:8].copy_(w) if w.sum() > 0 else None, "refuses 'q'"),
    ],
    ids=["scaled", "added", "out", "cast", "joined", "broadcast", "overlapping", "shape", "branch"],
)
def test_what_is_no_plain_placement_is_refused(
    load: Callable[[torch.Tensor, torch.Tensor], Any], match: str
) -> None:
    with pytest.raises(MapUnproven, match=match):
        mapped(load)
