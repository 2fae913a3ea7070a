"""Distributed tensors, as the blocks of the published tensors that this process holds.

Whatever placements a DTensor has (FSDP2's, tensor parallel, both; hybrid with replicas), its local
tensor is a hyper-rectangle of the whole one, at offsets that torch computes. Nothing is gathered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from plait.errors import PublishError
from plait_trainer.huggingface import View
from plait_trainer.live import ShardView
from plait_trainer.shards import local_part


def shard_view(name: str, tensor: DTensor, dtype: torch.dtype) -> ShardView:
    """The block of a distributed tensor that is held here, under its published name and dtype.

    Raises:
        LayoutInvalid: a dtype that no layout can have.
        PublishError: it has no values, or is distributed in a way that has no blocks.
    """
    shape = tuple(tensor.shape)
    local = local_part(tensor)
    if tensor.device_mesh.get_coordinate() is None:  # its mesh doesn't reach this process
        none = (0,) * len(shape)
        if not shape:
            raise PublishError(f"the scalar {name!r} is distributed over other processes only")
        return ShardView(name, local.new_empty(none), dtype, shape, none, none)
    for placement in tensor.placements:
        if placement.is_partial():
            raise PublishError(
                f"{name!r} is placed {placement}: each process holds a part of a sum",
                remedy="redistribute it before publishing",
            )
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    _require_consecutive(name, tensor, offsets, sizes)
    return ShardView(name, local, dtype, shape, offsets, sizes)


def written_views(
    tensor: DTensor, written: Mapping[str, tuple[torch.dtype, View]]
) -> Iterator[ShardView]:
    """What is written of a distributed tensor: experts, where it is a stack of them.

    A process that holds all elements of a view holds all of it; one that holds none, nothing.

    Args:
        written: published name → (published dtype, view).
    Raises:
        LayoutInvalid, PublishError: as for `shard_view`; or a view lies on several processes.
    """
    # Found once: there may be hundreds of views.
    stack = shard_view(next(iter(written)), tensor, tensor.dtype)
    is_of_rows = stack.sizes[1:] == stack.shape[1:]
    start = stack.offsets[0] * prod(stack.shape[1:]) if stack.shape else 0
    stop = start + stack.tensor.numel()
    for name, (dtype, view) in written.items():
        nowhere = (0,) * len(view.shape)
        if is_of_rows and start <= view.offset and view.end <= stop:
            held = replace(view, offset=view.offset - start).of(stack.tensor)
            yield ShardView(name, held, dtype, view.shape, nowhere, view.shape)
        elif is_of_rows and (stop <= view.offset or view.end <= start):
            none = stack.tensor.new_empty(nowhere)
            yield ShardView(name, none, dtype, view.shape, nowhere, nowhere)
        else:
            raise PublishError(
                f"{name!r} is written as a part of a parameter that is placed "
                f"{tensor.placements}, which cuts it",
                remedy="shard stacked experts along their first dimension only",
            )


def _require_consecutive(
    name: str, tensor: DTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Proves that a strided placement, whose local indices may have gaps, has none here."""
    strided = {p.dim for p in tensor.placements if isinstance(p, _StridedShard)}
    for axis in strided:
        found = _indices(tensor, axis)
        wanted = torch.arange(offsets[axis], offsets[axis] + sizes[axis])
        if not torch.equal(found, wanted):
            raise PublishError(
                f"{name!r} is placed {tensor.placements}: what this process holds of its dimension "
                f"{axis} isn't consecutive",
                remedy="shard the dimension evenly, or over one dimension of the mesh",
            )


def _indices(tensor: DTensor, axis: int) -> torch.Tensor:
    """Of the whole tensor's dimension, as the local one has them: split as torch splits."""
    indices = torch.arange(tensor.shape[axis])
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    for number, placement in enumerate(tensor.placements):
        split = _along_one(placement, axis)
        if split is not None:
            parts, _ = split._split_tensor(indices, mesh.size(number), with_padding=False)
            indices = parts[coordinate[number]]
    return indices


def _along_one(placement: Placement, axis: int) -> "Shard | _StridedShard | None":
    """The placement for a tensor of that dimension only; None: it leaves the dimension alone."""
    if isinstance(placement, _StridedShard) and placement.dim == axis:
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0) if isinstance(placement, Shard) and placement.dim == axis else None
