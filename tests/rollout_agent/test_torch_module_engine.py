"""A torch module moved in place: exact, atomic for readers, undone when it fails."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.cut import plain_cut
from plait.errors import (
    BaseMismatch,
    ChunkInvalid,
    CorruptionError,
    EngineRefused,
    EngineUnavailable,
    LayoutChanged,
    MapUnproven,
    ObjectMissing,
    PlaitError,
    ReplicaUnproven,
)
from plait.fingerprint import Fingerprint
from plait.tensors import StateDictWeights, bits_of
from plait_rollout.live_tensors import LiveTensors
from plait_rollout.torch_module import TorchModuleEngine

from .states import (
    Deltas,
    State,
    changed,
    copy_of,
    fine_cut,
    fingerprint_of,
    fresh_state,
    layout_of,
    same_bits,
)


@pytest.fixture
def deltas(tmp_path: Path) -> Deltas:
    return Deltas(tmp_path, plain_cut(layout_of(fresh_state()), for_anchor=False))


def attached(live: State, **options: Callable[..., None] | None) -> TorchModuleEngine:
    engine = TorchModuleEngine(live, **options)  # type: ignore[arg-type]
    assert engine.attach(layout_of(live)).fingerprint == fingerprint_of(live)
    return engine


def test_a_move_forward_and_back_is_exact_in_every_dtype(deltas: Deltas) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 1)
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, v2)
    assert engine.stage(deltas.move(step)).changed_elements > 0
    assert same_bits(live, v1)
    engine.apply()
    assert same_bits(live, v2)
    assert engine.version() == "p@2#2"
    back = replace(step, direction="reverse")
    engine.stage(deltas.move(back, stamp="p@1#3"))
    engine.apply()
    assert same_bits(live, v1)
    assert engine.version() == "p@1#3"
    assert engine.fingerprint() == fingerprint_of(v1)


def test_five_versions_are_added_up_into_one_move(deltas: Deltas) -> None:
    states = [fresh_state()]
    for seed in range(5):
        states.append(changed(states[-1], seed))
    live = copy_of(states[0])
    engine = attached(live)
    pairs = itertools.pairwise(states)
    engine.stage(deltas.move(*(deltas.step(old, new) for old, new in pairs)))
    engine.apply()
    assert same_bits(live, states[-1])


def test_there_and_back_in_one_chain_changes_nothing(deltas: Deltas) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, changed(v1, 1))
    report = engine.stage(deltas.move(step, replace(step, direction="reverse")))
    assert report.changed_elements == 0
    engine.apply()
    assert same_bits(live, v1)


@pytest.mark.parametrize("items", [1000, 64, 7])
@pytest.mark.parametrize("split", [False, True])
def test_the_result_does_not_depend_on_how_a_delta_is_cut(
    tmp_path: Path, items: int, split: bool
) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 3)
    live = copy_of(v1)
    engine = attached(live)
    fine = Deltas(tmp_path, fine_cut(layout_of(v1), items), split=split)
    engine.stage(fine.move(fine.step(v1, v2)))
    engine.apply()
    assert same_bits(live, v2)


def test_undo_takes_the_last_move_back_once(deltas: Deltas) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 1)
    live = copy_of(v1)
    engine = attached(live)
    with pytest.raises(EngineRefused, match="no applied move"):
        engine.undo("p@1#1")
    engine.stage(deltas.move(deltas.step(v1, v2)))
    engine.apply()
    engine.undo("p@1#3")
    assert same_bits(live, v1)
    assert engine.version() == "p@1#3"
    with pytest.raises(EngineRefused):
        engine.undo("p@1#3")
    engine.stage(deltas.move(deltas.step(v1, v2)))
    engine.apply()
    assert same_bits(live, v2)


def test_another_base_with_the_right_fingerprint_on_paper_is_refused(deltas: Deltas) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, changed(v1, 1))
    bits_of(live["embed.weight"])[:] += 1  # behind the engine's back
    before = copy_of(live)
    with pytest.raises(BaseMismatch, match="live bits"):
        engine.stage(deltas.move(step))
    with pytest.raises(EngineRefused, match="no move is staged"):
        engine.apply()
    assert same_bits(live, before)


def test_a_move_from_another_state_is_refused(deltas: Deltas) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 1)
    engine = attached(copy_of(v1))
    with pytest.raises(BaseMismatch, match="the module holds"):
        engine.stage(deltas.move(deltas.step(v2, changed(v2, 2))))


def test_what_changes_between_stage_and_apply_is_noticed_before_it_is_written(
    deltas: Deltas,
) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    engine.stage(deltas.move(deltas.step(v1, changed(v1, 1))))
    bits_of(live["embed.weight"])[:] += 1
    before = copy_of(live)
    with pytest.raises(EngineRefused, match="changed since the move was staged"):
        engine.apply()
    assert same_bits(live, before)
    with engine.generating():
        pass


def _flip(data: bytearray) -> bytes:
    data[-3] ^= 0x40
    return bytes(data)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_flip, CorruptionError),
        (lambda data: bytes(data[:-20]), CorruptionError),
        (lambda data: b"", CorruptionError),
        (lambda data: bytes(data) + b"x", CorruptionError),
    ],
)
def test_a_damaged_chunk_is_refused_and_nothing_is_written(
    deltas: Deltas, damage: Callable[[bytearray], bytes], error: type[PlaitError]
) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, changed(v1, 1))
    path = step.chunks[0]
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(error):
        engine.stage(deltas.move(step))
    assert same_bits(live, v1)


def test_missing_and_swapped_chunks_are_refused(tmp_path: Path) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    fine = Deltas(tmp_path, fine_cut(layout_of(v1), 100), split=True)
    step = fine.step(v1, changed(v1, 1))
    swapped = replace(step, chunks=(step.chunks[1], step.chunks[0], *step.chunks[2:]))
    with pytest.raises(CorruptionError):
        engine.stage(fine.move(swapped))
    with pytest.raises(PlaitError, match="files"):
        engine.stage(fine.move(replace(step, chunks=step.chunks[1:])))
    step.chunks[2].unlink()
    with pytest.raises(ObjectMissing):
        engine.stage(fine.move(step))
    assert same_bits(live, v1)


def test_an_index_out_of_range_is_refused(tmp_path: Path) -> None:
    """A chunk of a longer layout's cut, under a shorter one's: its positions run over."""
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    layout = layout_of(v1)
    wide = Deltas(tmp_path, fine_cut(layout, 400), split=True)
    step = wide.step(v1, changed(v1, 1))
    narrow_cut = fine_cut(layout, 20)
    manifest = replace(step.manifest, cut=narrow_cut.digest)
    narrow = Deltas(tmp_path, narrow_cut)
    with pytest.raises(ChunkInvalid):
        engine.stage(narrow.move(replace(step, manifest=manifest)))
    assert same_bits(live, v1)


def test_ties_are_read_under_both_names_and_written_once(tmp_path: Path) -> None:
    """The checkpoint holds both names of one memory: a delta of both moves it once."""
    v1 = fresh_state() | {"head.weight": fresh_state()["embed.weight"].clone()}
    v2 = changed(v1, 1)
    v2["head.weight"] = v2["embed.weight"].clone()
    live = copy_of(v1)
    live["head.weight"] = live["embed.weight"]
    engine = TorchModuleEngine(live)
    report = engine.attach(layout_of(v1))
    assert report.fingerprint == fingerprint_of(v1)
    assert any("tied" in note for note in report.notes)
    made = Deltas(tmp_path, fine_cut(layout_of(v1), 500))
    move = replace(made.move(made.step(v1, v2)), layout=layout_of(v1))
    engine.stage(move)
    engine.apply()
    assert same_bits(live, v2)
    assert engine.fingerprint() == fingerprint_of(v2)
    engine.undo("back")
    assert same_bits(live, v1)
    untied = changed(v1, 2)
    with pytest.raises(EngineRefused, match="differently"):
        engine.stage(replace(made.move(made.step(v1, untied)), layout=layout_of(v1)))
    assert same_bits(live, v1)


class Tied(torch.nn.Module):
    """An embedding whose transpose is the head, as small language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_a_tied_head_that_the_checkpoint_lacks_follows_the_embedding(tmp_path: Path) -> None:
    module = Tied()
    held = {n: t for n, t in module.state_dict().items() if n != "head.weight"}
    v1 = copy_of(held)
    v2 = copy_of(held)
    bits_of(v2["embed.weight"])[5 * 8 : 6 * 8] += 1
    bits_of(v2["steps"])[:] = 41
    engine = TorchModuleEngine(module)
    engine.attach(layout_of(v1))
    made = Deltas(tmp_path, fine_cut(layout_of(v1), 50))
    engine.stage(replace(made.move(made.step(v1, v2)), layout=layout_of(v1)))
    engine.apply()
    assert torch.equal(
        module.head.weight[5].view(torch.int16), v2["embed.weight"][5].view(torch.int16)
    )
    assert int(module.get_buffer("steps")) == 41


