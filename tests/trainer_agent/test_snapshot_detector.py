"""The snapshot detector: every change, every bit, and nothing half done."""

import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.codec.algebra import detect
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import FingerprintMismatch, LayoutChanged, PublishError
from plait.grain import SlottedCut, grain_cut
from plait.layout import Layout
from plait.weights import ArrayWeights, fingerprint_weights
from plait_trainer.detector import Capture, LiveTensors
from plait_trainer.dtypes import DtypeRule
from plait_trainer.live import TensorView, layout_of
from plait_trainer.share import Share
from plait_trainer.snapshot import SnapshotDetector
from plait_trainer.sources import MappingSource


def live_of(state: Mapping[str, torch.Tensor]) -> LiveTensors:
    return {t.spec.name: t for t in MappingSource(state, DtypeRule(None)).tensors()}


def attached(state: Mapping[str, torch.Tensor]) -> tuple[SnapshotDetector, Layout, Cut]:
    live = live_of(state)
    layout = layout_of(live.values())
    cut = plain_cut(layout, for_anchor=False)
    detector = SnapshotDetector()
    detector.attach(live, share_of(layout, cut))
    return detector, layout, cut


def share_of(layout: Layout, cut: Cut) -> Share:
    return Share.whole(layout, SlottedCut(cut, (0,) * len(cut.frames)))


def held(state: Mapping[str, torch.Tensor], layout: Layout) -> ArrayWeights:
    arrays = {
        name: np.array(live.bits(0, live.spec.items)) for name, live in live_of(state).items()
    }
    return ArrayWeights(layout, arrays)


def changed_words(cut: Cut, capture: Capture) -> list[int]:
    return [
        int(word)
        for number, delta in capture.deltas.items()
        for word in cut.frames[number].words_of(delta.positions)
    ]


STATE_TYPES = st.sampled_from(
    [torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.int64, torch.float64]
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_capture_equals_the_codecs_own_comparison(data: st.DataObject) -> None:
    types = data.draw(st.lists(STATE_TYPES, min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 1 << 16))
    random = np.random.default_rng(seed)
    state = {}
    for number, dtype in enumerate(types):
        size = data.draw(st.integers(0, 40))
        values = torch.empty(size, dtype=dtype)
        values.view(torch.uint8)[:] = torch.from_numpy(
            random.integers(0, 256, values.nbytes, np.uint8)
        )
        state[f"t{number}"] = values
    detector, layout, cut = attached(state)
    before = held(state, layout)
    for values in state.values():
        raw = values.view(torch.uint8)
        touched = torch.from_numpy(random.random(raw.numel()) < 0.1)
        raw[touched] ^= 0x81
    after = held(state, layout)
    capture = detector.capture(live_of(state))
    expected = {
        number: delta
        for number, frame in enumerate(cut.frames)
        if (delta := detect(frame, before, after)).count
    }
    assert capture.fingerprint == fingerprint_weights(after)
    assert list(capture.deltas) == list(expected)
    for number, delta in expected.items():
        found = capture.deltas[number]
        np.testing.assert_array_equal(found.positions, delta.positions)
        np.testing.assert_array_equal(found.differences, delta.differences)
        assert found.increment == delta.increment
    detector.keep(capture)
    assert detector.capture(live_of(state)).deltas == {}


def test_a_capture_that_nobody_took_over_is_made_again() -> None:
    state = {"a": torch.zeros(8, dtype=torch.bfloat16)}
    detector, _, cut = attached(state)
    before = detector.captured.bits("a").copy()
    state["a"][2] = 1
    assert changed_words(cut, detector.capture(live_of(state))) == [2]
    assert (detector.captured.bits("a") == before).all()
    state["a"][5] = 1
    capture = detector.capture(live_of(state))
    assert changed_words(cut, capture) == [2, 5]
    detector.keep(capture)
    assert detector.capture(live_of(state)).deltas == {}
    assert fingerprint_weights(detector.captured) == capture.fingerprint


def test_runs_and_frames_of_one_tensor_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.codec.sweep._BLOCK", 7)
    state = {"a": torch.zeros(50, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.bfloat16)}
    live = live_of(state)
    layout = layout_of(live.values())
    frames = tuple(FrameSpec(2, (Segment(first, 11, 0, 1),)) for first in range(0, 55, 11))
    cut = Cut(layout.digest, frames)
    detector = SnapshotDetector(threads=2)
    detector.attach(live, share_of(layout, cut))
    touched = [0, 6, 7, 10, 11, 13, 14, 48, 49]
    state["a"][touched] = 1
    state["b"][[0, 4]] = 1
    assert changed_words(cut, detector.capture(live)) == [*touched, 50, 54]


def test_nan_payloads_zeros_and_infinities_are_changes_like_any_other() -> None:
    patterns = [0x7FC1, 0x7FFF, 0xFFC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001]
    state = {"w": torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)}
    detector, _, _ = attached(state)
    assert detector.capture(live_of(state)).deltas == {}
    bits = state["w"].view(torch.int16)
    bits[0], bits[5], bits[6] = 0x7FC2, -0x8000, 0  # another payload, 0.0 → -0.0, -0.0 → 0.0
    delta = detector.capture(live_of(state)).deltas[0]
    assert delta.positions.tolist() == [0, 5, 6]
    assert delta.differences.tolist() == [1, 0x8000, 0x8000]


