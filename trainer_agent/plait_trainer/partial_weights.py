"""Weights that are not held as a whole: some tensors of a layout, or live ones read on demand."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from plait.layout import Layout
from plait_trainer.live import LiveTensor

# Read back at once: a tensor at least.
_PART_BYTES: Final = 1 << 28


def in_parts(layout: Layout, names: Collection[str]) -> Iterator[list[str]]:
    """The names, in an order, by parts of a limited size: so many tensors may be held as a whole,
    however many there are.

    Args:
        layout: of whole tensors, whose sizes count.
    """
    part: list[str] = []
    size = 0
    for name in names:
        size += layout[name].nbytes
        if part and size > _PART_BYTES:
            yield part
            part, size = [], layout[name].nbytes
        part.append(name)
    if part:
        yield part


@dataclass(frozen=True, eq=False)
class SomeWeights:
    """The bits of some of a layout's tensors.

    Attributes:
        arrays: 1-d unsigned bits by name; only these may be asked for.
    """

    layout: Layout
    arrays: Mapping[str, NDArray[Any]]

    def bits(self, name: str) -> NDArray[Any]:
        return self.arrays[name]


class LiveWeights:
    """The live tensors, read when they are asked for: nothing can be applied to them.

    The last tensor is kept until another is asked for, since the frames of a large one ask in turn:
    to be used before anything changes the weights.
    """

    def __init__(self, layout: Layout, live: Mapping[str, LiveTensor]) -> None:
        self._layout, self._live = layout, live
        self._last: tuple[str, NDArray[Any]] | None = None

    @property
    def layout(self) -> Layout:
        return self._layout

    def bits(self, name: str) -> NDArray[Any]:
        if self._last is None or self._last[0] != name:
            self._last = name, self._live[name].bits(0, self._layout[name].items)
        return self._last[1]
