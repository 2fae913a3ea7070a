"""The layout: the frozen table of a policy's tensors, which numbers every 16-bit word.

Tensors are sorted by the UTF-8 bytes of their names. Each element is cut into little-endian 16-bit
words (an 8-bit element is one word, zero-extended), numbered through the whole layout, row-major
within a tensor: the canonical word index. Design section 4; docs/format.md is normative.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from plait import canonical
from plait.errors import LayoutChanged, LayoutInvalid, LimitExceeded
from plait.limits import (
    TENSOR_ELEMENTS_MAX,
    TENSOR_NAME_BYTES_MAX,
    TENSOR_RANK_MAX,
    TENSORS_MAX,
    WORDS_MAX,
)

FORMAT: Final = "plait-layout/1"

# safetensors' dtype names → bits of one element. Sub-byte types are held as their packed bytes.
DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_WORDS_PER_ITEM: Final[Mapping[int, int]] = {1: 1, 2: 1, 4: 2, 8: 4}


def words_per_item(item_bytes: int) -> int:
    """16-bit words of one element of 1, 2, 4 or 8 bytes."""
    return _WORDS_PER_ITEM[item_bytes]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the checkpoint on disk has it.

    Attributes:
        name: unique within the layout.
        dtype: safetensors' name of it.
        shape: as declared; `()` is a scalar of one element.

    Raises:
        LayoutInvalid: unknown dtype, bad name, negative or ill-aligned shape.
        LimitExceeded: sides that no library could multiply, though one of them be 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in DTYPE_BITS:
            raise LayoutInvalid(f"tensor {self.name!r} has the unknown dtype {self.dtype!r:.80}")
        if len(self.shape) > TENSOR_RANK_MAX or any(side < 0 for side in self.shape):
            raise LayoutInvalid(f"tensor {self.name!r} has the impossible shape {self.shape!s:.80}")
        elements = math.prod(side for side in self.shape if side)
        if elements > TENSOR_ELEMENTS_MAX:
            raise LimitExceeded(
                f"tensor {self.name!r} has sides that multiply to {elements}, but for those of 0; "
                f"at most {TENSOR_ELEMENTS_MAX}: {self.shape}"
            )
        if math.prod(self.shape) * DTYPE_BITS[self.dtype] % 8:
            raise LayoutInvalid(f"tensor {self.name!r} doesn't fill whole bytes: {self}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored item: 1, 2, 4 or 8 (1 for packed sub-byte types)."""
        return max(DTYPE_BITS[self.dtype] // 8, 1)

    @property
    def items(self) -> int:
        """Stored items: elements, or packed bytes for sub-byte types."""
        return self.nbytes // self.item_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def words(self) -> int:
        return self.items * words_per_item(self.item_bytes)


@dataclass(frozen=True)
class Layout:
    """The tensors of a policy, sorted by name, with their word numbers.

    Raises:
        LayoutInvalid: duplicate names.
        LimitExceeded: more tensors or words than limits.py allows.
    """

    tensors: tuple[TensorSpec, ...]
    _position: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if len(self.tensors) > TENSORS_MAX:
            raise LimitExceeded(f"layout of {len(self.tensors)} tensors; at most {TENSORS_MAX}")
        ordered = tuple(sorted(self.tensors, key=lambda tensor: tensor.name.encode()))
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "_position", {t.name: i for i, t in enumerate(ordered)})
        if len(self._position) != len(ordered):
            pairs = itertools.pairwise(ordered)
            twice = sorted({first.name for first, second in pairs if first.name == second.name})
            raise LayoutInvalid(f"tensor names occur twice: {', '.join(twice[:8])}")
        if self.total_words > WORDS_MAX:
            raise LimitExceeded(f"layout of {self.total_words} words; at most {WORDS_MAX}")

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> "Layout":
        return cls(tuple(tensors))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First word of each tensor, and the total last: `len(tensors) + 1` numbers."""
        starts, word = [0], 0
        for tensor in self.tensors:
            word += tensor.words
            starts.append(word)
        return tuple(starts)

    @property
    def total_words(self) -> int:
        return self.starts[-1]

    @cached_property
    def total_elements(self) -> int:
        """Stored items (packed bytes count as one each)."""
        return sum(tensor.items for tensor in self.tensors)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of one whole version, uncompressed."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def digest(self) -> str:
        return canonical.document_digest(self.to_document())

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[self._position[name]]

    def start_of(self, name: str) -> int:
        """First word of the named tensor."""
        return self.starts[self._position[name]]

    def tensors_in(self, first_word: int, end_word: int) -> Iterator[tuple[TensorSpec, int]]:
        """Non-empty tensors that hold words of [first_word, end_word), each with its first word."""
        index = max(bisect.bisect_right(self.starts, first_word) - 1, 0)
        while index < len(self.tensors) and self.starts[index] < end_word:
            if self.tensors[index].words:
                yield self.tensors[index], self.starts[index]
            index += 1

    def to_document(self) -> dict[str, Any]:
        rows = [[t.name, t.dtype, list(t.shape)] for t in self.tensors]
        return {"format": FORMAT, "tensors": rows}

    def serialize(self) -> bytes:
        return canonical.serialize(self.to_document())

    @classmethod
    def parse(cls, data: bytes | str) -> "Layout":
        """A layout from its canonical bytes.

        Raises:
            DocumentInvalid, UnsupportedFormat, LayoutInvalid, LimitExceeded: see those classes.
        """
        document = canonical.parse(data, expected_format=FORMAT)
        rows = document.get("tensors")
        if set(document) - {"format", "tensors"} or not isinstance(rows, list):
            raise LayoutInvalid("a layout has the fields 'format' and 'tensors' only")
        canonical.check_length(rows, TENSORS_MAX, "tensors")
        layout = cls.of(_parse_row(row) for row in rows)
        if [t.name for t in layout.tensors] != [row[0] for row in rows]:
            raise LayoutInvalid("a layout's tensors must be sorted by the bytes of their names")
        return layout

    def require_equal(self, other: "Layout", *, what: str) -> None:
        """Refuses `other` unless it is this layout, naming the differences.

        Raises:
            LayoutChanged: with up to eight differences in words.
        """
        if self.digest == other.digest:
            return
        raise LayoutChanged(
            f"{what} has another layout: {'; '.join(_differences(self, other))}",
            remedy="weights of another layout need a new anchor: publish with --new-anchor",
            expected=self.digest,
            found=other.digest,
        )


def _check_name(name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise LayoutInvalid(f"tensor name is not valid Unicode: {name!r:.80}") from error
    if not 0 < size <= TENSOR_NAME_BYTES_MAX:
        raise LayoutInvalid(f"tensor name of {size} bytes; at most {TENSOR_NAME_BYTES_MAX}")
    if name == "__metadata__" or "\0" in name:
        raise LayoutInvalid(f"tensor name {name!r} is reserved or holds a NUL")


def _parse_row(row: object) -> TensorSpec:
    match row:
        case [str(name), str(dtype), list(shape)] if all(type(side) is int for side in shape):
            return TensorSpec(name, dtype, tuple(shape))
    raise LayoutInvalid(f"a layout's row must be [name, dtype, shape], got {str(row)[:120]}")


def _differences(expected: Layout, found: Layout, *, most: int = 8) -> list[str]:
    differences = []
    for tensor in expected.tensors:
        if tensor.name not in found:
            differences.append(f"{tensor.name!r} is missing")
        elif (other := found[tensor.name]) != tensor:
            differences.append(
                f"{tensor.name!r} is {other.dtype}{list(other.shape)}, "
                f"expected {tensor.dtype}{list(tensor.shape)}"
            )
    differences += [f"{t.name!r} is new" for t in found.tensors if t.name not in expected]
    more = len(differences) - most
    return differences[:most] + ([f"and {more} more"] if more > 0 else [])
