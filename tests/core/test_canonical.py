"""Canonical documents: one form of bytes, and nothing else gets in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.errors import DocumentInvalid, FormatError, LimitExceeded, UnsupportedFormat
from plait.limits import DOCUMENT_BYTES_MAX, INTEGER_MAX

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


def test_what_is_nested_too_deeply_to_be_written_is_refused() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(DocumentInvalid):
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