def test_an_untied_head_stays_as_it_is(tmp_path: Path) -> None:
    v1 = fresh_state() | {"head.weight": fresh_state()["embed.weight"].clone()}
    v2 = copy_of(v1)
    bits_of(v2["embed.weight"])[5 * 16 : 6 * 16] += 1
    live = copy_of(v1)
    engine = attached(live)
    made = Deltas(tmp_path, fine_cut(layout_of(v1), 50))
    engine.stage(replace(made.move(made.step(v1, v2)), layout=layout_of(v1)))
    engine.apply()
    assert same_bits({"h": live["head.weight"]}, {"h": v1["head.weight"]})
    assert same_bits(live, v2)


def test_a_module_that_is_not_the_policy_is_refused_by_name() -> None:
    state = fresh_state()
    other = copy_of(state)
    other["embed.weight"] = torch.zeros(63, 16).bfloat16()
    del other["scale"]
    with pytest.raises(LayoutChanged, match=r"embed\.weight.*scale|scale.*embed\.weight"):
        TorchModuleEngine(other).attach(layout_of(state))
    cloned_head = copy_of(state) | {"head.weight": state["embed.weight"].clone()}
    with pytest.raises(LayoutChanged, match=r"head\.weight"):
        TorchModuleEngine(cloned_head).attach(layout_of(state))


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    state = fresh_state()
    strided = copy_of(state)
    strided["embed.weight"] = torch.zeros(16, 64).bfloat16().t()
    with pytest.raises(MapUnproven, match="contiguous"):
        TorchModuleEngine(strided).attach(layout_of(state))
    shared = copy_of(state)
    storage = torch.zeros(32 * 16 + 8).bfloat16()
    shared["layers.0.up.weight"] = storage[:512].view(32, 16)
    shared["layers.0.down.weight"] = storage[8:].view(16, 32)
    with pytest.raises(MapUnproven, match="share"):
        TorchModuleEngine(shared).attach(layout_of(state))


