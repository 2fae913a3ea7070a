"""Attention, norms and MLPs: Megatron-Core's parameters of a layer as blocks of a checkpoint."""

from collections.abc import Iterator

from plait_trainer.converter import Block
from plait_trainer.megatron.cutting import Parameter, Split
from plait_trainer.megatron.shape import ModelShape


def attention_blocks(
    shape: ModelShape, split: Split, parameter: Parameter, target: str
) -> Iterator[Block]:
    """Blocks of a parameter of `self_attention`, without its layer norm.

    Args:
        target: prefix of the layer's attention in the checkpoint.
    """
    _, module, kind = parameter.path.split(".")
    queries = shape.heads * shape.head_dim
    if module == "linear_qkv":
        yield from _query_key_value(shape, split, parameter, target, kind)
    elif module == "linear_proj" and kind == "weight":
        tensor = parameter.of_shape((shape.hidden, split.part(queries, "query features")))
        yield split.block(f"{target}.o_proj.weight", (shape.hidden, queries), tensor, dim=1)
    elif module == "linear_proj":
        yield Block.whole(f"{target}.o_proj.bias", parameter.of_shape((shape.hidden,)))
    else:
        tensor = parameter.of_shape((shape.head_dim,))
        yield Block.whole(f"{target}.{module[0]}_norm.weight", tensor)


def _query_key_value(
    shape: ModelShape, split: Split, parameter: Parameter, target: str, kind: str
) -> Iterator[Block]:
    """Each query group's query heads, then its key head, then its value head; groups are dealt out.

    The views keep a dimension for the groups: [groups here, heads, head_dim, hidden].
    """
    rest = (shape.hidden,) if kind == "weight" else ()
    heads, groups = shape.heads_per_group, split.part(shape.groups, "query groups")
    tensor = parameter.of_shape((groups * (heads + 2) * shape.head_dim, *rest))
    grouped = tensor.view(groups, heads + 2, shape.head_dim, *rest)
    parts = {
        "q": (shape.heads, grouped[:, :heads]),
        "k": (shape.groups, grouped[:, heads]),
        "v": (shape.groups, grouped[:, heads + 1]),
    }
    for part, (count, view) in parts.items():
        whole = (count * shape.head_dim, *rest)
        yield split.block(f"{target}.{part}_proj.{kind}", whole, view, dim=0)


def mlp_blocks(
    split: Split, parameter: Parameter, target: str, *, width: int, hidden: int
) -> Iterator[Block]:
    """A gated MLP's `linear_fc1`, a part of the gate above as large a part of the up projection,
    or its `linear_fc2`.

    Args:
        target: prefix of the MLP in the checkpoint.
        width: inside the MLP, over all processes.
    """
    part = split.part(width, "MLP features")
    if "linear_fc1" in parameter.path:
        tensor = parameter.of_shape((2 * part, hidden))
        yield split.block(f"{target}.gate_proj.weight", (width, hidden), tensor[:part], dim=0)
        yield split.block(f"{target}.up_proj.weight", (width, hidden), tensor[part:], dim=0)
    else:
        tensor = parameter.of_shape((hidden, part))
        yield split.block(f"{target}.down_proj.weight", (hidden, width), tensor, dim=1)
