"""Where the fuzzers begin: the golden files, and frames made fresh from a few bytes.

A `Source` turns the fuzzer's bytes into choices, so that a coverage-guided fuzzer and hypothesis
steer the same code. A mutation that fixes up checksums afterwards reaches what lies behind them.
"""

import copy
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait import canonical
from plait.cut import Cut, FrameSpec, Segment
from plait.errors import PlaitError
from plait.layout import Layout
from plait.manifest import Manifest
from plait.weights import UNSIGNED, ArrayWeights

GOLDEN: Final = Path(__file__).parent.parent / "golden" / "v1"
FILES: Final = {p.name: p.read_bytes() for p in sorted(GOLDEN.iterdir()) if p.is_file()}
LAYOUT: Final = Layout.parse(FILES["layout.json"])
CUTS: Final = {
    kind: Cut.parse(FILES[f"cut-{kind}.json"]) for kind in ("anchor", "delta")
}  # fmt: skip
MANIFESTS: Final = {
    kind: Manifest.parse(FILES[f"manifest-{kind}.json"]) for kind in ("anchor", "delta")
}

# Numbers at the edges of what the format and its machine types can hold.
NUMBERS: Final = (
    0, 1, -1, 2, 3, 7, 8, 15, 16, 17, 127, 128, 255, 256, 65535, 65536, (1 << 20) - 1, 1 << 20,
    (1 << 20) + 1, 1 << 22, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, (1 << 48) - 1, 1 << 48, (1 << 53) - 1, 1 << 53, -(1 << 53), 1 << 63,
)  # fmt: skip
ODDITIES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    1.5,
    1.0,
    -0.0,
    1e300,
    "",
    "x",
    "é\ud800",
    [],
    {},
    [[]],
    *(json.loads("[" * levels + "]" * levels) for levels in (59, 62, 65, 200)),
    "f" * 32,
    "0" * 64,
)


class Source:
    """Choices, read off the fuzzer's bytes; zeros once these are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(len(self._data) - self._at, 0)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        """A number of [0, count)."""
        size = max((count - 1).bit_length() + 7, 8) // 8
        return int.from_bytes(self.take(size).ljust(size, b"\0"), "little") % count

    def pick(self, choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def chance(self, of: int) -> bool:
        """True for one byte in `of`; false once the bytes are used up."""
        return self.byte() % of == of - 1

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> bytes:
        return self.take(self.left)

    def number(self) -> int:
        number: int = self.pick(NUMBERS)
        return number + self.byte() - 128 if self.chance(4) else number


def mutate_bytes(source: Source, data: bytes, other: bytes = b"") -> bytes:
    """A few flips, cuts, repeats, insertions and splices."""
    changed = bytearray(data)
    for _ in range(source.below(4)):
        at = source.below(len(changed) + 1)
        size = 1 + source.below(16)
        match source.below(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << source.below(8)
            case 1 if at < len(changed):
                changed[at] = source.byte()
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = source.take(size)
            case 5:
                changed[at:at] = changed[at : at + size]
            case 6:
                changed[at:] = other[source.below(len(other) + 1) :]
            case _:
                value = source.number() & 0xFFFFFFFFFFFFFFFF
                changed[at : at + 8] = value.to_bytes(8, "little")[: 1 + source.below(8)]
    return bytes(changed)


def mutate_json(source: Source, value: Any) -> Any:
    """The value with a few of its parts replaced, removed, moved or doubled."""
    changed = {"root": copy.deepcopy(value)}
    for _ in range(source.below(4)):
        places = list(_places(changed))
        holder, key = source.pick(places)
        if source.chance(4) and holder is not changed:
            del holder[key]
        elif source.chance(4) and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif source.chance(8) and isinstance(holder, dict):
            holder[source.pick(("x", "format", "requires", "slot", "é"))] = source.number()
        else:
            holder[key] = _other_value(source, holder[key], places)
    return changed["root"]


def _other_value(source: Source, value: Any, places: list[Any]) -> Any:
    match source.below(4):
        case 0:
            return source.number()
        case 1:
            # A copy: what is changed in one run must not be there in the next.
            return copy.deepcopy(source.pick(ODDITIES))
        case 2 if type(value) is int:
            return value + source.byte() - 128
        case 2 if isinstance(value, str):
            text = value.encode(errors="replace")
            return mutate_bytes(source, text).decode("latin-1")
    there, name = source.pick(places)
    return copy.deepcopy(there[name])


def _places(holder: Any) -> Any:
    pairs = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    for key, value in pairs:
        yield holder, key
        if isinstance(value, dict | list):
            yield from _places(value)


def text_of(document: Any) -> bytes:
    """The document in canonical form, or as it is where it has none."""
    try:
        return canonical.serialize(document)
    except (PlaitError, TypeError, ValueError):
        return json.dumps(document).encode()


def weights(state: str) -> ArrayWeights:
    """The golden weights, `old` or `new`, in memory of their own."""
    stored = json.loads(FILES["weights.json"])[state]
    arrays = {
        t.name: np.frombuffer(bytearray.fromhex(stored[t.name]), UNSIGNED[t.item_bytes])
        for t in LAYOUT.tensors
    }
    return ArrayWeights(LAYOUT, arrays)


def fresh_frame(source: Source) -> tuple[FrameSpec, NDArray[np.uint32], NDArray[Any]]:
    """A frame of any item size, with positions and differences of a delta."""
    item_bytes: int = source.pick((2, 1, 4, 8))
    sizes = (9, 300, 1000, 3001) if item_bytes > 2 else (9, 300, 3001, (1 << 20) + 700)
    items: int = source.pick(sizes)
    count = 1 + source.below(60)
    steps = np.array([1 + source.pick((0, 1, 90, 254, 255, 600, 9000)) for _ in range(count)])
    positions = np.cumsum(steps) - 1
    if source.chance(2):  # towards the end of the frame: behind its restart point
        positions += max(items - 1 - int(positions[-1]), 0)
    positions = positions[positions < items]
    top = (1 << 8 * item_bytes) - 1
    values = [source.pick((1, top, 2, 5, 127, 128, top - 127, top - 128, top // 2 + 1))
              for _ in range(positions.size)]  # fmt: skip
    differences = np.array([max(value & top, 1) for value in values], UNSIGNED[item_bytes])
    frame = FrameSpec(item_bytes, (Segment(0, items, 0, 1),))
    return frame, positions.astype(np.uint32), differences
