"""Faults of live engines: each is named, and the engine serves on, unchanged."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from plait.codec.algebra import detect
from plait.codec.chunks import pack_chunks
from plait.codec.frames import encode_delta
from plait.cut import plain_cut
from plait.errors import (
    BaseMismatch,
    ChunkInvalid,
    DigestMismatch,
    EngineRefused,
    EngineUnavailable,
    LayoutChanged,
    MapUnproven,
    ObjectMissing,
    PlaitError,
    ReplicaUnproven,
    SizeMismatch,
)
from plait.layout import Layout, TensorSpec
from plait.tensors import layout_of_tensors
from plait.weights import fingerprint_weights
from plait_rollout.engine import MoveStep
from plait_rollout.sglang import adapter
from plait_rollout.sglang.adapter import SglangEngine
from plait_rollout.sglang.driver import DriverState, MoveUnderWay
from plait_rollout.sglang.ranks import LOADER
from plait_rollout.sglang.reload import ReloadEngine
from plait_rollout.sglang.spool import Spool
from tests.sglang.driver import POINTS
from tests.sglang.live import PROMPT, ROOT, Live, differing, start
from tests.sglang.tiny import (
    changed,
    make_tiny,
    manifest_of,
    move_of,
    step_between,
    weights_of,
    write_state,
)

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def live(tmp_path_factory: Any) -> Iterator[Live]:
    engine = start(tmp_path_factory.mktemp("faults"), "qwen3", tie=False, tp=2)
    yield engine
    engine.running.stop()


@pytest.fixture
def engine(live: Live) -> Iterator[SglangEngine]:
    with live.attached() as engine:
        engine._api.set_weight_version("policy@1#1")
        yield engine


@pytest.fixture
def unchanged(live: Live) -> Iterator[None]:
    """The test leaves A in the engine, bit for bit, and the engine serving it."""
    before, said = live.dump(), live.said()
    yield
    assert differing(live.dump(), before) == []
    assert live.said() == said


@pytest.mark.usefixtures("unchanged")
def test_a_move_from_another_base_is_refused(live: Live, engine: SglangEngine) -> None:
    with pytest.raises(BaseMismatch):
        engine.stage(live.move(step_between(live.chunks, live.b, live.c)))
    assert engine.version() == "policy@1#1"


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_up_proj.weight", "model.norm.weight"])
def test_live_bits_that_are_not_the_base_are_found_at_stage(
    live: Live, engine: SglangEngine, name: str
) -> None:
    everything = changed(live.a, seed=7, share=1.0)
    step = step_between(live.chunks, live.a, everything)
    live.disturb(f"flip {name}")
    try:
        with pytest.raises(BaseMismatch):
            engine.stage(live.move(step))
    finally:
        live.disturb(f"flip {name}")


@pytest.mark.usefixtures("unchanged")
def test_live_bits_that_change_between_stage_and_apply_are_found(
    live: Live, engine: SglangEngine
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    engine.stage(live.move(step_between(live.chunks, live.a, changed(live.a, seed=7, share=1.0))))
    live.disturb(f"flip {name}")
    # The undo writes back what was staged, so the foreign flip is gone too, and that is proven.
    with pytest.raises(EngineRefused, match="changed between stage and apply"):
        engine.apply()
    assert engine.version() == "policy@1#1"
    assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def cut_short(data: bytes) -> bytes:
    return data[:-7]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("lie", "error"), [(flipped, DigestMismatch), (cut_short, SizeMismatch)])
def test_a_damaged_chunk_is_refused(
    live: Live,
    engine: SglangEngine,
    tmp_path: Path,
    lie: Callable[[bytes], bytes],
    error: type[PlaitError],
) -> None:
    with pytest.raises(error):
        engine.stage(live.move(step_between(tmp_path, live.a, live.b, lie=lie)))


@pytest.mark.usefixtures("unchanged")
def test_a_chunk_that_vanished_is_refused(live: Live, engine: SglangEngine, tmp_path: Path) -> None:
    step = step_between(tmp_path, live.a, live.b)
    step.chunks[0].unlink()
    with pytest.raises(ObjectMissing):
        engine.stage(live.move(step))


@pytest.mark.usefixtures("unchanged")
def test_an_index_beyond_its_frame_is_refused(
    live: Live, engine: SglangEngine, tmp_path: Path
) -> None:
    """A chunk that was made for a larger frame, under a manifest that names the true cut."""
    longer = {**live.a, "zzz": live.a["model.norm.weight"].clone()}
    changed_tail = {**longer, "zzz": live.b["model.norm.weight"]}
    old, new = weights_of(longer), weights_of(changed_tail)
    (frame,) = plain_cut(old.layout, for_anchor=False).frames
    (chunk,) = pack_chunks([encode_delta(0, frame, detect(frame, old, new))])
    base = fingerprint_weights(weights_of(live.a))
    manifest = manifest_of(live.layout, live.cut, base, base + chunk.increment, [chunk])
    path = tmp_path / "chunk"
    path.write_bytes(chunk.data)
    with pytest.raises(ChunkInvalid):
        engine.stage(live.move(MoveStep(manifest, "forward", (path,))))


@pytest.mark.usefixtures("unchanged")
def test_a_move_of_another_layout_is_refused(
    live: Live, engine: SglangEngine, tmp_path: Path
) -> None:
    odd = {**live.a, "model.norm.weight": live.a["model.norm.weight"][:-2].clone()}
    step = step_between(tmp_path, odd, changed(odd, seed=1))
    layout = layout_of_tensors(odd)
    with pytest.raises(LayoutChanged):
        engine.stage(move_of(layout, plain_cut(layout, for_anchor=False), [step], "policy@2#2"))


@pytest.mark.usefixtures("unchanged")
def test_a_layout_of_another_dtype_or_shape_cannot_be_mapped(live: Live) -> None:
    def with_norm(dtype: str, items: int) -> Layout:
        others = [t for t in live.layout.tensors if t.name != "model.norm.weight"]
        return Layout.of([*others, TensorSpec("model.norm.weight", dtype, (items,))])

    with live.adapter() as engine:
        for layout in (with_norm("F32", 64), with_norm("BF16", 60)):
            with pytest.raises(MapUnproven, match=r"model\.norm\.weight"):
                engine.attach(layout)


@pytest.mark.usefixtures("unchanged")
def test_an_engine_without_the_loader_is_not_asked_to_run_it(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang dies of an unknown loader."""
    monkeypatch.setattr(adapter, "LOADER", "plait_rollout.sglang.hook.unknown")
    with live.adapter() as engine, pytest.raises(MapUnproven, match="custom-weight-loader"):
        engine.attach(live.layout)


