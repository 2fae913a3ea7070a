"""Converters: a training process's own tensors, seen as blocks of the checkpoint's.

A training framework fuses, transposes, pads and shards what the checkpoint has as plain tensors. A
converter says which strided view of which training tensor is which block of which checkpoint
tensor. Since a block is a view, it serves both ways: publishing reads it where it lives, and
`load` writes into it. Nothing is gathered, and nothing larger than a block is ever copied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Protocol, TypeAlias

import torch

from plait.errors import LayoutChanged, LayoutInvalid, PublishError
from plait.tensors.bits import INTEGERS
from plait_trainer import huggingface
from plait_trainer.dtypes import DtypeRule
from plait_trainer.live import LiveTensor, ShardView
from plait_trainer.shards import is_distributed
from plait_trainer.ties import without_aliases

State: TypeAlias = Mapping[str, torch.Tensor]
Shape: TypeAlias = tuple[int, ...]

# (from, to): every value of the one is a value of the other.
_WIDENED: Final = frozenset(
    {
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64), (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Block:
    """A hyper-rectangle of one checkpoint tensor, held here as a view of a training tensor.

    Attributes:
        name, shape: of the whole tensor in the checkpoint.
        offsets, sizes: of the rectangle in it, one of each for each dimension.
        tensor: as many elements as the rectangle has, in its row-major order; any strides, and any
            number of dimensions. Writing into it writes into the training tensor.
        is_copy: whether the model keeps the same value a second time here (a tied output layer on
            another pipeline stage): written to, and never published from.
        keeps_dtype: not a weight that is cast when it is published (a buffer).

    Raises:
        LayoutInvalid: the rectangle isn't inside the tensor, or the view has other elements.
    """

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    tensor: torch.Tensor
    keeps_dtype: bool = False
    is_copy: bool = False

    def __post_init__(self) -> None:
        dimensions = len(self.shape) == len(self.offsets) == len(self.sizes)
        bounds = zip(self.offsets, self.sizes, self.shape, strict=dimensions)
        if not dimensions or any(at < 0 or n < 0 or at + n > side for at, n, side in bounds):
            raise LayoutInvalid(
                f"a block of {self.name!r} at {list(self.offsets)} of {list(self.sizes)} isn't "
                f"inside of {list(self.shape)}"
            )
        if self.tensor.numel() != prod(self.sizes):
            raise LayoutInvalid(
                f"a block of {self.name!r} of {list(self.sizes)} is given by a view of "
                f"{list(self.tensor.shape)}"
            )

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, *, keeps_dtype: bool = False) -> "Block":
        """All of a checkpoint tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor, keeps_dtype)

    @property
    def region(self) -> tuple[slice, ...]:
        """The index of the rectangle in the whole tensor."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)


class Converter(Protocol):
    """What a training process's tensors are in the checkpoint."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor that the checkpoint has, whole, wherever its blocks are held."""
        ...

    @property
    def ties(self) -> Mapping[str, str]:
        """Alias → name in the checkpoint, of which an alias need not be in one."""
        ...

    def blocks(self, state: State) -> Iterator[Block]:
        """The blocks that a process holds, at most one of each tensor but for copies.

        Over all processes every element is held; what several hold, they hold as equal blocks.

        Args:
            state: the process's own tensors, by the training framework's names.
        Raises:
            PublishError: a tensor that the converter doesn't know, or that isn't as it should be;
                or one that should be there and isn't.
        """
        ...


