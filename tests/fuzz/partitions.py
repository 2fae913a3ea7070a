"""Layouts and cuts from anywhere: refused, or partitions of words, as the second reader has it."""

from typing import Any, Final

import numpy as np

from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import LimitExceeded, PlaitError
from plait.grain import grain_cut
from plait.layout import Layout, words_per_item
from plait.weights import pieces
from tests.core import reference_documents
from tests.core.reference_documents import Refused
from tests.fuzz.drawn import fresh_cut, fresh_layout
from tests.fuzz.material import NUMBERS, Source, mutate_json, text_of

# Words that are counted one by one; runs that the second reader, which knows no limits, expands.
_WORDS_MAX: Final = 1 << 18
_RUNS_MAX: Final = 1 << 14
# 16 bytes for each run are the format's limit; a short test has less memory.
_CHECKED_RUNS_MAX: Final = 1 << 20

_STEPS: Final = (1, -1, 2, -2, 4, -4, 8, -8, 64)


def partitions(data: bytes) -> None:
    """A layout and a cut for it, both changed."""
    source = Source(data)
    layout = _layout(source, fresh_layout(source))
    if layout is None:
        return
    small = layout.total_words <= _WORDS_MAX
    _check_layout(layout)
    if small:
        for_anchor = source.chance(2)
        assert plain_cut(layout, for_anchor=for_anchor).covers(layout)
        grain = source.pick((8, 2, 3))
        assert grain_cut(layout, grain=grain, for_anchor=for_anchor, kv_heads=4).cut.covers(layout)
    cut = fresh_cut(source, layout).cut if small else Cut(layout.digest, _far(source, layout))
    document = _shifted(source, cut.to_document())
    document = mutate_json(source, document) if source.chance(2) else document
    _cut(text_of(document), layout)


def _layout(source: Source, layout: Layout) -> Layout | None:
    """What is read of the layout's changed document, if both readers take it."""
    document = layout.to_document()
    for _ in range(source.below(3)):
        row = source.pick(document["tensors"])
        if source.chance(2):
            row[1] = source.pick(sorted(reference_documents.DTYPES))
        elif row[2]:
            row[2][source.below(len(row[2]))] = source.pick(NUMBERS)
    text = text_of(mutate_json(source, document) if source.chance(2) else document)
    found = refusal = truth = ban = None
    try:
        found = Layout.parse(text)
    except LimitExceeded:
        return None  # the second reader knows few limits
    except PlaitError as error:
        refusal = error
    try:
        truth = reference_documents.read_layout(text)
    except Refused as error:
        ban = error
    assert (found is None) == (truth is None), f"refused: {refusal}; the format forbids: {ban}"
    if found is None or truth is None:
        return None
    assert found.serialize() == text
    assert [(t.name, t.item_bytes, t.items) for t in found.tensors] == [t[:3] for t in truth]
    assert list(found.starts) == [*(tensor.start for tensor in truth), found.total_words]
    return found


def _check_layout(layout: Layout) -> None:
    """Every word lies in exactly one tensor."""
    held = [t for t in layout.tensors if t.words]
    assert sum(tensor.words for tensor in held) == layout.total_words
    assert [t for t, _ in layout.tensors_in(0, layout.total_words)] == held
    for tensor in held:
        start = layout.start_of(tensor.name)
        for word in (start, start + tensor.words - 1):
            assert [(t.name, s) for t, s in layout.tensors_in(word, word + 1)] == [
                (tensor.name, start)
            ]


def _far(source: Source, layout: Layout) -> tuple[FrameSpec, ...]:
    """A few frames of a layout that is too large to be cut whole."""
    frames = []
    for tensor in layout.tensors:
        run = min(tensor.items, source.pick((1, 7, 1 << 20)))
        if run:
            width = words_per_item(tensor.item_bytes)
            first = layout.start_of(tensor.name) + source.below(tensor.items - run + 1) * width
            frames.append(FrameSpec(tensor.item_bytes, (Segment(first, run, 0, 1),)))
    return tuple(frames)