def test_tensors_that_were_replaced_are_noticed(deltas: Deltas) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, changed(v1, 1))
    live["scale"] = live["scale"].clone()
    with pytest.raises(EngineUnavailable, match="replaced"):
        engine.stage(deltas.move(step))
    engine.attach(layout_of(live))
    engine.stage(deltas.move(step))
    engine.apply()
    assert same_bits(live, changed(v1, 1))


@pytest.mark.parametrize("failing", range(9))
def test_a_failure_after_k_of_n_frames_leaves_exactly_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 1)
    live = copy_of(v1)
    engine = attached(live)
    fine = Deltas(tmp_path, fine_cut(layout_of(v1), 300), split=True)
    step = fine.step(v1, v2)
    frames = len(step.manifest.chunks)
    engine.stage(fine.move(step))
    write, written = LiveTensors.write, 0

    def failing_write(*arguments: object) -> None:
        nonlocal written
        if written == failing:
            written += 1
            raise RuntimeError("device lost")
        written += 1
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveTensors, "write", failing_write)
    if failing < frames:
        with pytest.raises(EngineRefused, match="device lost"):
            engine.apply()
        assert same_bits(live, v1)
        assert engine.version() == ""
        with engine.generating() as stamp:
            assert stamp == ""
        engine.stage(fine.move(step))
    engine.apply()
    assert same_bits(live, v2)


def test_a_write_that_gets_lost_is_found_and_undone(
    deltas: Deltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    engine.stage(deltas.move(deltas.step(v1, changed(v1, 1))))
    write = LiveTensors.write
    calls = 0

    def losing(self: LiveTensors, frame: object, positions: object, bits: np.ndarray) -> None:  # type: ignore[type-arg]
        nonlocal calls
        calls += 1
        if calls == 1:
            bits = bits.copy()
            bits[0] ^= 1
        write(self, frame, positions, bits)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveTensors, "write", losing)
    with pytest.raises(EngineRefused, match="undone"):
        engine.apply()
    assert same_bits(live, v1)


def test_weights_that_cannot_be_proven_are_not_read_until_a_proof(
    deltas: Deltas, monkeypatch: pytest.MonkeyPatch
) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = attached(live)
    step = deltas.step(v1, changed(v1, 1))
    engine.stage(deltas.move(step))
    write = LiveTensors.write
    calls = 0

    def dying(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("device lost")
        write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LiveTensors, "write", dying)
        with pytest.raises(ReplicaUnproven):
            engine.apply()
    with pytest.raises(ReplicaUnproven), engine.generating():
        pass
    for name, tensor in v1.items():
        live[name].copy_(tensor)
    assert engine.attach(layout_of(v1)).fingerprint == fingerprint_of(v1)
    with pytest.raises(ReplicaUnproven), engine.generating():
        pass
    engine.stage(deltas.move(step))
    engine.apply()
    with engine.generating() as stamp:
        assert stamp == "p@2#2"
    assert same_bits(live, changed(v1, 1))


