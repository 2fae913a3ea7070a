"""Moves of real engines: every way of getting to a version gives the bits of a full reload."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.weights import fingerprint_weights
from tests.sglang.live import Live, differing, start
from tests.sglang.tiny import step_between, weights_of, write_state

pytestmark = pytest.mark.sglang

CASES = [("qwen3", True, 1), ("qwen3", False, 2), ("llama", False, 1), ("qwen3_moe", False, 2)]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}-tied{case[1]}-tp{case[2]}"
)
def live(request: Any, tmp_path_factory: Any) -> Iterator[Live]:
    kind, tie, tp = request.param
    engine = start(tmp_path_factory.mktemp(kind), kind, tie=tie, tp=tp)
    yield engine
    engine.running.stop()


@pytest.fixture(scope="module")
def reloaded(live: Live) -> dict[str, Any]:
    """What full reloads of A, B and D look like from inside; the engine ends on A."""
    seen = {}
    for name, state in (("b", live.b), ("d", live.d), ("a", live.a)):
        live.load_from_disk(write_state(live.folder / f"full-{name}", live.model, state))
        seen[name] = (live.dump(), live.checksums(), live.said())
    assert differing(seen["a"][0], seen["b"][0])
    assert seen["a"][2] != seen["b"][2]
    return seen


def require_same(live: Live, reference: tuple[Any, Any, Any]) -> None:
    bits, checksums, said = reference
    assert differing(live.dump(), bits) == []
    assert live.checksums() == checksums
    assert live.said() == said


def test_forward_reverse_chain_and_undo_give_the_bits_of_a_full_reload(
    live: Live, reloaded: dict[str, Any]
) -> None:
    ab = step_between(live.chunks, live.a, live.b)
    bc = step_between(live.chunks, live.b, live.c)
    cd = step_between(live.chunks, live.c, live.d)
    with live.attached() as engine:
        assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))
        engine.stage(live.move(ab, stamp="policy@2#2"))
        engine.apply()
        assert engine.version() == "policy@2#2"
        require_same(live, reloaded["b"])

        engine.undo("policy@1#3")
        assert engine.version() == "policy@1#3"
        require_same(live, reloaded["a"])

        report = engine.stage(live.move(ab, bc, cd, stamp="policy@4#4"))
        assert report.changed_elements > 0
        engine.apply()
        require_same(live, reloaded["d"])

        back = [
            step_between(live.chunks, old, new, direction="reverse")
            for old, new in ((live.c, live.d), (live.b, live.c), (live.a, live.b))
        ]
        engine.stage(live.move(*back, stamp="policy@1#5"))
        engine.apply()
        require_same(live, reloaded["a"])
        assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))


def test_a_frame_of_columns_and_a_frame_of_rows_reach_the_right_ranks(
    live: Live, reloaded: dict[str, Any]
) -> None:
    from tests.sglang.grain import column_cut

    cut = column_cut(live.layout)
    there = step_between(live.chunks, live.a, live.b, cut=cut)
    back = step_between(live.chunks, live.a, live.b, cut=cut, direction="reverse")
    with live.attached() as engine:
        for step, name in ((there, "b"), (back, "a")):
            move = live.move(step)
            engine.stage(type(move)(move.layout, cut, move.base, move.target, [step], move.stamp))
            engine.apply()
            require_same(live, reloaded[name])


def test_nan_payloads_and_negative_zeros_survive(live: Live, tmp_path: Path) -> None:
    import torch

    odd = {name: tensor.clone() for name, tensor in live.a.items()}
    bits = odd["model.norm.weight"].view(-1).view(torch.int16)
    bits[:8] = torch.tensor([0x7FC1, 0x7FFF, -0x40, -0x8000, 0x7F80, -0x80, 1, 0x7F81]).short()
    there = step_between(tmp_path, live.a, odd)
    back = step_between(tmp_path, live.a, odd, direction="reverse")
    with live.attached() as engine:
        engine.stage(live.move(there))
        engine.apply()
        held = live.dump()
        for rank in range(live.tp):
            norm = held[f"{rank}/model.norm.weight"].view("<i2")
            assert norm[:8].tolist() == bits[:8].tolist()
        engine.stage(live.move(back))
        engine.apply()
        assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))


def test_an_unchanged_version_moves_only_the_stamp(live: Live, tmp_path: Path) -> None:
    same = step_between(tmp_path, live.a, live.a)
    assert same.chunks == ()
    before = live.dump()
    with live.attached() as engine:
        engine.stage(live.move(same, stamp="policy@9#9"))
        engine.apply()
        assert engine.version() == "policy@9#9"
    assert differing(live.dump(), before) == []
