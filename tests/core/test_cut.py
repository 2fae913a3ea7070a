"""Cuts: what a document may say, what fits a layout, and what the plain cut looks like."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.cut import Cut, FrameSpec, Segment, items_max, plain_cut
from plait.errors import DocumentInvalid, FormatError, LimitExceeded, UnsupportedFormat
from plait.layout import Layout, TensorSpec
from plait.limits import FRAME_ELEMENTS_MAX, FRAMES_MAX, SEGMENTS_PER_FRAME_MAX
from plait.weights import pieces
from tests.core import reference_documents
from tests.core.strategies import covering_cuts, layouts

LAYOUT = Layout.of(
    [
        TensorSpec("a", "BF16", (4, 6)),
        TensorSpec("b", "F16", (10,)),
        TensorSpec("c", "F32", (8,)),
        TensorSpec("d", "U8", (5,)),
        TensorSpec("e", "BF16", (0, 3)),
        TensorSpec("f", "I8", (3,)),
    ]
)


def cut_of(*frames: FrameSpec) -> Cut:
    return Cut(LAYOUT.digest, frames)


def frame_of(item_bytes: int, *rows: tuple[int, int, int, int]) -> FrameSpec:
    return FrameSpec(item_bytes, tuple(Segment(*row) for row in rows))


@given(st.data(), layouts())
def test_a_cut_survives_its_document(data: st.DataObject, layout: Layout) -> None:
    cut = data.draw(covering_cuts(layout))
    again = Cut.parse(cut.serialize())
    assert again == cut
    assert again.digest == cut.digest == canonical.digest_of(cut.serialize())
    assert again.covers(layout)


@given(st.data(), layouts())
def test_words_and_pieces_of_a_frame_are_those_of_the_text(
    data: st.DataObject, layout: Layout
) -> None:
    cut = data.draw(covering_cuts(layout))
    for frame, row in zip(cut.frames, cut.to_document()["frames"], strict=True):
        words = reference_documents.words_of(*row)
        assert frame.words_of(np.arange(frame.items, dtype=np.uint32)).tolist() == words
        offset = 0
        for piece in pieces(frame, layout):
            assert (piece.frame_offset, piece.first_word) == (offset, words[offset])
            offset += piece.items
        assert offset == frame.items


def test_a_stride_through_items_has_no_pieces_though_it_ends_at_one() -> None:
    layout = Layout.of([TensorSpec("w", "F32", (8,))])
    assert len(pieces(frame_of(4, (0, 1, 4, 3)), layout)) == 1
    with pytest.raises(DocumentInvalid, match="strides across"):
        pieces(frame_of(4, (0, 1, 3, 3)), layout)


def test_a_frame_made_by_hand_has_no_more_segments_than_one_that_is_read() -> None:
    segments = (Segment(0, 1, 0, 1),)
    with pytest.raises(LimitExceeded, match="segments"):
        FrameSpec(1, segments * (SEGMENTS_PER_FRAME_MAX + 1))


@given(layouts(), st.booleans())
def test_the_plain_cut_covers_every_word(layout: Layout, for_anchor: bool) -> None:
    cut = plain_cut(layout, for_anchor=for_anchor)
    assert cut.covers(layout)
    assert plain_cut(layout, for_anchor=for_anchor) == cut


def test_the_plain_cut_joins_adjacent_tensors_of_one_item_size() -> None:
    assert plain_cut(LAYOUT, for_anchor=False).frames == (
        frame_of(1, (50, 8, 0, 1)),
        frame_of(2, (0, 34, 0, 1)),
        frame_of(4, (34, 8, 0, 1)),
    )


def test_the_plain_cut_fills_its_frames() -> None:
    big = TensorSpec("m", "BF16", (FRAME_ELEMENTS_MAX + 5,))
    layout = Layout.of([big, TensorSpec("n", "F32", (3,)), TensorSpec("o", "BF16", (7,))])
    first, second, wide = plain_cut(layout, for_anchor=False).frames
    assert first == frame_of(2, (0, FRAME_ELEMENTS_MAX, 0, 1))
    assert second == frame_of(2, (FRAME_ELEMENTS_MAX, 5, 0, 1), (FRAME_ELEMENTS_MAX + 11, 7, 0, 1))
    assert wide.items == 3
    dense = plain_cut(layout, for_anchor=True).frames
    assert max(frame.nbytes for frame in dense) == 8 << 20


def test_a_layout_without_words_has_a_cut_without_frames() -> None:
    for layout in (Layout.of([]), Layout.of([TensorSpec("e", "F32", (0,))])):
        cut = plain_cut(layout, for_anchor=True)
        assert cut.frames == ()
        assert Cut.parse(cut.serialize()).covers(layout)


def test_a_cut_of_a_part_is_valid_but_covers_nothing_else() -> None:
    part = cut_of(frame_of(2, (0, 2, 6, 4)), frame_of(2, (2, 4, 6, 3)))
    part.check_against(LAYOUT)
    assert not part.covers(LAYOUT)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([frame_of(2, (0, 3, 0, 1)), frame_of(2, (2, 3, 0, 1))], "occurs in two runs"),
        ([frame_of(2, (0, 2, 6, 4)), frame_of(2, (19, 2, 0, 1))], "occurs in two runs"),
        ([frame_of(2, (0, 3, 0, 1), (0, 3, 0, 1))], "occurs in two runs"),
        ([frame_of(2, (0, 35, 0, 1))], "crosses into"),
        ([frame_of(4, (0, 3, 0, 1))], "another item size"),
        ([frame_of(2, (34, 2, 0, 1))], "another item size"),
        ([frame_of(4, (35, 2, 0, 1))], "cuts through an item"),
        ([frame_of(4, (34, 1, 3, 4))], "cuts through an item"),
        ([frame_of(2, (18, 6, 6, 2))], "strides across"),
        ([frame_of(1, (50, 9, 0, 1))], "ends beyond"),
        ([frame_of(1, (58, 1, 0, 1))], "ends beyond"),
        ([frame_of(1, (1 << 47, 1, 0, 1))], "ends beyond"),
    ],
)
def test_a_cut_that_doesn_t_fit_the_layout_is_refused(frames: list[FrameSpec], why: str) -> None:
    cut = cut_of(*frames)
    for check in (cut.check_against, cut.covers):
        with pytest.raises(DocumentInvalid, match=why):
            check(LAYOUT)


def test_a_cut_of_another_layout_is_refused() -> None:
    other = Layout.of([TensorSpec("a", "BF16", (100,))])
    with pytest.raises(DocumentInvalid, match="belongs to layout"):
        plain_cut(LAYOUT, for_anchor=True).check_against(other)


def test_pieces_refuse_what_the_check_refuses() -> None:
    for frame in (
        frame_of(2, (0, 35, 0, 1)),
        frame_of(4, (35, 2, 0, 1)),
        frame_of(4, (34, 1, 3, 4)),
        frame_of(2, (18, 6, 6, 2)),
        frame_of(1, (50, 9, 0, 1)),
    ):
        with pytest.raises(DocumentInvalid):
            pieces(frame, LAYOUT)


def row(
    first: object = 0, run: object = 1, stride: object = 0, repeats: object = 1
) -> list[object]:
    return [first, run, stride, repeats]


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([[3, [row()]]], DocumentInvalid),
        ([[0, [row()]]], DocumentInvalid),
        ([["2", [row()]]], DocumentInvalid),
        ([[True, [row()]]], DocumentInvalid),
        ([[2, []]], LimitExceeded),
        ([[2]], DocumentInvalid),
        ([[2, row()]], DocumentInvalid),
        ([[2, [[0, 1, 0]]]], DocumentInvalid),
        ([[2, [[0, 1, 0, 1, 1]]]], DocumentInvalid),
        ([[2, [row(first=-1)]]], DocumentInvalid),
        ([[2, [row(first=0.5)]]], DocumentInvalid),
        ([[2, [row(first="0")]]], DocumentInvalid),
        ([[2, [row(first=None)]]], DocumentInvalid),
        ([[2, [row(run=0)]]], DocumentInvalid),
        ([[2, [row(run=True)]]], DocumentInvalid),
        ([[2, [row(repeats=0)]]], DocumentInvalid),
        ([[2, [row(stride=-1)]]], DocumentInvalid),
        ([[2, [row(run=4, stride=3, repeats=2)]]], DocumentInvalid),
        ([[4, [row(run=2, stride=3, repeats=2)]]], DocumentInvalid),
        ([[2, [row(first=1 << 48)]]], LimitExceeded),
        ([[2, [row(stride=1 << 52, repeats=1 << 20)]]], LimitExceeded),
        ([[2, [row(run=FRAME_ELEMENTS_MAX + 1)]]], LimitExceeded),
        ([[4, [row(run=items_max(4) + 1)]]], LimitExceeded),
        ([[2, [row(stride=2, repeats=1 << 23)]]] * 3, LimitExceeded),
        ("frames", DocumentInvalid),
        ([7], DocumentInvalid),
    ],
)
def test_a_document_beyond_the_format_is_refused(frames: Any, error: type[FormatError]) -> None:
    document = plain_cut(LAYOUT, for_anchor=False).to_document() | {"frames": frames}
    with pytest.raises(error):
        Cut.parse(canonical.serialize(document))


def test_long_lists_are_refused_before_their_rows_are_read() -> None:
    document = plain_cut(LAYOUT, for_anchor=False).to_document()
    for frames in ([0] * (FRAMES_MAX + 1), [[2, [0] * (SEGMENTS_PER_FRAME_MAX + 1)]]):
        with pytest.raises(LimitExceeded, match="at most"):
            Cut.parse(canonical.serialize(document | {"frames": frames}))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"format": "plait-cut/2"}, UnsupportedFormat),
        ({"requires": ["grain"]}, UnsupportedFormat),
        ({"layout": "sha256:0"}, DocumentInvalid),
        ({"layout": None}, DocumentInvalid),
        ({"more": 1}, DocumentInvalid),
    ],
)
def test_another_header_is_refused(fields: dict[str, Any], error: type[FormatError]) -> None:
    document = plain_cut(LAYOUT, for_anchor=False).to_document() | fields
    with pytest.raises(error):
        Cut.parse(canonical.serialize(document))


def test_a_document_not_in_canonical_form_is_refused() -> None:
    data = plain_cut(LAYOUT, for_anchor=False).serialize()
    for broken in (data + b"\n", data[:-1], b"", b"\xff", data.replace(b":", b": ", 1)):
        with pytest.raises(DocumentInvalid):
            Cut.parse(broken)