@pytest.mark.usefixtures("unchanged")
def test_a_write_that_gets_lost_is_undone(live: Live, engine: SglangEngine) -> None:
    engine.stage(live.move(step_between(live.chunks, live.a, live.b)))
    live.disturb("lose-writes 1")
    with pytest.raises(EngineRefused, match="undone"):
        engine.apply()
    assert engine.version() == "policy@1#1"
    assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))
    # And the replica is as good as ever.
    engine.stage(live.move(step_between(live.chunks, live.a, live.b)))
    engine.apply()
    engine.undo("policy@1#1")


@pytest.mark.usefixtures("unchanged")
def test_an_engine_that_cannot_be_proven_stays_paused_until_it_is(
    live: Live, engine: SglangEngine
) -> None:
    engine.stage(live.move(step_between(live.chunks, live.a, live.b)))
    live.disturb("garble-writes 1000000")
    with pytest.raises(ReplicaUnproven):
        engine.apply()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(live.generate(4)))
    asking.start()
    # Were it running, it would answer before it is mapped anew; nothing waits for a clock here.
    with pytest.raises(ReplicaUnproven):
        engine.attach(live.layout)
    assert answers == []
    live.disturb("lose-writes 0", resume=False)
    report = engine.attach(live.layout)
    assert report.fingerprint == fingerprint_weights(weights_of(live.a))
    asking.join(300)
    assert answers[0]["meta_info"]["weight_version"] == "policy@1#1"


@pytest.mark.usefixtures("unchanged")
def test_a_second_agent_is_refused(live: Live, engine: SglangEngine) -> None:
    with live.adapter() as other, pytest.raises(EngineRefused, match="another agent"):
        other.attach(live.layout)


@pytest.mark.usefixtures("unchanged")
def test_the_hook_opens_nothing_outside_its_spool(live: Live, tmp_path: Path) -> None:
    outside = tmp_path / ("0" * 32 + ".json")
    outside.write_text(json.dumps({"format": "plait-spool/1", "id": "0" * 32, "kind": "detach"}))
    refused = Spool(live.running.spool).reports / "refused.rank-0.json"
    for path in (str(outside), f"{live.running.spool}/requests/../../x.json", "", "\0"):
        refused.unlink(missing_ok=True)
        live.call(LOADER, path or "x")
        assert json.loads(refused.read_text())["error"]["code"] == "engine_refused"


