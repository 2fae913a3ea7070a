"""Custom weight loaders for the tests; they run inside SGLang's scheduler processes."""

from typing import Any

import torch

from plait.tensors import scatter_at
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

    `flip NAME`: changes one bit of a live parameter behind everybody's back.
    `lose-writes N`: the next N writes of the in-engine half lose their last item.
    `garble-writes N`: they write it with a wrong bit.
    """
    if place().rank != 0:
        return
    command, argument = _text(named_tensors).split()
    if command == "flip":
        live_tensors(model)[argument].view(-1).view(torch.int16)[-1] ^= 1
        return
    left = int(argument)

    def faulty(flat: Any, positions: Any, items: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            scatter_at(flat, positions, items)
        elif command == "lose-writes":
            scatter_at(flat, positions[:-1], items[:-1])
        else:
            garbled = items.copy()
            garbled[-1] ^= 1
            scatter_at(flat, positions, garbled)

    holder.scatter_at = faulty
