"""One of four processes that publish a Megatron-Core layout together.

    python -m tests.trainer_agent.megatron.group_program FOLDER RANK URL POLICY

Two pipeline stages of two tensor-parallel ranks, whose experts are dealt out whole. The first
version holds the weights of one seed, the second is what is loaded over them.
"""

import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from plait_trainer.converter import load
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, converted
from tests.trainer_agent.megatron.layouts import Style, Weights, random_weights, state_of

WORLD: Final = 4
SHAPE: Final = ModelShape(
    layers=4, hidden=24, heads=8, groups=4, head_dim=4, vocab=21, ffn=16, experts=4, expert_ffn=8,
    dense_layers=frozenset({2}), is_tied=True,
)  # fmt: skip
STYLE: Final = Style(fused_norms=True, experts="te", padded=32)


def first_weights() -> Weights:
    return random_weights(SHAPE, seed=1)


def next_weights() -> Weights:
    """One element in fifty has other bits."""
    noise = torch.Generator().manual_seed(2)
    found = {}
    for name, tensor in first_weights().items():
        changed = (torch.rand(tensor.shape, generator=noise) < 0.02).to(torch.int16)
        found[name] = (tensor.view(torch.int16) ^ changed).view(torch.bfloat16)
    return found


def main(folder: Path, rank: int, url: str, policy: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD
    )
    place = ParallelPlace.of_rank(rank, WORLD, tp=2, pp=2, ep=2, etp=1)
    state = state_of(SHAPE, first_weights(), place, STYLE)
    source = converted([lambda: state], SHAPE, [place])
    with (
        RegistryClient(url) as client,
        Publisher(source, client=client, policy=policy, group=True) as publisher,
    ):
        publisher.publish()
        publisher.flush()
        load(MegatronConverter(SHAPE, place), state, next_weights())
        publisher.publish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
