"""What coding gaps by the old weight's exponent would save, and cost: measured, not shipped.

The items of a frame are put into K classes by their old exponent; a change is named by its rank
within its class, so dense and sparse parts of the weights each have gaps of their own kind. A
reader must walk all old items of the frame to find them again. docs/decisions has the verdict.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.entropy import exponent_bytes, independent_bytes
from benchmarks.language_model import LanguageModel
from benchmarks.report import Section
from benchmarks.timing import cpu_seconds
from benchmarks.workload import Step, Workload
from plait.codec.planes import pack_plane
from plait.codec.sparse import encode_sparse

_CLASSES: Final = (1, 2, 4, 8)
_FRAME: Final = 1 << 24
_EXPONENTS: Final = 256
_DENSITY: Final = 0.01


def classes_section() -> Section:
    """One real and one synthetic step."""
    (synthetic,) = Workload().steps((_DENSITY,))
    (real,) = LanguageModel().steps((_DENSITY,))
    rows = [row for name, step in (("SmolLM2", real), ("synthetic", synthetic))
            for row in _rows(name, step)]  # fmt: skip
    return Section(
        "Gaps in classes of the old exponent",
        "Planes only, frames of 2^24 items over all tensors. Encode and decode: the numba loops "
        "that rank and find again, without zstd, one thread, over memcpy.",
        ["step", "element density", "classes", "B per changed", "of one class",
         "limit: independent", "limit: tensor and exponent", "rank / memcpy", "find / memcpy"],
        rows,
    )  # fmt: skip


def _rows(name: str, step: Step) -> list[list[str]]:
    old, new = (
        np.concatenate([w.bits(t.name) for t in step.old.layout.tensors])
        for w in (step.old, step.new)
    )
    changed = int(np.count_nonzero(old != new))
    limits = [f"{f(step.old, step.new) / changed:.3f}" for f in (independent_bytes, exponent_bytes)]
    copy = np.empty_like(old)
    memcpy = cpu_seconds(lambda: np.copyto(copy, old))
    rows, one = [], 0
    for classes in _CLASSES:
        table = class_table(old, new, classes)
        size = sum(
            _size(*frame)
            for first in range(0, old.size, _FRAME)
            for frame in _ranked(old[first : first + _FRAME], new[first : first + _FRAME], table)
        )
        one = one or size
        ranks, owners, differences = _rank(old, new, table)
        starts, ordered, by = _in_classes(ranks, owners, differences, classes)
        live = old.copy()
        _find(live, table, ordered, by, starts)
        if not np.array_equal(live, new):
            raise AssertionError("the classes don't lead to the new weights")
        ranking = cpu_seconds(lambda: _rank(old, new, table), runs=3)  # noqa: B023
        finding = cpu_seconds(lambda: _find(live, table, ordered, by, starts), runs=3)  # noqa: B023
        rows.append([
            name, f"{step.density:.2%}", str(classes), f"{size / changed:.3f}", f"{size / one:.3f}",
            *limits, f"{memcpy / ranking:.2f}", f"{memcpy / finding:.2f}",
        ])  # fmt: skip
    return rows


def class_table(old: NDArray[Any], new: NDArray[Any], classes: int) -> NDArray[np.uint8]:
    """The class of each exponent: neighbours together, cut where the index is cheapest."""
    exponents = (old >> np.uint16(7)) & np.uint16(_EXPONENTS - 1)
    held = np.bincount(exponents, minlength=_EXPONENTS)
    moved = np.bincount(exponents[old != new], minlength=_EXPONENTS)
    all_, some = (np.concatenate([[0], np.cumsum(x)]) for x in (held, moved))
    used = [0, *np.flatnonzero(np.diff(all_[1:])).tolist(), _EXPONENTS]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(classes):
        best = {
            end: min(
                (cost + _bits(all_[end] - all_[start], some[end] - some[start]), (*cuts, end))
                for start, (cost, cuts) in best.items()
                if start < end
            )
            for end in used[1:]
            if any(start < end for start in best)
        }
    table = np.zeros(_EXPONENTS, np.uint8)
    for cut in best[_EXPONENTS][1][:-1]:
        table[cut:] += 1
    return table


def _bits(held: int, moved: int) -> float:
    if not 0 < moved < held:
        return 0.0
    return float(moved * np.log2(held / moved) + (held - moved) * np.log2(held / (held - moved)))


def _ranked(old: NDArray[Any], new: NDArray[Any], table: NDArray[np.uint8]) -> Any:
    ranks, owners, differences = _rank(old, new, table)
    for owner in range(int(table.max()) + 1):
        mine = owners == owner
        yield old.size, ranks[mine], differences[mine]


def _size(items: int, positions: NDArray[np.uint32], differences: NDArray[np.uint16]) -> int:
    planes = encode_sparse(items, positions, differences) if positions.size else {}
    return sum(pack_plane(n, p).stored_size for n, p in planes.items() if p.size and n != "restart")


def _in_classes(
    ranks: NDArray[np.uint32], owners: NDArray[np.uint8], by: NDArray[np.uint16], classes: int
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint16]]:
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=classes))
    return np.concatenate([[0], ends]).astype(np.int64), ranks[order], by[order]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rank(old: Any, new: Any, table: Any) -> Any:
    passed = np.zeros(256, np.uint32)
    room = old.size // 4 + 64
    ranks = np.empty(room, np.uint32)
    owners = np.empty(room, np.uint8)
    differences = np.empty(room, np.uint16)
    count: Any = 0
    for i in range(old.size):
        owner = table[(old[i] >> 7) & 255]
        ranks[count] = passed[owner]
        owners[count] = owner
        differences[count] = new[i] - old[i]
        passed[owner] += np.uint32(1)
        count += np.int64(old[i] != new[i])
    return ranks[:count], owners[:count], differences[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find(live: Any, table: Any, ranks: Any, by: Any, starts: Any) -> None:
    classes = starts.size - 1
    passed = np.zeros(classes, np.uint32)
    wanted = np.empty(classes, np.uint32)
    at = starts[:-1].copy()
    for k in range(classes):
        wanted[k] = ranks[at[k]] if at[k] < starts[k + 1] else np.uint32(0xFFFFFFFF)
    for i in range(live.size):
        owner = table[(live[i] >> 7) & 255]
        if passed[owner] == wanted[owner]:
            live[i] += by[at[owner]]
            at[owner] += 1
            inside = at[owner] < starts[owner + 1]
            wanted[owner] = ranks[at[owner]] if inside else np.uint32(0xFFFFFFFF)
        passed[owner] += np.uint32(1)
