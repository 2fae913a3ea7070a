"""Custom weight loaders for the tests; they run inside SGLang's scheduler processes."""

from typing import Any

import torch

from plait_rollout.sglang import holder
from plait_rollout.sglang.model import place
from plait_rollout.sglang.recorder import live_tensors


def _text(named_tensors: Any) -> str:
    return bytes(named_tensors[0][1].tolist()).decode()


def dump(model: Any, named_tensors: Any) -> None:
    """Saves this rank's live tensors, as they are, to PATH.rank."""
    held = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
    torch.save(held, f"{_text(named_tensors)}.{place().rank}")


def disturb(model: Any, named_tensors: Any) -> None:
    """Makes something go wrong on rank 0.

    `flip`: changes one bit of a live parameter behind everybody's back.
    `lose-writes N`: the next N writes of the in-engine half lose their last item.
    """
    if place().rank != 0:
        return
    command, *arguments = _text(named_tensors).split()
    if command == "flip":
        name = next(
            name for name in live_tensors(model) if "mlp" in name or "input_layernorm" in name
        )
        live_tensors(model)[name].view(-1).view(torch.int16)[-1] ^= 1
        return
    whole, left = holder.scatter_at, [int(arguments[0])]

    def lossy(flat: Any, positions: Any, items: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            holder.scatter_at = whole
            whole(flat, positions, items)
        else:
            whole(flat, positions[:-1], items[:-1])

    holder.scatter_at = lossy
