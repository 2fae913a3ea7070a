"""Tensors of more than 2^31 items: sparse files stand for them, and no index is cut to 32 bits."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait import codec
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.fingerprint import ZERO, fingerprint_at, fingerprint_run
from plait.grain import SlottedCut, grain_cut
from plait.layout import Layout, TensorSpec
from plait.limits import WORDS_MAX
from plait.weights import gather, pieces, scatter

ROWS, COLUMNS = 80_000, 32_768  # 2.6 · 10^9 items
ITEMS = ROWS * COLUMNS
NAMES = ("x.down_proj.weight", "y.up_proj.weight")


class SparseFiles:
    """Weights in files that are all holes: pages are made where something is written."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        folder.mkdir()
        self._bits: dict[str, NDArray[Any]] = {}
        for tensor in layout.tensors:
            path = folder / tensor.name
            with path.open("wb") as file:
                file.truncate(tensor.nbytes)
            unsigned = f"<u{tensor.item_bytes}"
            self._bits[tensor.name] = np.memmap(path, unsigned, "r+", shape=(tensor.items,))
        self.layout = layout

    def bits(self, name: str) -> NDArray[Any]:
        return self._bits[name]


def layout_of(dtype: str) -> Layout:
    return Layout.of(TensorSpec(name, dtype, (ROWS, COLUMNS)) for name in NAMES)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.rglob("*.weight"):
        file.unlink()


def frame_at(cut: Cut, word: int) -> int:
    """The frame that holds a word."""
    for number, frame in enumerate(cut.frames):
        for segment in frame.segments:
            row, column = divmod(word - segment.first_word, segment.stride or WORDS_MAX)
            width = max(frame.item_bytes // 2, 1)
            if 0 <= row < segment.repeats and column < segment.run * width:
                return number
    raise AssertionError(f"no frame holds word {word}")


def cuts(layout: Layout) -> list[SlottedCut]:
    return [
        grain_cut(layout, grain=1, for_anchor=False),
        grain_cut(layout, grain=8, for_anchor=False),
    ]


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
def test_changes_beyond_two_billion_items_are_found_coded_and_applied(
    dtype: str, folder: Path
) -> None:
    layout = layout_of(dtype)
    old, new = (SparseFiles(layout, folder / name) for name in ("old", "new"))
    places = [0, 1 << 31, (1 << 31) + 77, ITEMS - 1]
    for name, place in itertools.product(NAMES, places):
        new.bits(name)[place] = 3
    width = layout[NAMES[0]].words // ITEMS
    words = sorted(
        layout.start_of(name) + place * width for name, place in itertools.product(NAMES, places)
    )
    for number_of_cut, cut in enumerate(cuts(layout)):
        found, increment = [], ZERO
        held = SparseFiles(layout, folder / f"held-{number_of_cut}")
        for number in sorted({frame_at(cut.cut, word) for word in words}):
            frame = cut.cut.frames[number]
            delta = codec.detect(frame, old, new)
            found += frame.words_of(delta.positions).tolist()
            (chunk,) = codec.pack_chunks([codec.encode_delta(number, frame, delta)])
            (encoded,) = codec.read_chunk(chunk.data, entry=chunk.entry).frames
            decoded = codec.decode_delta(encoded, frame)
            assert codec.increment_on(frame, held, decoded) == delta.increment
            codec.apply(frame, held, decoded)
            increment += delta.increment
        assert sorted(found) == words
        for name, place in itertools.product(NAMES, places):
            assert held.bits(name)[place] == 3
        before = fingerprint_at(np.array(words), np.zeros(len(words), new.bits(NAMES[0]).dtype))
        after = fingerprint_at(np.array(words), np.full(len(words), 3, new.bits(NAMES[0]).dtype))
        assert increment == after - before


def test_grain_cuts_of_huge_layouts_cover_every_word() -> None:
    shapes = {f"{number}.{kind}_proj.weight": (1 << 15, 1 << 17)
              for number in range(64) for kind in ("up", "down")}  # fmt: skip
    layout = Layout.of(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())
    assert layout.total_words == 1 << 39
    slotted = grain_cut(layout, grain=2, for_anchor=False)
    assert slotted.cut.covers(layout)
    assert Cut.parse(slotted.cut.data) == slotted.cut


def test_strided_frames_far_out_are_gathered_and_scattered(folder: Path) -> None:
    layout = layout_of("BF16")
    weights = SparseFiles(layout, folder / "one")
    first = ITEMS - 40 * COLUMNS
    frame = FrameSpec(2, (Segment(first + 5, 11, COLUMNS, 40),))
    assert [piece.start_item for piece in pieces(frame, layout)] == [first + 5]
    items = np.arange(440, dtype=np.uint16)
    scatter(frame, weights, items)
    assert np.array_equal(gather(frame, weights), items)
    assert weights.bits(NAMES[0])[first + 5 + 39 * COLUMNS + 10] == 439


def test_the_last_words_that_a_layout_can_have() -> None:
    bits = np.array([0x7FC1, 0x8000, 1], np.uint16)
    first = WORDS_MAX - 3
    assert fingerprint_run(bits, first) == fingerprint_at(np.arange(first, first + 3), bits)
    frame = FrameSpec(2, (Segment(0, 1, 0, 1), Segment(first, 3, 0, 1)))
    positions = np.arange(4, dtype=np.uint32)
    assert frame.words_of(positions).tolist() == [0, first, first + 1, first + 2]


def test_the_plain_cut_of_a_tensor_that_is_larger_than_two_billion_items() -> None:
    cut = plain_cut(layout_of("U8"), for_anchor=False)
    assert cut.covers(layout_of("U8"))
    assert len(cut.frames) == -(-2 * ITEMS // (1 << 24))