@pytest.mark.usefixtures("unchanged")
def test_every_sample_is_stamped_with_the_version_that_made_it(
    live: Live, engine: SglangEngine
) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
        "stream": True,
    }
    url = f"{live.running.url}/generate"
    step = step_between(live.chunks, live.a, live.b)
    with httpx.stream("POST", url, json=body, timeout=300) as answer:
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines))
        engine.stage(live.move(step, stamp="policy@2#2"))
        engine.apply()
        last = [json.loads(line) for line in lines][-1]
    assert first["meta_info"]["weight_version"] == "policy@1#1"
    spans = last["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["policy@1#1", "policy@2#2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 1500)
    assert live.generate(4)["meta_info"]["weight_version"] == "policy@2#2"
    engine.undo("policy@1#3")
    assert live.generate(4)["meta_info"]["weight_version"] == "policy@1#3"


@pytest.mark.usefixtures("unchanged")
def test_tensors_that_the_engine_does_not_hold_are_patched_by_the_agent(
    live: Live, tmp_path: Path
) -> None:
    a = {**live.a, "extra.head.weight": live.a["lm_head.weight"][:64].clone()}
    b = changed(a, seed=5)
    layout = layout_of_tensors(a)
    cut = plain_cut(layout, for_anchor=False)
    back = step_between(tmp_path, a, b, direction="reverse")
    with live.adapter() as engine, pytest.raises(MapUnproven, match=r"extra\.head\.weight"):
        engine.attach(layout)
    with live.adapter(weights_of(a)) as engine:
        report = engine.attach(layout)
        assert report.unheld == ("extra.head.weight",)
        assert report.fingerprint == fingerprint_weights(weights_of(a))
        engine.stage(move_of(layout, cut, [step_between(tmp_path, a, b)], "policy@2#2"))
        engine.apply()
        assert engine.fingerprint() == fingerprint_weights(weights_of(b))
    # Another agent finds the patched bits in the spool: the checkpoint has the old ones.
    with live.adapter() as engine:
        assert engine.attach(layout).fingerprint == fingerprint_weights(weights_of(b))
        engine.stage(move_of(layout, cut, [back], "policy@1#3"))
        engine.apply()
        assert engine.fingerprint() == fingerprint_weights(weights_of(a))


@pytest.mark.usefixtures("unchanged")
def test_a_reload_stamps_after_success_and_refuses_another_model(
    live: Live, tmp_path: Path
) -> None:
    with closing(ReloadEngine(live.running.url)) as loader:
        loader.load_directory(write_state(tmp_path / "b", live.model, live.b), "policy@2#2")
        assert loader.version() == "policy@2#2"
        with live.attached() as engine:
            assert engine.fingerprint() == fingerprint_weights(weights_of(live.b))
        with pytest.raises(EngineRefused):
            loader.load_directory(make_tiny(tmp_path / "llama", "llama"), "policy@3#3")
        with pytest.raises(PlaitError):
            loader.load_directory(tmp_path / "nowhere", "policy@3#3")
        assert loader.version() == "policy@2#2"
        loader.load_directory(live.model, "policy@1#4")


@pytest.mark.parametrize("point", POINTS)
def test_an_agent_that_is_killed_leaves_an_engine_that_the_next_one_proves(
    live: Live, point: str
) -> None:
    with live.attached() as engine:
        engine._api.set_weight_version("policy@1#1")
    command = [sys.executable, "-m", "tests.sglang.driver"]
    arguments = [str(live.folder), live.running.url, point]
    ended = subprocess.run([*command, *arguments], cwd=ROOT, timeout=300, check=False)
    assert ended.returncode == -9
    held = {
        str(fingerprint_weights(weights_of(live.a))): "policy@1#1",
        str(fingerprint_weights(weights_of(live.b))): "policy@2#2",
    }
    with live.attached() as engine:
        found = engine.fingerprint()
        assert engine.version() == held[str(found)]
        assert live.generate(4)["meta_info"]["weight_version"] == engine.version()
        if point.endswith(":resume"):
            assert engine.version() == "policy@2#2"
            back = step_between(live.chunks, live.a, live.b, direction="reverse")
            engine.stage(live.move(back, stamp="policy@1#3"))
            engine.apply()
        assert engine.fingerprint() == fingerprint_weights(weights_of(live.a))


def test_a_restarted_engine_is_noticed_and_found_at_what_it_holds(live: Live) -> None:
    """Last in this file: it replaces the engine."""
    forward = step_between(live.chunks, live.a, live.b)
    with live.adapter() as engine:
        engine.attach(live.layout)
        engine.stage(live.move(forward))
        engine.apply()
        # A state file of a move under way is about the engine that was, not about the next one.
        spool = Spool(live.running.spool)
        left = DriverState.read(spool)
        assert left is not None
        a, b = (fingerprint_weights(weights_of(state)) for state in (live.a, live.b))
        under_way = MoveUnderWay("0" * 32, a, b, "policy@1#1", "policy@2#2")
        replace(left, under_way=under_way).write(spool)
        live.running.stop()
        with pytest.raises(EngineUnavailable):
            engine.fingerprint()
        port = int(live.running.url.rsplit(":", 1)[1])
        live.running = start(live.folder, "qwen3", tie=False, tp=2, port=port).running
        with pytest.raises(EngineUnavailable):
            engine.stage(live.move(step_between(live.chunks, live.b, live.c)))
        assert engine.attach(live.layout).fingerprint == a
        assert engine.version() == "default"
        engine.stage(live.move(forward))
        engine.apply()
        assert engine.fingerprint() == b