@dataclass(frozen=True, eq=False)
class HuggingFaceConverter:
    """A `transformers` model's own parameters: identity, but for experts that it keeps stacked."""

    module: torch.nn.Module

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {block.name: block.shape for block in self.blocks(self.module.state_dict())}

    @property
    def ties(self) -> Mapping[str, str]:
        return huggingface.declared_ties(self.module)

    def blocks(self, state: State) -> Iterator[Block]:
        written = {
            name: tensor for name, tensor in without_aliases(state, self.ties).items()
            if not huggingface.not_written(self.module, name)
        }  # fmt: skip
        for name, tensor in written.items():
            if not tensor.is_contiguous():
                raise PublishError(
                    f"parameter {name!r} has strides {list(tensor.stride())}; expected a "
                    "contiguous one"
                )
        for name, (origin, view) in huggingface.WrittenViews(self.module).of(written).items():
            tensor = written[origin]
            yield Block.whole(name, tensor if view is None else view.of(tensor))


@dataclass(frozen=True, eq=False)
class ConvertedSource:
    """A `TensorSource`: what a `Publisher` publishes of a model that trains in another layout.

    Attributes:
        parts: the process's tensors by name, or a function that gives them anew at every publish,
            with the converter that knows them. More than one where a process holds several pieces
            of the model (the chunks of a virtual pipeline).
    """

    parts: Sequence[tuple[State | Callable[[], State], Converter]]
    dtypes: DtypeRule

    def tensors(self) -> Iterator[LiveTensor]:
        for state, converter in self.parts:
            for block in converter.blocks(state() if callable(state) else state):
                if not block.is_copy:
                    dtype = self.dtypes.published(block.name, block.tensor, kept=block.keeps_dtype)
                    yield ShardView(
                        block.name, block.tensor, dtype, block.shape, block.offsets, block.sizes
                    )


@torch.no_grad()
def load(converter: Converter, state: State, weights: State) -> None:
    """Write a checkpoint into a process's own tensors, bit for bit.

    What belongs to no block (the rows that pad a vocabulary) stays as it is.

    Args:
        state: the process's own tensors; written to through the converter's views.
        weights: the checkpoint: all of its names, whatever this process holds of them. A mapping
            that reads a tensor when it is asked for is asked twice for each.
    Raises:
        LayoutChanged: a name is missing or unknown, or a shape isn't the converter's.
        PublishError: a value doesn't fit the training tensor's dtype, or as `Converter.blocks` and
            `ties.without_aliases` say. In each case nothing was written.
    """
    blocks = list(converter.blocks(state))
    _require_names(converter, weights)
    for block in blocks:
        _require_fits(block, weights[block.name])
    for block in blocks:
        target = block.tensor.detach()
        part = weights[block.name].detach()[block.region].to(target.dtype)
        _bits(target).copy_(_bits(part).reshape(target.shape))


def _require_names(converter: Converter, weights: State) -> None:
    for alias, name in converter.ties.items():
        if alias in weights and name in weights:
            without_aliases({alias: weights[alias], name: weights[name]}, {alias: name})
    expected = converter.shapes
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys() - converter.ties.keys())
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] * bool(missing)
        parts += [f"has {_some(unknown)}, which the model doesn't know"] * bool(unknown)
        raise LayoutChanged(f"the checkpoint {' and '.join(parts)}")


def _require_fits(block: Block, tensor: torch.Tensor) -> None:
    if is_distributed(block.tensor):
        raise PublishError(
            f"{block.name!r} is loaded into a distributed tensor, of which no block is a view",
            remedy="load the checkpoint before the model is sharded",
        )
    if tuple(tensor.shape) != block.shape:
        raise LayoutChanged(
            f"{block.name!r} has the shape {list(tensor.shape)}; expected {list(block.shape)}"
        )
    dtypes = tensor.dtype, block.tensor.dtype
    if dtypes not in _WIDENED and tensor.dtype != block.tensor.dtype:
        raise PublishError(
            f"{block.name!r} is {tensor.dtype} and may be rounded to {block.tensor.dtype}",
            remedy="cast the checkpoint first, if that is meant",
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, whatever the strides: no copy may touch a NaN's payload."""
    return tensor.view(INTEGERS[tensor.element_size()])


def _some(names: list[str]) -> str:
    listed = ", ".join(map(repr, names[:3]))
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"
