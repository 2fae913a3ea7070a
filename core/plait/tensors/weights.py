"""A torch state dict as `Weights`, and its layout."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from plait.errors import LayoutChanged
from plait.layout import Layout, TensorSpec
from plait.tensors.bits import bits_of, dtype_name


def layout_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The layout that a checkpoint of these tensors has.

    Raises:
        LayoutInvalid: a name, dtype or shape that no layout can have.
    """
    return Layout.of(
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


class StateDictWeights:
    """Contiguous CPU tensors as `Weights`; writes go into the tensors themselves.

    Args:
        layout: which tensors, and what they must be.
        tensors: by canonical name; others are ignored (an engine's own buffers, say).
    Raises:
        LayoutChanged: one is missing, or has another dtype or shape.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        held = {t.name: tensors[t.name] for t in layout.tensors if t.name in tensors}
        layout.require_equal(layout_of_tensors(held), what="the state dict")
        self._layout = layout
        self._tensors = held

    @property
    def layout(self) -> Layout:
        return self._layout

    def bits(self, name: str) -> NDArray[Any]:
        """1-d unsigned view of the tensor's items, row-major.

        Raises:
            LayoutChanged: the layout has no such tensor.
            UsageError: the tensor isn't contiguous, or not in CPU memory.
        """
        if name not in self._tensors:
            raise LayoutChanged(f"the layout has no tensor {name!r}")
        return bits_of(self._tensors[name])
