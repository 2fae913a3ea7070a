"""What of a tensor this process holds: all of it, or a block.

Torch's distributed tensors take seconds to import, and are imported where there is one.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from plait_trainer.huggingface import View
from plait_trainer.live import LiveTensor, TensorView


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def view_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> LiveTensor:
    """A tensor under its published name and dtype: all of it, or the block that is held here.

    Raises:
        LayoutInvalid: a dtype that no layout can have.
        PublishError: it has no values, or is distributed in a way that has no blocks.
    """
    if not is_distributed(tensor):
        return TensorView(name, tensor, dtype)
    dtensors: Any = importlib.import_module("plait_trainer.dtensors")
    view: LiveTensor = dtensors.shard_view(name, tensor, dtype)
    return view


def written_views(
    tensor: torch.Tensor, written: Mapping[str, tuple[torch.dtype, View]]
) -> Iterator[LiveTensor]:
    """What is written of a tensor: views of its elements, or the blocks of them held here.

    Args:
        written: published name → (published dtype, view).
    Raises:
        LayoutInvalid: a dtype that no layout can have.
        PublishError: no values; or it is distributed so that a view lies on several processes.
    """
    if not is_distributed(tensor):
        for name, (dtype, view) in written.items():
            yield TensorView(name, view.of(tensor), dtype)
        return
    dtensors: Any = importlib.import_module("plait_trainer.dtensors")
    yield from dtensors.written_views(tensor, written)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is held in this process's memory, detached."""
    detached = tensor.detach()
    if not is_distributed(detached):
        return detached
    with torch.no_grad():
        local: torch.Tensor = detached.to_local()  # type: ignore[attr-defined]
        return local
