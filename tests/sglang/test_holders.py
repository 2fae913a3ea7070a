"""Holders of parts, without an engine: any partition moves and proves like the whole."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cut import plain_cut
from plait.errors import BaseMismatch, EngineRefused, FormatError, MapUnproven, ReplicaUnproven
from plait.layout import Layout, TensorSpec
from plait.weights import fingerprint_weights
from plait_rollout.sglang.chain import Step, added_up, check_chain
from plait_rollout.sglang.holder import Holder
from plait_rollout.sglang.ownership import ownership, total
from plait_rollout.sglang.pieces import Piece
from tests.sglang.grain import column_cut
from tests.sglang.tiny import State, changed, layout_of, step_between, weights_of

ROWS, COLUMNS = 24, 16


def state(seed: int = 0) -> State:
    torch.manual_seed(seed)
    return {
        "matrix": torch.randn(ROWS, COLUMNS).bfloat16(),
        "norm": torch.randn(COLUMNS).bfloat16(),
        "split": torch.randn(ROWS, COLUMNS).bfloat16(),
    }


def two_ranks(weights: State) -> tuple[Layout, list[Holder], list[dict[str, torch.Tensor]]]:
    """`matrix` in rows behind padding, `split` in columns, `norm` on both."""
    layout = layout_of(weights)
    holders, storages = [], []
    for rank in range(2):
        half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        columns = slice(rank * COLUMNS // 2, (rank + 1) * COLUMNS // 2)
        held = {
            "fused": torch.cat([torch.zeros(5, COLUMNS).bfloat16(), weights["matrix"][half]]),
            "norm": weights["norm"].clone(),
            "split": weights["split"][:, columns].clone().contiguous(),
        }
        items = ROWS // 2 * COLUMNS
        width = COLUMNS // 2
        pieces = (
            Piece("matrix", "fused", (items,), rank * items, (1,), 5 * COLUMNS, (1,)),
            Piece("norm", "norm", (COLUMNS,), 0, (1,), 0, (1,)),
            Piece("split", "split", (ROWS, width), rank * width, (COLUMNS, 1), 0, (width, 1)),
        )
        storages.append(held)
        holders.append(Holder(layout, pieces, lambda held=held: held))  # type: ignore[misc]
    return layout, holders, storages


def steps_of(folder: Path, states: list[State], cut: Any, *, back: bool = False) -> list[Step]:
    steps = []
    for old, new in itertools.pairwise(states):
        step = step_between(folder, old, new, cut=cut)
        files = {c.digest: p for c, p in zip(step.manifest.chunks, step.chunks, strict=True)}
        locate = lambda chunk, files=files: files[chunk.digest]  # noqa: E731
        steps.append(Step(step.manifest, "reverse" if back else "forward", locate))
    return steps[::-1] if back else steps


def same_bits(held: list[dict[str, torch.Tensor]], wanted: State) -> bool:
    _, _, expected = two_ranks(wanted)
    return all(
        np.array_equal(a[name].view(torch.int16).numpy(), b[name].view(torch.int16).numpy())
        for a, b in zip(held, expected, strict=True)
        for name in a
    )


@pytest.mark.parametrize("make_cut", [plain_cut, column_cut], ids=["plain", "columns"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 3), share=st.floats(0.01, 1))
def test_a_chain_moves_two_ranks_like_the_whole(
    make_cut: Any, tmp_path_factory: Any, seed: int, length: int, share: float
) -> None:
    states = [state(seed)]
    for number in range(length):
        states.append(changed(states[-1], seed=seed + number, share=share))
    layout, holders, storages = two_ranks(states[0])
    cut = make_cut(layout, for_anchor=False) if make_cut is plain_cut else make_cut(layout)
    owned = ownership(layout, [holder.pieces for holder in holders])
    folder = tmp_path_factory.mktemp("chunks")
    prints = [fingerprint_weights(weights_of(each)) for each in states]

    def read() -> Any:
        pairs = zip(holders, owned.shared, strict=True)
        return total(owned, [holder.fingerprint(shared) for holder, shared in pairs])[0]

    assert read() == prints[0]
    for back in (False, True):
        steps = steps_of(folder, states, cut, back=back)
        check_chain(layout.digest, cut, steps)
        staged = [
            holder.stage(added_up(cut, steps, holder.wants), shared)
            for holder, shared in zip(holders, owned.shared, strict=True)
        ]
        increment, _ = total(owned, [each.increment for each in staged])
        assert increment == (prints[0] - prints[-1] if back else prints[-1] - prints[0])
        for holder, each, shared in zip(holders, staged, owned.shared, strict=True):
            holder.apply(each, shared)
        assert read() == (prints[0] if back else prints[-1])
        assert same_bits(storages, states[0] if back else states[-1])
        for holder, each, shared in zip(holders, staged, owned.shared, strict=True):
            holder.undo(each, shared)
            holder.undo(each, shared)  # writes absolute bits: may be repeated
        assert same_bits(storages, states[-1] if back else states[0])
        for holder, each, shared in zip(holders, staged, owned.shared, strict=True):
            holder.apply(each, shared)


def test_bits_that_changed_since_stage_stop_an_apply_before_it_writes(tmp_path: Path) -> None:
    a = state()
    layout, (holder, _), (held, _) = two_ranks(a)
    cut = plain_cut(layout, for_anchor=False)
    steps = steps_of(tmp_path, [a, changed(a, seed=1, share=1.0)], cut)
    staged = holder.stage(added_up(cut, steps, holder.wants), frozenset())
    held["split"].view(-1).view(torch.int16)[0] ^= 1
    before = {name: tensor.clone() for name, tensor in held.items()}
    with pytest.raises(EngineRefused, match="'split' changed"):
        holder.apply(staged, frozenset())
    assert all(torch.equal(held[name], before[name]) for name in held)


def test_a_parameter_that_was_replaced_is_noticed() -> None:
    _, (holder, _), (held, _) = two_ranks(state())
    held["split"] = held["split"].t()
    with pytest.raises(EngineRefused, match="replaced 'split'"):
        holder.fingerprint(frozenset())


def test_a_rank_wants_only_the_frames_of_its_columns() -> None:
    layout, holders, _ = two_ranks(state())
    cut = column_cut(layout)
    split = layout.start_of("split")
    only_split = [
        replace(frame, segments=tuple(s for s in frame.segments if s.first_word >= split))
        for frame in cut.frames[:2]
    ]
    assert [[holder.wants(frame) for frame in only_split] for holder in holders] == [
        [True, False],
        [False, True],
    ]


def test_a_chain_with_a_hole_or_of_another_cut_is_refused(tmp_path: Path) -> None:
    a = state()
    b = changed(a, seed=1)
    c = changed(b, seed=2)
    layout = layout_of(a)
    cut = plain_cut(layout, for_anchor=False)
    first, second = steps_of(tmp_path, [a, b, c], cut)
    with pytest.raises(BaseMismatch, match="the next one leaves"):
        check_chain(layout.digest, cut, [second, first])
    with pytest.raises(FormatError, match="cut"):
        check_chain(layout.digest, column_cut(layout), [first])
    with pytest.raises(FormatError, match="no delta of layout"):
        check_chain("sha256:" + "0" * 64, cut, [first])


def test_holders_that_disagree_on_what_both_hold_prove_nothing() -> None:
    layout, holders, storages = two_ranks(state())
    owned = ownership(layout, [holder.pieces for holder in holders])
    storages[1]["norm"].view(torch.int16)[0] ^= 1
    tallies = [h.fingerprint(s) for h, s in zip(holders, owned.shared, strict=True)]
    with pytest.raises(ReplicaUnproven, match="disagree"):
        total(owned, tallies)


def test_maps_that_overlap_or_leave_gaps_are_refused() -> None:
    layout = Layout.of([TensorSpec("x", "BF16", (4, 4)), TensorSpec("y", "BF16", (2,))])
    rows = lambda first, count: Piece("x", "p", (count * 4,), first * 4, (1,), 0, (1,))  # noqa: E731
    assert ownership(layout, [[rows(0, 2)], [rows(2, 2)]]).unheld == ("y",)
    assert ownership(layout, [[rows(0, 4)], [rows(0, 4)]]).groups == (((0, 0), (1, 0)),)
    with pytest.raises(MapUnproven, match="different blocks"):
        ownership(layout, [[rows(0, 3)], [rows(2, 2)]])
    with pytest.raises(MapUnproven, match="holds 8 of the 16 items"):
        ownership(layout, [[rows(0, 2)], []])
