"""A sweep: laid out once, it finds in every version what each frame alone finds."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait import codec
from plait.codec import sweep
from plait.codec.algebra import FrameDelta
from plait.codec.stretches import stretches
from plait.codec.sweep import Sweep, rounds
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import LayoutChanged
from plait.grain import grain_cut
from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights
from tests.core.strategies import changed_weights, random_weights

Items = NDArray[Any]
WIDE, NARROW = "w.down_proj.weight", "n.down_proj.weight"


def layout() -> Layout:
    """Rows, columns and common tensors, of two item sizes."""
    return Layout.of(
        [
            TensorSpec("a.q_proj.weight", "BF16", (16, 24)),
            TensorSpec(NARROW, "BF16", (12, 40)),
            TensorSpec("norm.weight", "BF16", (7,)),
            TensorSpec("v.q_proj.weight", "F32", (8, 5)),
            TensorSpec(WIDE, "F32", (6, 16)),
        ]
    )


def assert_as_alone(
    found: list[FrameDelta], frames: tuple[FrameSpec, ...], old: ArrayWeights, new: ArrayWeights
) -> None:
    for frame, delta in zip(frames, found, strict=True):
        alone = codec.detect(frame, old, new)
        assert np.array_equal(delta.positions, alone.positions)
        assert np.array_equal(delta.differences, alone.differences)
        assert delta.increment == alone.increment


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_a_sweep_serves_every_version(density: float) -> None:
    cut = grain_cut(layout(), for_anchor=False).cut
    kept = Sweep(cut.frames, layout())
    old = random_weights(layout(), 1)
    for version in range(3):
        new = changed_weights(old, 2 + version, density)
        for numbers in kept.rounds:
            found = list(kept.detect(numbers, old, new))
            assert_as_alone(found, cut.frames[numbers.start : numbers.stop], old, new)
        old = new


def test_any_range_of_frames_can_be_asked_for() -> None:
    cut = grain_cut(layout(), for_anchor=False).cut
    kept = Sweep(cut.frames, layout())
    old = random_weights(layout(), 1)
    new = changed_weights(old, 2, 0.3)
    for first, end in ((0, len(cut.frames)), (2, 5), (3, 4)):
        found = list(kept.detect(range(first, end), old, new))
        assert_as_alone(found, cut.frames[first:end], old, new)


@pytest.mark.parametrize("block", [1, 5, 64])
def test_changes_outgrow_the_room_they_began_with(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_BLOCK", block)
    cut = grain_cut(layout(), for_anchor=False).cut
    old = random_weights(layout(), 3)
    new = changed_weights(old, 4, 1.0)
    assert_as_alone(codec.detect_frames(cut.frames, old, new), cut.frames, old, new)


def test_parts_come_in_the_order_of_the_frame_not_of_the_layout() -> None:
    spec = Layout.of([TensorSpec(name, "BF16", (8,)) for name in ("a", "b", "c")])
    backward = FrameSpec(2, tuple(Segment(first, 4, 0, 1) for first in (20, 16, 8, 4, 0)))
    rest = FrameSpec(2, (Segment(12, 4, 0, 1),))
    Cut(spec.digest, (backward, rest)).check_against(spec)
    old = random_weights(spec, 5)
    new = changed_weights(old, 6, 0.8)
    found = codec.detect_frames([backward, rest], old, new)
    assert_as_alone(found, (backward, rest), old, new)


def test_frames_that_share_items_are_each_found_whole() -> None:
    spec = Layout.of([TensorSpec("a", "BF16", (64, 64))])
    rows, columns = Segment(0, 64 * 64, 0, 1), Segment(16, 16, 64, 64)
    frames = tuple(FrameSpec(2, (segment,)) for segment in [rows, columns] * 40)
    old = random_weights(spec, 1)
    new = changed_weights(old, 2, 1.0)
    assert_as_alone(codec.detect_frames(frames, old, new), frames, old, new)
    parts = sweep.parts_by_tensor(frames, spec)[0]
    for block in (None, 100):

        def read(tensor: TensorSpec, start: int, stop: int) -> tuple[Items, Items]:
            return old.bits(tensor.name)[start:stop], new.bits(tensor.name)[start:stop]

        joined = sweep.join(frames, sweep.compare(parts, read, block=block))
        assert_as_alone(joined, frames, old, new)


def test_a_stretch_has_room_for_whatever_its_parts_may_find() -> None:
    spec = Layout.of([TensorSpec("a", "BF16", (6, 8))])
    whole, columns = Segment(0, 48, 0, 1), Segment(2, 2, 8, 6)
    for segments, room in (([whole] * 3, 144), ([whole, columns], 60), ([columns], 42)):
        frames = [FrameSpec(2, (segment,)) for segment in segments]
        (stretch,) = stretches(sweep.parts_by_tensor(frames, spec)[0], 1 << 10)
        assert stretch.room == room


def test_threads_share_a_sweep() -> None:
    cut = grain_cut(layout(), for_anchor=False).cut
    kept = Sweep(cut.frames, layout())
    old = random_weights(layout(), 7)
    versions = [changed_weights(old, 8 + number, 0.5) for number in range(4)]
    found: dict[int, list[FrameDelta]] = {}

    def detect(number: int) -> None:
        found[number] = [
            delta
            for numbers in kept.rounds
            for delta in kept.detect(numbers, old, versions[number])
        ]

    threads = [threading.Thread(target=detect, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, new in enumerate(versions):
        assert_as_alone(found[number], cut.frames, old, new)


def test_weights_of_another_layout_are_refused_before_anything_is_read() -> None:
    other = Layout.of([TensorSpec("x", "BF16", (3,))])
    mine, foreign = random_weights(layout(), 1), random_weights(other, 1)
    kept = Sweep(grain_cut(layout(), for_anchor=False).cut.frames, layout())
    for old, new in ((foreign, mine), (mine, foreign)):
        with pytest.raises(LayoutChanged):
            kept.detect(kept.rounds[0], old, new)


def test_rounds_hold_frames_whose_columns_lie_in_the_same_rows() -> None:
    plain = plain_cut(layout(), for_anchor=False).frames
    assert list(rounds(plain)) == [range(n, n + 1) for n in range(len(plain))]
    # The last two begin lower down than the first, in rows that it reaches.
    beside = [
        FrameSpec(2, (Segment(0, 4, 12, 9),)),
        FrameSpec(2, (Segment(12 * 2 + 4, 4, 12, 7),)),
        FrameSpec(2, (Segment(12 * 5 + 8, 4, 12, 4),)),
    ]
    below = [FrameSpec(2, (Segment(12 * 9, 4, 12, 3),)), FrameSpec(2, (Segment(200, 8, 0, 1),))]
    assert list(rounds([*beside, *below])) == [range(3), range(3, 4), range(4, 5)]
    assert list(rounds([])) == []
    assert codec.detect_frames([], *[random_weights(layout(), 1)] * 2) == []
