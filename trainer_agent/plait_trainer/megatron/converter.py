"""A Megatron-Core GPT model's parameters, at one place in its grids, as blocks of a checkpoint."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from plait.errors import PublishError, UsageError
from plait_trainer.converter import Block, ConvertedSource, Shape, State
from plait_trainer.dtypes import DtypeRule
from plait_trainer.megatron.cutting import Parameter, Split
from plait_trainer.megatron.layers import attention_blocks, mlp_blocks
from plait_trainer.megatron.mixture import expert_blocks, router_block
from plait_trainer.megatron.place import ParallelPlace
from plait_trainer.megatron.shape import ModelShape
from plait_trainer.naming import canonical_names

_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EMBEDDING: Final = "model.embed_tokens.weight"
_WORDS: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer.weight"
# Separate modules, or fused into the linear that reads them (Transformer Engine).
_NORMS: Final = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_ATTENTION: Final = frozenset(
    f"self_attention.{name}"
    for name in (
        "linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_proj.bias",
        "q_layernorm.weight", "k_layernorm.weight",
    )
)  # fmt: skip
_MLP: Final = frozenset({"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"})
_SHARED: Final = frozenset(
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"}
)
_ROUTER: Final = frozenset({"mlp.router.weight", "mlp.router.expert_bias"})


class MegatronConverter:
    """A `Converter` for the `GPTModel` of a Qwen, dense or a mixture.

    Args:
        shape: the whole model's sizes.
        place: where this process, or this model chunk of it, stands.

    Raises:
        UsageError: the model can't be dealt out like that; query groups fewer than tensor-parallel
            ranks are among it.
    """

    def __init__(self, shape: ModelShape, place: ParallelPlace | None = None) -> None:
        self._shape, self._place = shape, place or ParallelPlace()
        place = self._place
        self._tp = Split("tensor-parallel", place.tp_rank, place.tp_size)
        self._etp = Split("expert-tensor-parallel", *place.of("etp"))
        if shape.groups < place.tp_size:
            raise UsageError(
                f"{shape.groups} query groups are fewer than {place.tp_size} tensor-parallel "
                "ranks, and a key head would be cut",
                remedy="train with at most as many tensor-parallel ranks as key-value heads",
            )
        self._tp.part(shape.groups, "query groups")
        self._layers = place.layers_of(shape.layers)
        by_rank = Split("expert-parallel", place.ep_rank, place.ep_size)
        experts = by_rank.part(shape.experts, "experts") if shape.experts else 0
        self._experts = range(place.ep_rank * experts, (place.ep_rank + 1) * experts)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shape.tensors()

    @property
    def ties(self) -> Mapping[str, str]:
        return {"lm_head.weight": _EMBEDDING} if self._shape.is_tied else {}

    def blocks(self, state: State) -> Iterator[Block]:
        origins: dict[str, str] = {}
        found: list[Block] = []
        for name, tensor in canonical_names(state).items():
            # Recipes of quantised modules, not weights.
            if name.rpartition(".")[2].startswith("_extra_state"):
                continue
            for block in self._blocks_of(name, tensor):
                is_copy = name == _OUTPUT and self._shape.is_tied
                if not is_copy and origins.setdefault(block.name, name) != name:
                    raise PublishError(
                        f"parameters {origins[block.name]!r} and {name!r} both would be "
                        f"{block.name!r}"
                    )
                found.append(block)
        self._require_all(origins)
        return iter(found)

    def _blocks_of(self, name: str, tensor: torch.Tensor) -> Iterator[Block]:
        parameter, blocks = Parameter(name, name, tensor), None
        if match := _LAYER.fullmatch(name):
            number = int(match[1])
            if number >= len(self._layers):
                raise PublishError(
                    f"parameter {name!r} is of layer {number}; expected {len(self._layers)} layers "
                    "at this place",
                    remedy="give the place the indices of its layers (layers=range(…))",
                )
            blocks = self._layer_blocks(self._layers[number], Parameter(name, match[2], tensor))
        elif name in (_WORDS, _OUTPUT):
            blocks = self._vocabulary(parameter)
        elif name == "decoder.final_layernorm.weight":
            tensor = parameter.of_shape((self._shape.hidden,))
            blocks = iter([Block.whole("model.norm.weight", tensor)])
        if blocks is None:
            raise PublishError(
                f"parameter {name!r} has no place in the checkpoint of such a model",
                remedy="compare the ModelShape with what the trainer runs; for another "
                "architecture write a Converter (docs/converters.md)",
            )
        return blocks

    def _layer_blocks(self, layer: int, parameter: Parameter) -> Iterator[Block] | None:
        shape, tp, path = self._shape, self._tp, parameter.path
        target = f"model.layers.{layer}"
        if path in _NORMS:
            tensor = parameter.of_shape((shape.hidden,))
            return iter([Block.whole(f"{target}.{_NORMS[path]}", tensor)])
        if path in _ATTENTION:
            return attention_blocks(shape, tp, parameter, f"{target}.self_attn")
        if layer not in shape.dense:
            return self._mixture_blocks(f"{target}.mlp", parameter)
        if path in _MLP:
            sizes = {"width": shape.ffn, "hidden": shape.hidden}
            return mlp_blocks(tp, parameter, f"{target}.mlp", **sizes)
        return None

    def _mixture_blocks(self, target: str, parameter: Parameter) -> Iterator[Block] | None:
        shape, tp, path = self._shape, self._tp, parameter.path
        if path in _ROUTER:
            return iter([router_block(shape, parameter, f"{target}.gate")])
        if path in _SHARED:
            sizes = {"width": shape.shared_ffn, "hidden": shape.hidden}
            return mlp_blocks(tp, parameter, f"{target}.shared_expert", **sizes)
        if path == "mlp.shared_experts.gate_weight":
            tensor = parameter.of_shape((1, shape.hidden))
            return iter([Block.whole(f"{target}.shared_expert_gate.weight", tensor)])
        return expert_blocks(shape, self._etp, self._experts, parameter, f"{target}.experts")

    def _vocabulary(self, parameter: Parameter) -> Iterator[Block]:
        """Rows of the embedding or of the output layer, without what pads the vocabulary.

        A tied output layer is a copy, on the last of several stages: written to, not published.
        """
        shape, is_output = self._shape, parameter.name == _OUTPUT
        is_copy = is_output and shape.is_tied
        rows = parameter.tensor.shape[0]
        tensor = parameter.of_shape((rows, shape.hidden))
        if rows * self._tp.size < shape.vocab:
            raise PublishError(
                f"parameter {parameter.name!r} has {rows} rows on each of {self._tp.size} "
                f"tensor-parallel ranks; expected at least {shape.vocab} in all"
            )
        first = min(self._tp.rank * rows, shape.vocab)
        real = min(rows, shape.vocab - first)
        yield Block(
            "lm_head.weight" if is_output and not is_copy else _EMBEDDING,
            (shape.vocab, shape.hidden), (first, 0), (real, shape.hidden), tensor[:real],
            is_copy=is_copy,
        )  # fmt: skip

    def _require_all(self, origins: Mapping[str, str]) -> None:
        """Every tensor of which a part belongs here was found, and nothing else."""
        shape, place = self._shape, self._place
        expected = {
            **(shape.first_tensors() if place.is_first else {}),
            **(shape.last_tensors() if place.is_last else {}),
        }
        for layer in self._layers:
            expected.update(shape.layer_tensors(layer, self._experts))
        wrong = [f"no parameter holds {name!r}" for name in expected if name not in origins]
        wrong += [
            f"parameter {origin!r} holds {name!r}, which isn't there in such a model at this place"
            for name, origin in origins.items() if name not in expected
        ]  # fmt: skip
        if wrong:
            raise PublishError(
                wrong[0] + (f", and {len(wrong) - 1} more" if wrong[1:] else ""),
                remedy="compare the ModelShape and the ParallelPlace with what the trainer runs",
            )


def converted(
    chunks: Sequence[torch.nn.Module | Callable[[], State]],
    shape: ModelShape,
    places: Sequence[ParallelPlace],
    dtypes: DtypeRule | None = None,
) -> ConvertedSource:
    """What a `Publisher` takes for a model that Megatron-Core trains.

    Args:
        chunks: the process's model chunks (one without a virtual pipeline), wrapped or not.
        places: of each of them.
        dtypes: published; by default BF16.
    Raises:
        UsageError: not as many places as chunks.
    """
    if len(chunks) != len(places):
        raise UsageError(f"{len(chunks)} model chunks are given with {len(places)} places")
    states = [chunk.state_dict if isinstance(chunk, torch.nn.Module) else chunk for chunk in chunks]
    converters = [MegatronConverter(shape, place) for place in places]
    return ConvertedSource(tuple(zip(states, converters, strict=True)), dtypes or DtypeRule())