def test_no_reader_ever_sees_two_versions_at_once(tmp_path: Path) -> None:
    """x and y = x + 1 bit for bit, in every version; a reader checks the pair all the time."""
    x = torch.zeros(4096).bfloat16()
    states = []
    for step in range(1, 13):
        after = {"x": x.clone(), "y": x.clone()}
        bits_of(after["x"])[:] = step * 3
        bits_of(after["y"])[:] = step * 3 + 1
        states.append(after)
    live = copy_of(states[0])
    engine = attached(live)
    made = Deltas(tmp_path, fine_cut(layout_of(live), 512))
    torn: list[tuple[int, int]] = []
    reads, stop = 0, threading.Event()

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            with engine.generating():
                pair = int(bits_of(live["x"])[-1]), int(bits_of(live["y"])[0])
            reads += 1
            if pair[1] != pair[0] + 1:
                torn.append(pair)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for old, new in itertools.pairwise(states):
        seen = reads
        engine.stage(replace(made.move(made.step(old, new)), layout=layout_of(live)))
        engine.apply()
        while reads < seen + 50:
            stop.wait(0.001)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert torn == []
    assert same_bits(live, states[-1])


def test_a_generation_that_does_not_end_refuses_the_move_and_keeps_the_gate_open(
    deltas: Deltas,
) -> None:
    v1 = fresh_state()
    live = copy_of(v1)
    engine = TorchModuleEngine(live, pause_seconds=0.05)
    engine.attach(layout_of(live))
    engine.stage(deltas.move(deltas.step(v1, changed(v1, 1))))
    with engine.generating(), pytest.raises(EngineRefused, match="did not finish"):
        engine.apply()
    with engine.generating():
        assert same_bits(live, v1)


def test_prompts_cached_under_old_weights_are_dropped_before_generation_goes_on(
    deltas: Deltas,
) -> None:
    v1 = fresh_state()
    v2 = changed(v1, 1)
    live = copy_of(v1)
    cache: dict[str, tuple[str, int]] = {}
    order: list[str] = []

    def drop(stamp: str) -> None:
        order.append(f"applied {stamp}")
        cache.clear()

    engine = TorchModuleEngine(
        live,
        on_applied=drop,
        pause=lambda: order.append("pause"),
        resume=lambda: order.append("resume"),
    )
    engine.attach(layout_of(live))

    def answer(prompt: str) -> tuple[str, int]:
        with engine.generating() as stamp:
            if prompt not in cache:
                cache[prompt] = (stamp, int(bits_of(live["embed.weight"]).sum()))
            return cache[prompt]

    before = answer("hello")
    engine.stage(deltas.move(deltas.step(v1, v2)))
    engine.apply()
    after = answer("hello")
    assert before == ("", int(bits_of(v1["embed.weight"]).sum()))
    assert after == ("p@2#2", int(bits_of(v2["embed.weight"]).sum()))
    assert order == ["pause", "applied p@2#2", "resume"]


def test_a_cache_that_cannot_be_dropped_undoes_the_move(deltas: Deltas) -> None:
    v1 = fresh_state()
    live = copy_of(v1)

    def stuck(stamp: str) -> None:
        raise RuntimeError("cache is pinned")

    engine = attached(live, on_applied=stuck)
    engine.stage(deltas.move(deltas.step(v1, changed(v1, 1))))
    with pytest.raises(EngineRefused, match="cache is pinned"):
        engine.apply()
    assert same_bits(live, v1)
    assert engine.version() == ""


def test_a_whole_version_is_loaded_and_proven(deltas: Deltas) -> None:
    v1, other = fresh_state(), fresh_state(seed=9)
    live = copy_of(other)
    engine = attached(live)
    engine.load(StateDictWeights(layout_of(v1), v1), "p@1#1")
    assert same_bits(live, v1)
    assert engine.version() == "p@1#1"
    assert engine.attach(layout_of(v1)).fingerprint == fingerprint_of(v1)


def test_a_move_whose_sum_does_not_close_is_refused(deltas: Deltas) -> None:
    v1 = fresh_state()
    engine = attached(copy_of(v1))
    step = deltas.step(v1, changed(v1, 1))
    move = replace(deltas.move(step), target=Fingerprint(1, 2))
    with pytest.raises(PlaitError, match="target"):
        engine.stage(move)
