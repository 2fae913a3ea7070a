"""Weights that are not held as a whole: some tensors of a layout, or live ones read on demand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from plait.layout import Layout
from plait_trainer.live import LiveTensor


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


@dataclass(frozen=True, eq=False)
class LiveWeights:
    """The live tensors, each read anew when it is asked for: nothing can be applied to them."""

    layout: Layout
    live: Mapping[str, LiveTensor]

    def bits(self, name: str) -> NDArray[Any]:
        return self.live[name].bits(0, self.layout[name].items)