def _shifted(source: Source, document: dict[str, Any]) -> dict[str, Any]:
    """Segments moved, stretched, doubled or dealt to another frame: near what fits."""
    frames = document["frames"]
    if source.chance(16):
        document["layout"] = "sha256:" + "0" * 64
    for _ in range(source.below(4) if frames else 0):
        segments = source.pick(frames)[1]
        number = source.below(len(segments))
        match source.below(4):
            case 0:
                segments.insert(number, list(segments[number]))
            case 1 if len(segments) > 1:
                source.pick(frames)[1].append(segments.pop(number))
            case 2:
                segments[number][source.below(4)] = source.pick(NUMBERS)
            case _:
                segments[number][source.below(4)] += source.pick(_STEPS)
    return document


def _cut(text: bytes, layout: Layout) -> None:
    """Both readers' verdict on a cut of this layout, and what it says if they take it."""
    found = refusal = truth = ban = None
    try:
        found = Cut.parse(text)
        runs = sum(segment.repeats for frame in found.frames for segment in frame.segments)
        if runs > _CHECKED_RUNS_MAX:
            return
        found.check_against(layout)
    except LimitExceeded:
        return
    except PlaitError as error:
        _pieces_stay_inside(found, layout)
        found, refusal = None, error
    if _runs(text) > _RUNS_MAX:
        return
    try:
        truth = reference_documents.read_cut(text, layout.serialize())
    except Refused as error:
        ban = error
    assert (found is None) == (truth is None), f"refused: {refusal}; the format forbids: {ban}"
    if found is None or truth is None:
        return
    assert found.serialize() == text
    if layout.total_words <= _WORDS_MAX:
        _count_words(found, truth, layout)
    else:
        assert found.covers(layout) == reference_documents.covers(truth, layout.serialize())


def _pieces_stay_inside(cut: Cut | None, layout: Layout) -> None:
    """Of a cut that doesn't fit: each frame is refused by itself, or lies in its tensors."""
    for frame in cut.frames if cut else ():
        try:
            found = pieces(frame, layout)
        except PlaitError:
            continue
        assert sum(piece.items for piece in found) == frame.items
        for piece in found:
            last = (piece.items // piece.run - 1) * piece.stride + piece.run
            assert 0 <= piece.start_item <= piece.start_item + last <= piece.tensor.items
            assert piece.tensor.item_bytes == frame.item_bytes


def _runs(text: bytes) -> int:
    """Runs that the second reader would expand, also of what is no cut."""
    try:
        rows = reference_documents.parse_json(text)["frames"]
    except (Refused, TypeError, KeyError):
        return 0
    rows = [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
    segments = [part for row in rows for part in row if isinstance(part, list)]
    found = [s for part in segments for s in part if isinstance(s, list) and len(s) == 4]
    return sum(abs(s[3]) for s in found if type(s[3]) is int)


def _count_words(cut: Cut, truth: list[reference_documents.Frame], layout: Layout) -> None:
    """Frames hold every word at most once, and pieces every item of a frame exactly once."""
    times = np.zeros(layout.total_words, np.int64)
    for frame, (size, segments) in zip(cut.frames, truth, strict=True):
        first = frame.words_of(np.arange(frame.items, dtype=np.uint32))
        assert first.tolist() == reference_documents.words_of(size, segments)
        np.add.at(times, first[:, None] + np.arange(words_per_item(size)), 1)
        offset = 0
        for piece in pieces(frame, layout):
            assert piece.frame_offset == offset
            items = piece.view(np.arange(piece.tensor.items)).reshape(-1)
            words = layout.start_of(piece.tensor.name) + items * words_per_item(size)
            assert np.array_equal(words, first[offset : offset + piece.items])
            offset += piece.items
        assert offset == frame.items
    assert not times.size or times.max() <= 1, "a word occurs twice"
    assert cut.covers(layout) == bool((times == 1).all())
