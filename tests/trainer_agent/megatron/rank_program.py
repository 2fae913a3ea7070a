"""One of two processes that run Megatron-Core's models, loaded by the converter.

    python -m tests.trainer_agent.megatron.rank_program FOLDER RANK

For each case the rank loads the checkpoint, reads it back, and takes its part in the forward pass;
whoever has the logits writes them to FOLDER/CASE.pt.
"""

import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from plait_trainer.converter import HuggingFaceConverter, State, load
from plait_trainer.megatron import MegatronConverter, ModelShape, ParallelPlace, current_place
from tests.trainer_agent.megatron.real_models import (
    HIDDEN,
    SEQUENCE,
    VOCAB,
    checkpoint_model,
    grid,
    megatron_logits,
    megatron_model,
)

WORLD: Final = 2
_TP: Final = "tensor_model_parallel_size"
_PP: Final = "pipeline_model_parallel_size"
_EP: Final = "expert_model_parallel_size"

# Case → (kind of model, Megatron-Core's sizes, the same sizes in ours).
CASES: Final[dict[str, tuple[str, dict[str, int], dict[str, int]]]] = {
    "tensor": ("dense", {_TP: 2}, {"tp": 2}),
    "tensor-tied": ("tied", {_TP: 2}, {"tp": 2}),
    "tensor-biased": ("biased", {_TP: 2}, {"tp": 2}),
    "tensor-shared": ("shared", {_TP: 2}, {"tp": 2}),
    "expert": ("mixture", {_EP: 2}, {"ep": 2}),
    "tensor-expert": (
        "sparse", {_TP: 2, _EP: 2, "expert_tensor_parallel_size": 1}, {"tp": 2, "ep": 2, "etp": 1},
    ),
    "pipeline": ("mixture", {_PP: 2}, {"pp": 2}),
    "pipeline-tied": ("tied", {_PP: 2}, {"pp": 2}),
    "virtual": ("dense", {_PP: 2, "virtual_pipeline_model_parallel_size": 2}, {"pp": 2}),
}  # fmt: skip


def main(folder: Path, rank: int) -> None:
    # Megatron-Core says at length what it hasn't got on a CPU.
    warnings.simplefilter("ignore")
    for case, (kind, sizes, ours) in CASES.items():
        (folder / case).mkdir(exist_ok=True)
        model = checkpoint_model(kind)
        with grid(folder / case, rank, WORLD, **sizes):
            logits = run_case(model, rank, ours, sizes)
        if logits is not None:
            torch.save(logits[..., :VOCAB].clone(), folder / f"{case}-{rank}.pt")


def run_case(
    model: Any, rank: int, ours: dict[str, int], sizes: dict[str, int]
) -> torch.Tensor | None:
    shape = ModelShape.of_config(model.config)
    checkpoint = {
        block.name: block.tensor for block in HuggingFaceConverter(model).blocks(model.state_dict())
    }
    count = sizes.get("virtual_pipeline_model_parallel_size", 1)
    chunks = []
    for number in range(count):
        place = current_place(chunk=number)
        if count == 1:
            require_same(place, ParallelPlace.of_rank(rank, WORLD, **ours))
        chunk = megatron_model(model.config, chunk=number if count > 1 else None)
        converter = MegatronConverter(shape, place)
        load(converter, chunk.state_dict(), checkpoint)
        require_held(converter, chunk.state_dict(), checkpoint)
        chunks.append(chunk)
    if ours.get("pp", 1) == 1:
        return megatron_logits(chunks[0])
    return through_stages(chunks, rank)


def through_stages(chunks: list[torch.nn.Module], rank: int) -> torch.Tensor | None:
    """The forward pass from stage to stage, round after round."""
    for number, chunk in enumerate(chunks):
        carried = None
        if rank == 1 or number > 0:
            carried = torch.empty(SEQUENCE, 2, HIDDEN)
            dist.recv(carried, 1 - rank)
        found = megatron_logits(chunk, carried)
        if rank == 1 and number == len(chunks) - 1:
            return found
        dist.send(found.contiguous(), 1 - rank)
    return None


def require_held(converter: MegatronConverter, state: State, checkpoint: State) -> None:
    for block in converter.blocks(state):
        expected = checkpoint[block.name][block.region].contiguous().view(torch.int32)
        found = block.tensor.reshape(block.sizes).contiguous().view(torch.int32)
        if not torch.equal(found, expected):
            raise AssertionError(f"{block.name} differs")


def require_same(found: ParallelPlace, expected: ParallelPlace) -> None:
    if found != expected:
        raise AssertionError(f"Megatron-Core says {found}, expected {expected}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
