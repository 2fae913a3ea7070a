"""A mixture's router and experts, in the three ways in which Megatron-Core keeps these."""

import re
from collections.abc import Iterator
from typing import Final

from plait.errors import PublishError
from plait_trainer.converter import Block
from plait_trainer.megatron.cutting import Parameter, Split
from plait_trainer.megatron.layers import mlp_blocks
from plait_trainer.megatron.shape import ModelShape

# One module for each expert, or one for all of them with a parameter for each.
_SEQUENTIAL: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc[12]\.weight")
_TE_GROUPED: Final = re.compile(r"mlp\.experts\.linear_fc[12]\.weight(\d+)")


def router_block(shape: ModelShape, parameter: Parameter, target: str) -> Block:
    """The router's weight, or the bias that balances its experts, which stays in its own dtype."""
    if parameter.path.endswith("expert_bias"):
        tensor = parameter.of_shape((shape.experts,))
        return Block.whole(f"{target}.e_score_correction_bias", tensor, keeps_dtype=True)
    return Block.whole(f"{target}.weight", parameter.of_shape((shape.experts, shape.hidden)))


def expert_blocks(
    shape: ModelShape, split: Split, local: range, parameter: Parameter, target: str
) -> Iterator[Block] | None:
    """Blocks of a parameter of `mlp.experts`; None if it isn't one.

    Args:
        split: of each expert's features.
        local: numbers of the experts held here.
        target: prefix of the layer's experts in the checkpoint.
    """
    path = parameter.path
    if match := _SEQUENTIAL.fullmatch(path) or _TE_GROUPED.fullmatch(path):
        number = int(match[1])
        if number >= len(local):
            raise PublishError(
                f"parameter {parameter.name!r} is of expert {number}; expected {len(local)} at "
                "this place",
                remedy="compare the ModelShape and the ParallelPlace with what the trainer runs",
            )
        sizes = {"width": shape.expert_ffn, "hidden": shape.hidden}
        return mlp_blocks(split, parameter, f"{target}.{local[number]}", **sizes)
    if path == "mlp.experts.weight1":
        return _grouped_first(shape, split, local, parameter, target)
    if path == "mlp.experts.weight2":
        return _grouped_second(shape, split, local, parameter, target)
    return None


def _grouped_first(
    shape: ModelShape, split: Split, local: range, parameter: Parameter, target: str
) -> Iterator[Block]:
    """`GroupedMLP.weight1`: declared as [hidden, experts x 2 x features], but its memory is read as
    [experts, hidden, 2 x features]: gate, then up, transposed."""
    width = split.part(shape.expert_ffn, "expert features")
    declared = (shape.hidden, len(local) * 2 * width)
    by_expert = parameter.reread(declared, (len(local), shape.hidden, 2, width))
    whole = (shape.expert_ffn, shape.hidden)
    for expert, part in zip(local, by_expert, strict=True):
        gate, up = part.unbind(1)
        yield split.block(f"{target}.{expert}.gate_proj.weight", whole, gate.t(), dim=0)
        yield split.block(f"{target}.{expert}.up_proj.weight", whole, up.t(), dim=0)


def _grouped_second(
    shape: ModelShape, split: Split, local: range, parameter: Parameter, target: str
) -> Iterator[Block]:
    """`GroupedMLP.weight2`: [experts x features, hidden], transposed."""
    width = split.part(shape.expert_ffn, "expert features")
    declared = (len(local) * width, shape.hidden)
    by_expert = parameter.reread(declared, (len(local), width, shape.hidden))
    whole = (shape.hidden, shape.expert_ffn)
    for expert, part in zip(local, by_expert, strict=True):
        yield split.block(f"{target}.{expert}.down_proj.weight", whole, part.t(), dim=1)