def test_a_value_that_becomes_nan_and_one_that_stops_being_it_are_both_found() -> None:
    state = {"w": torch.tensor([0.0, 1.0, 2.0, 1.0, float("nan")], dtype=torch.bfloat16)}
    detector, _, _ = attached(state)
    state["w"][3], state["w"][4] = float("nan"), 1.0
    assert detector.capture(live_of(state)).deltas[0].positions.tolist() == [3, 4]


def test_a_failed_capture_loses_nothing() -> None:
    state = {"a": torch.zeros(8, dtype=torch.bfloat16), "b": torch.zeros(8)}
    detector, _, cut = attached(state)
    state["a"][2] = 1
    state["b"][3] = 1

    class Broken(TensorView):
        def bits(self, start: int, stop: int) -> np.ndarray:
            raise PublishError("the device is gone")

    live = dict(live_of(state))
    with pytest.raises(PublishError, match="the device is gone"):
        detector.capture({**live, "b": Broken("b", state["b"], torch.float32)})
    assert changed_words(cut, detector.capture(live)) == [2, 8 + 2 * 3]


def test_weights_that_move_while_they_are_read_are_noticed() -> None:
    state = {"a": torch.zeros(8, dtype=torch.bfloat16)}
    detector, _, _ = attached(state)
    detector.captured.bits("a")[5] = 77
    with pytest.raises(FingerprintMismatch, match="something wrote to the copy"):
        detector.capture(live_of(state))


def test_a_base_stands_in_for_the_live_weights() -> None:
    state = {"a": torch.zeros(8, dtype=torch.bfloat16)}
    _, layout, cut = attached(state)
    base = held(state, layout)
    state["a"][6] = 1
    detector = SnapshotDetector()
    assert detector.attach(live_of(state), share_of(layout, cut), base=base) == fingerprint_weights(
        base
    )
    assert changed_words(cut, detector.capture(live_of(state))) == [6]
    other = live_of({"b": state["a"]})
    with pytest.raises(LayoutChanged, match="'b' is missing"):
        detector.attach(other, share_of(layout_of(other.values()), cut), base=base)


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_rows_and_columns_are_found_with_one_read_of_the_live_weights(
    threads: int,
) -> None:
    torch.manual_seed(threads)
    state = {
        "a.q_proj.weight": torch.randn(16, 48).bfloat16(),
        "a.down_proj.weight": torch.randn(48, 72).bfloat16().t().contiguous().t(),
        "a.norm.weight": torch.randn(7),
        "a.o_proj.weight": torch.randn(24, 1600),
    }
    live = live_of(state)
    layout = layout_of(live.values())
    cut = grain_cut(layout, for_anchor=False).cut
    detector = SnapshotDetector(threads=threads)
    detector.attach(live, share_of(layout, cut))
    old = held(state, layout)
    for tensor in state.values():
        tensor[torch.rand(tensor.shape) < 0.1] *= -1
    new = held(state, layout)
    capture = detector.capture(live_of(state))
    assert capture.fingerprint == fingerprint_weights(new)
    for number, frame in enumerate(cut.frames):
        wanted = detect(frame, old, new)
        found = capture.deltas[number]
        assert np.array_equal(found.positions, wanted.positions)
        assert np.array_equal(found.differences, wanted.differences)
    detector.keep(capture)
    assert not detector.capture(live_of(state)).deltas


def test_the_earlier_copy_is_let_go_of_before_another_is_made() -> None:
    state = {"a": torch.zeros(8, dtype=torch.bfloat16)}
    detector, layout, cut = attached(state)
    earlier = weakref.ref(detector.captured.bits("a"))
    held_on = []

    class Watched(TensorView):
        def bits(self, start: int, stop: int) -> np.ndarray:
            held_on.append(earlier() is not None)
            return super().bits(start, stop)

    live = {"a": Watched("a", state["a"], torch.bfloat16)}
    detector.attach(live, share_of(layout, cut))
    assert held_on == [False]
    last = weakref.ref(detector.captured.bits("a"))
    detector.close()
    detector.close()
    assert last() is None


def test_an_unattached_detector_is_refused() -> None:
    live = live_of({"a": torch.zeros(8, dtype=torch.bfloat16)})
    with pytest.raises(PublishError, match="isn't attached"):
        SnapshotDetector().capture(live)
