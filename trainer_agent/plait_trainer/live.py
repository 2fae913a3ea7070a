"""What is published: tensors as the checkpoint has them, read where they live.

A live tensor is asked for its bits run by run, so that a cast or a copy never spans a whole tensor,
let alone a model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray

from plait.errors import LayoutInvalid, PublishError
from plait.layout import Layout, TensorSpec
from plait.tensors import bits_of, dtype_name
from plait_trainer.blocks import BlockSpec


class LiveTensor(Protocol):
    """One tensor of the layout, and the way to its present value."""

    @property
    def spec(self) -> TensorSpec: ...

    def bits(self, start: int, stop: int) -> NDArray[Any]:
        """Items [start, stop), row-major, as 1-d unsigned integers in CPU memory.

        May share memory with the live weights: to be used before anything changes them.
        """
        ...


@runtime_checkable
class TensorSource(Protocol):
    """Where the published tensors come from. Asked anew at every publish, on the caller's thread.

    An implementation for sharded or fused training layouts gives tensors of canonical name and
    shape, and converts as they are read.
    """

    def tensors(self) -> Iterable[LiveTensor]:
        """Every published tensor, in any order.

        Raises:
            LayoutInvalid, PublishError: it can't be published as it stands.
        """
        ...


@dataclass(frozen=True, eq=False)
class TensorView:
    """A torch tensor of any strides on any device, published under a name and a dtype.

    Attributes:
        tensor: logical values; no copy is made of it.
        dtype: published; values of another dtype are rounded to it as `Tensor.to` does.

    Raises:
        LayoutInvalid: a dtype that no layout can have.
        PublishError: no values to read (a meta tensor), or a DTensor, which `shards.view_of` views.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.tensor.device.type == "meta":
            raise PublishError(
                f"tensor {self.name!r} is on the meta device and has no values",
                remedy="load the weights before publishing",
            )
        if hasattr(self.tensor, "full_tensor"):
            raise PublishError(
                f"tensor {self.name!r} is distributed: a view of it holds a process's block",
                remedy="make the view with plait_trainer.shards.view_of",
            )
        dtype_name(self.dtype)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, dtype_name(self.dtype), tuple(self.tensor.shape))

    def bits(self, start: int, stop: int) -> NDArray[Any]:
        run = run_of(self.tensor.detach(), start, stop)
        # Equal dtypes pass through untouched: NaN payloads are bits like any other.
        return bits_of(run.to(self.dtype).resolve_conj().resolve_neg().cpu().contiguous())


@dataclass(frozen=True, eq=False)
class ShardView(TensorView):
    """A block of a published tensor: the hyper-rectangle that this process holds.

    `bits` counts the block's own items, row-major within it; `spec` is the whole tensor's.

    Attributes:
        tensor: the block's elements; its row-major order is the block's, whatever its shape.
        shape: of the whole tensor.
        offsets, sizes: of the rectangle, one of each for each dimension.

    Raises:
        LayoutInvalid: it isn't inside of the tensor, or the block has other elements.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor.numel() != prod(self.sizes):
            raise LayoutInvalid(
                f"a block of {self.name!r} of {list(self.sizes)} is given by a tensor of "
                f"{list(self.tensor.shape)}"
            )
        BlockSpec(self.spec, self.offsets, self.sizes)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, dtype_name(self.dtype), self.shape)

    @property
    def block(self) -> BlockSpec:
        return BlockSpec(self.spec, self.offsets, self.sizes)


def block_of(live: LiveTensor) -> BlockSpec:
    """What of its tensor a live tensor holds: all of it, unless it says otherwise."""
    return live.block if isinstance(live, ShardView) else BlockSpec.all_of(live.spec)


def layout_of(tensors: Iterable[LiveTensor]) -> Layout:
    """The layout that a checkpoint of these tensors has.

    Raises:
        LayoutInvalid: a name occurs twice, or a shape that no layout can have.
    """
    return Layout.of(tensor.spec for tensor in tensors)


def run_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) in row-major order, 1-d. Where it copies, it copies at most the rows
    that hold them, or the rows of a row that is longer than they are."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor.numel() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    if last - first == 1:
        return run_of(tensor[first], start - first * row, stop - first * row)
    if last - first == 2 and row > stop - start:
        border = (first + 1) * row
        return torch.cat([run_of(tensor, start, border), run_of(tensor, border, stop)])
    rows = tensor[first:last].reshape(-1)
    return rows[start - first * row : stop - first * row]
