"""Canonical documents: one form of bytes, and nothing else gets in."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.errors import DocumentInvalid, FormatError, LimitExceeded, UnsupportedFormat
from plait.json_shape import shape_of
from plait.limits import DOCUMENT_BYTES_MAX, DOCUMENT_DEPTH_MAX, INTEGER_MAX

FORMAT = "plait-test/1"
HEADER = {"format": FORMAT, "requires": []}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(min_value=1e21, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("aé\U0001f600\uffff"), inner),
    max_leaves=12,
)


@given(values)
def test_a_document_has_one_form_and_survives_it(value: object) -> None:
    document = {**HEADER, "value": value}
    data = canonical.serialize(document)
    parsed = canonical.parse(data, expected_format=FORMAT)
    assert canonical.serialize(parsed) == data
    assert canonical.document_digest(parsed) == canonical.digest_of(data)
    assert parsed["value"] == value


def test_the_form_is_rfc_8785() -> None:
    document = {
        "b": 1.0,
        "a": [1e21, 1e-7, 0.1, -0.0, "\u20ac\n"],
        "\U0001f600": None,
        "\uffff": True,
    }
    assert canonical.serialize(document) == (
        '{"a":[1e+21,1e-7,0.1,0,"€\\n"],"b":1,"\U0001f600":null,"\uffff":true}'.encode()
    )


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        INTEGER_MAX + 1,
        -INTEGER_MAX - 1,
        object(),
        {1: 2},
        "\ud800",
        {"\ud800": 1},
    ],
)
def test_what_canonical_json_can_t_hold_is_refused(value: object) -> None:
    with pytest.raises(DocumentInvalid):
        canonical.serialize({"value": value})


def nested(levels: int, inner: object = 1) -> object:
    """A value of so many lists and objects by turns."""
    value = inner
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def deep_down(frames: int, call: Callable[[], object]) -> object:
    return call() if not frames else deep_down(frames - 1, call)


@pytest.mark.parametrize("frames", [0, 300, 600])
def test_how_deep_documents_may_be_depends_on_no_callers_stack(frames: int) -> None:
    for levels in (1, 2, DOCUMENT_DEPTH_MAX - 1):
        document = HEADER | {"value": nested(levels)}
        data = canonical.serialize(document)
        assert deep_down(frames, partial(parsed, data)) == document
    for levels in (DOCUMENT_DEPTH_MAX, 200, 400, 100_000):
        data = b'{"format":"plait-test/1","requires":[],"value":' + b"[" * levels + b"]" * levels
        with pytest.raises(LimitExceeded, match="deeper than 64"):
            deep_down(frames, partial(parsed, data + b"}"))
        if levels < 400:
            with pytest.raises(LimitExceeded, match="deeper than 64"):
                canonical.serialize(HEADER | {"value": nested(levels)})


def parsed(data: bytes) -> object:
    return canonical.parse(data, expected_format=FORMAT)


def test_brackets_within_strings_are_no_levels() -> None:
    document = HEADER | {"value": ["[" * 100, '"[' * 100, "\\" * 3 + "[{" * 100], "{" * 99: 1}
    assert parsed(canonical.serialize(document)) == document


@given(st.text('[]{}:,"\\1', max_size=24) | values.map(json.dumps))
def test_the_shape_of_a_text_is_that_of_what_a_parser_makes_of_it(text: str) -> None:
    depth, count = shape_of(text.encode())
    assert 0 <= depth <= count <= len(text)
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: [item for _, item in pairs])
    except ValueError:
        return
    assert (depth, count) == measured(value)


def measured(value: object) -> tuple[int, int]:
    """Levels of lists; opening brackets and commas."""
    if not isinstance(value, list):
        return 0, 0
    inner = [measured(item) for item in value]
    depth = max((levels for levels, _ in inner), default=0)
    return 1 + depth, max(len(value), 1) + sum(count for _, count in inner)


def test_another_encoding_is_refused_and_hides_no_brackets() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig"):
        data = '{"format":"plait-test/1","requires":[]}'.encode(encoding)
        with pytest.raises(DocumentInvalid, match="not a JSON document"):
            parsed(data)
        # U+2200 has a byte of a quotation mark.
        with pytest.raises(FormatError):
            parsed(("\u2200" + "[" * 500).encode(encoding))


def test_what_is_nested_too_deeply_to_be_written_is_refused() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(LimitExceeded):
        canonical.serialize({"value": value})
    while value:  # or Python would take it apart by recursion
        value = value.pop()  # type: ignore[assignment]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"format":"plait-test/1","requires":[]}\n',
        b'{"format":"plait-test/1", "requires":[]}',
        b'{"requires":[],"format":"plait-test/1"}',
        b'{"format":"plait-test/1","format":"plait-test/1","requires":[]}',
        b'{"format":"plait-test/1","n":1.0,"requires":[]}',
        b'{"format":"plait-test/1","n":01,"requires":[]}',
        b'{"format":"plait-test/1","n":NaN,"requires":[]}',
        b'{"format":"plait-test/1","n":1e999,"requires":[]}',
        b'{"format":"plait-test/1","n":9007199254740992,"requires":[]}',
        b'{"format":"plait-test/1","n":' + b"9" * 5000 + b',"requires":[]}',
        b'{"format":"plait-test/1","n":"\\u0041","requires":[]}',
        b'{"format":"plait-test/1","n":' + b"[" * 100_000 + b"}",
        b'{"format":"plait-test/1","requires":{}}',
        b'{"format":"plait-test/1","n":"\\ud800","requires":[]}',
        b'{"\\ud800":1,"format":"plait-test/1","requires":[]}',
        '{"format":"plait-test/1","n":"\udc80","requires":[]}',
    ],
)
def test_other_bytes_are_refused(data: bytes | str) -> None:
    with pytest.raises(FormatError):
        canonical.parse(data, expected_format=FORMAT)


def test_another_format_or_an_unknown_feature_is_refused_as_such() -> None:
    for fields in ({"format": "plait-test/2"}, {"format": None}, {"requires": ["x"]}):
        data = canonical.serialize(HEADER | fields)
        with pytest.raises(UnsupportedFormat):
            canonical.parse(data, expected_format=FORMAT)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a":1,"a":1}', "twice"),
        (b"9007199254740992", "beyond 2"),
        (b"-9007199254740992", "beyond 2"),
        (b"1" * 18, "beyond 2"),
        (b"1e999", "out of range"),
        (b"NaN", "not JSON"),
    ],
)
def test_values_that_are_no_documents_are_read_by_the_same_rules(data: bytes, why: str) -> None:
    with pytest.raises(DocumentInvalid, match=why):
        canonical.read(data)


def test_a_document_beyond_the_limit_isn_t_parsed() -> None:
    with pytest.raises(LimitExceeded):
        canonical.parse(b" " * (DOCUMENT_BYTES_MAX + 1), expected_format=FORMAT)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("sha256:" + "0" * 64, True),
        ("sha256:" + "0" * 63, False),
        ("sha256:" + "A" * 64, False),
        ("sha256:" + "0" * 64 + "\n", False),
        ("sha512:" + "0" * 64, False),
        (None, False),
        (7, False),
    ],
)
def test_digests_are_recognised(text: object, is_one: bool) -> None:
    assert canonical.is_digest(text) is is_one
