"""How one dimension of a tensor is dealt out to the processes of a parallel group."""

from dataclasses import dataclass

import torch

from plait.errors import PublishError, UsageError
from plait_trainer.converter import Block, Shape


@dataclass(frozen=True)
class Split:
    """One process's part of everything that is dealt out evenly to a group.

    Attributes:
        what: the group's name, for messages.
    """

    what: str
    rank: int
    size: int

    def part(self, count: int, of: str) -> int:
        """What one process has of `count`.

        Raises:
            UsageError: they can't be dealt out evenly.
        """
        if count % self.size:
            raise UsageError(
                f"{count} {of} can't be dealt out to {self.size} {self.what} ranks evenly"
            )
        return count // self.size

    def block(self, name: str, shape: Shape, tensor: torch.Tensor, dim: int) -> Block:
        """A view of this process's part of dimension `dim`."""
        size = shape[dim] // self.size
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = self.rank * size, size
        return Block(name, shape, tuple(offsets), tuple(sizes), tensor)


@dataclass(frozen=True, eq=False)
class Parameter:
    """One of a process's own tensors.

    Attributes:
        name: in the process's model.
        path: in its layer; the name where it is in none.
    """

    name: str
    path: str
    tensor: torch.Tensor

    def of_shape(self, expected: Shape) -> torch.Tensor:
        """The tensor.

        Raises:
            PublishError: another shape: the model isn't the one described, or is sharded otherwise.
        """
        if tuple(self.tensor.shape) != expected:
            raise PublishError(
                f"parameter {self.name!r} has the shape {list(self.tensor.shape)}; expected "
                f"{list(expected)} of such a model at this place",
                remedy="compare the ModelShape and the ParallelPlace with what the trainer runs",
            )
        return self.tensor

    def reread(self, declared: Shape, shape: Shape) -> torch.Tensor:
        """The tensor's memory in another shape.

        Raises:
            PublishError: it isn't of the declared shape, or not contiguous.
        """
        if not self.of_shape(declared).is_contiguous():
            raise PublishError(
                f"parameter {self.name!r} has strides {list(self.tensor.stride())}; expected a "
                "contiguous one"
            )
        return self.tensor.view(shape)
