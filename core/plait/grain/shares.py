"""The shares of every tensor: which of its items belong to which slot."""

import re
from collections.abc import Iterator
from typing import Final

from plait.cut import Segment
from plait.grain.roles import Role, Rules
from plait.grain.runs import run_of
from plait.layout import Layout, TensorSpec, words_per_item

COMMON: Final = 0


class Shares:
    """The shares of every tensor of a layout.

    Args:
        grain, kv_heads, rules: as in `grain_cut`.
    """

    def __init__(self, layout: Layout, grain: int, kv_heads: int | None, rules: Rules) -> None:
        self._grain = grain
        self._heads_divide = kv_heads is not None and kv_heads % grain == 0
        self._rules = [(re.compile(pattern), role) for pattern, role in rules]
        self._experts: dict[str, set[int]] = {}
        for tensor in layout.tensors:
            role, match = self._role_of(tensor.name)
            if role.kind == "experts" and match is not None:
                self._experts.setdefault(match["group"], set()).add(int(match["number"]))

    def of(self, tensor: TensorSpec, start: int) -> Iterator[tuple[int, Segment]]:
        """(slot, segment) of the tensor's parts, which cover it in order of their slots."""
        role, match = self._role_of(tensor.name)
        found: list[tuple[int, Segment]] = []
        if role.kind == "experts" and match is not None:
            found = self._expert(tensor, start, match)
        elif role.kind == "rows" and (self._heads_divide or not role.key_value):
            found = self._rows(tensor, start, role)
        elif role.kind == "columns":
            found = self._columns(tensor, start)
        yield from found or [(COMMON, run_of(start, tensor.items))]

    def _role_of(self, name: str) -> tuple[Role, re.Match[str] | None]:
        for pattern, role in self._rules:
            if match := pattern.fullmatch(name):
                return role, match
        return Role("common"), None

    def _rows(self, tensor: TensorSpec, start: int, role: Role) -> list[tuple[int, Segment]]:
        rows = tensor.shape[0] if tensor.shape else 0
        # Packed items of sub-byte types may cross the rows.
        if not rows or rows % role.parts or tensor.items % rows:
            return []
        part, row_items = rows // role.parts, tensor.items // rows
        padded = -(-part // role.padding) * role.padding
        if padded % self._grain:
            return []
        share, width = padded // self._grain, row_items * words_per_item(tensor.item_bytes)
        return [
            (1 + slot, run_of(start + (number * part + first) * width, (end - first) * row_items))
            for slot in range(self._grain)
            for first, end in [(min(slot * share, part), min((slot + 1) * share, part))]
            for number in range(role.parts if first < end else 0)
        ]

    def _columns(self, tensor: TensorSpec, start: int) -> list[tuple[int, Segment]]:
        if len(tensor.shape) != 2:
            return []
        rows, row_items = tensor.shape[0], tensor.items // tensor.shape[0]
        if rows * row_items != tensor.items or row_items % self._grain:
            return []
        if tensor.shape[1] % self._grain:
            return []
        run, width = row_items // self._grain, words_per_item(tensor.item_bytes)
        if rows == 1:
            return [(1 + s, run_of(start + s * run * width, run)) for s in range(self._grain)]
        return [
            (1 + slot, Segment(start + slot * run * width, run, row_items * width, rows))
            for slot in range(self._grain)
        ]

    def _expert(
        self, tensor: TensorSpec, start: int, match: re.Match[str]
    ) -> list[tuple[int, Segment]]:
        numbers = self._experts[match["group"]]
        if len(numbers) % self._grain or max(numbers) != len(numbers) - 1:
            return []
        slot = 1 + int(match["number"]) * self._grain // len(numbers)
        return [(slot, run_of(start, tensor.items))]
