"""Layouts: the numbering of words, and every table that can't be one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.errors import FormatError, LayoutChanged, LayoutInvalid, LimitExceeded
from plait.layout import DTYPE_BITS, Layout, TensorSpec, words_per_item
from plait.limits import TENSORS_MAX
from tests.core.strategies import layouts


@given(layouts())
def test_a_layout_survives_its_document(layout: Layout) -> None:
    again = Layout.parse(layout.serialize())
    assert again == layout
    assert again.digest == layout.digest == canonical.digest_of(layout.serialize())
    again.require_equal(layout, what="the same layout")


@given(layouts(), st.randoms())
def test_the_order_in_which_tensors_are_named_doesn_t_matter(layout: Layout, random: Any) -> None:
    tensors = list(layout.tensors)
    random.shuffle(tensors)
    assert Layout.of(tensors).digest == layout.digest


@given(layouts())
def test_words_are_numbered_through(layout: Layout) -> None:
    word = 0
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        assert start == layout.start_of(tensor.name) == word
        word += tensor.items * words_per_item(tensor.item_bytes)
    assert word == layout.total_words == layout.starts[-1]
    assert layout.dense_bytes == sum(t.nbytes for t in layout.tensors)


@given(layouts(), st.data())
def test_the_tensors_of_a_range_are_those_that_hold_its_words(
    layout: Layout, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, layout.total_words))
    end = data.draw(st.integers(first, layout.total_words))
    expected = [
        (tensor, start)
        for tensor, start in zip(layout.tensors, layout.starts, strict=False)
        if tensor.words and start < end and start + tensor.words > first
    ]
    if first < end:
        assert list(layout.tensors_in(first, end)) == expected


def test_names_sort_by_their_utf_8_bytes() -> None:
    names = ["b", "a.10", "a.2", "é", "Z", "\U0001f600", "\uffff"]
    layout = Layout.of(TensorSpec(name, "U8", (1,)) for name in names)
    assert [t.name for t in layout.tensors] == [
        "Z", "a.10", "a.2", "b", "é", "\uffff", "\U0001f600"
    ]  # fmt: skip


def test_the_example_of_the_format_has_its_digest() -> None:
    layout = Layout.of([TensorSpec("name", "BF16", (2, 3))])
    assert layout.serialize() == (b'{"format":"plait-layout/1","tensors":[["name","BF16",[2,3]]]}')


def test_sub_byte_types_are_their_packed_bytes() -> None:
    tensor = TensorSpec("w", "F4", (3, 4))
    assert (tensor.item_bytes, tensor.items, tensor.nbytes, tensor.words) == (1, 6, 6, 6)
    assert TensorSpec("w", "F6_E2M3", (4,)).items == 3


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "BF16", (1,)),
        ("x" * 1025, "BF16", (1,)),
        ("a\0b", "BF16", (1,)),
        ("__metadata__", "BF16", (1,)),
        ("\ud800", "BF16", (1,)),
        ("w", "BF17", (1,)),
        ("w", "bf16", (1,)),
        ("w", "BF16", (-1,)),
        ("w", "BF16", (1,) * 17),
        ("w", "BF16", (1,) * 10_000),
        ("w", "X" * 10_000, (3,)),
        ("\ud800" * 10_000, "BF16", (3,)),
        ("w", "F4", (3,)),
    ],
)
def test_a_tensor_that_no_checkpoint_has_is_refused(
    name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutInvalid) as refusal:
        TensorSpec(name, dtype, shape)
    assert len(refusal.value.message) < 300


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match="twice: w"):
        Layout.of([TensorSpec("w", "BF16", (1,)), TensorSpec("w", "F16", (2,))])


def test_more_words_than_a_fingerprint_can_number_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="words"):
        Layout.of([TensorSpec("w", "BF16", (1 << 24, 1 << 25))])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("BF16", (0, (1 << 53) - 1, (1 << 53) - 1)),
        ("U8", ((1 << 27), 0, (1 << 26))),
        ("F4", (1 << 53, 0)),
        ("F64", (0, *(1 << 10,) * 15)),
    ],
)
def test_an_empty_tensor_of_a_shape_that_nothing_could_have_is_refused(
    dtype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(LimitExceeded, match="multiply to"):
        TensorSpec("w", dtype, shape)
    assert TensorSpec("w", "U8", (0, (1 << 53) - 1)).items == 0


def document(tensors: object, **fields: object) -> bytes:
    return canonical.serialize({"format": "plait-layout/1", "tensors": tensors} | fields)


@pytest.mark.parametrize(
    "data",
    [
        document({}),
        document([["w", "BF16"]]),
        document([["w", "BF16", [1], 0]]),
        document([["w", "BF16", "1"]]),
        document([["w", "BF16", [1.5]]]),
        document([["w", "BF16", [True]]]),
        document([["w", 16, [1]]]),
        document([[None, "BF16", [1]]]),
        document([["b", "BF16", [1]], ["a", "BF16", [1]]]),
        document([["a", "BF16", [1]], ["a", "BF16", [1]]]),
        document([], more=1),
        document([], format="plait-layout/2"),
        document([], requires=["order"]),
        b'{"format": "plait-layout/1","tensors":[]}',
        b"",
    ],
)
def test_a_document_that_isn_t_a_layout_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Layout.parse(data)


def test_a_long_table_is_refused_before_its_rows_are_read() -> None:
    with pytest.raises(LimitExceeded, match="tensors; at most"):
        Layout.parse(document([0] * (TENSORS_MAX + 1)))


def test_differences_are_named() -> None:
    old = Layout.of([TensorSpec("a", "BF16", (2,)), TensorSpec("b", "F32", (3,))])
    new = Layout.of([TensorSpec("b", "BF16", (3,)), TensorSpec("c", "F32", (3,))])
    with pytest.raises(LayoutChanged) as caught:
        old.require_equal(new, what="the checkpoint")
    text = str(caught.value)
    for part in ("'a' is missing", "'b' is BF16[3], expected F32[3]", "'c' is new", "--new-anchor"):
        assert part in text
    assert caught.value.details == {"expected": old.digest, "found": new.digest}


def test_every_dtype_has_an_item_size_of_one_two_four_or_eight() -> None:
    sizes = {TensorSpec("w", dtype, (8,)).item_bytes for dtype in DTYPE_BITS}
    assert sizes == {1, 2, 4, 8}
