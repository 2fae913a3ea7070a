"""The sizes of a model, and from them every tensor of its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from plait.errors import UsageError

Shape = tuple[int, ...]

# What a configuration of transformers may say it is: attention and layers are built alike.
MODEL_TYPES: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Qwen model's sizes. Names and shapes of checkpoint tensors follow from nothing else.

    Attributes:
        layers: number of them.
        hidden: width of the residual stream.
        heads, groups: query heads; query groups, each with one key and one value head.
        head_dim: width of a head.
        vocab: rows of the embedding in the checkpoint, without what pads it in training.
        ffn: width inside a dense layer's MLP.
        experts, expert_ffn: number of experts in a layer, and the width inside of one.
        shared_ffn: width inside the shared expert, 0 where there is none.
        dense_layers: indices of the layers that have an MLP instead of experts.
        is_tied: whether the output layer is the embedding, and not in the checkpoint.
        has_qk_norm: whether queries and keys are normalised for each head.
        has_qkv_bias, has_proj_bias: whether these projections have biases.
        has_expert_bias: whether routers keep a bias that balances their experts.

    Raises:
        UsageError: sizes that no such model has.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    is_tied: bool = False
    has_qk_norm: bool = True
    has_qkv_bias: bool = False
    has_proj_bias: bool = False
    has_expert_bias: bool = False

    def __post_init__(self) -> None:
        needed = ("layers", "hidden", "heads", "groups", "head_dim", "vocab")
        small = [name for name in needed if getattr(self, name) < 1]
        small += ["ffn"] * (self.ffn < 1 and len(self.dense) > 0)
        small += ["expert_ffn"] * (self.experts > 0 and self.expert_ffn < 1)
        if small:
            raise UsageError(f"{small[0]} is {getattr(self, small[0])}; expected at least 1")
        if self.heads % self.groups:
            raise UsageError(f"{self.heads} heads can't be dealt out to {self.groups} query groups")
        beyond = [layer for layer in self.dense_layers if not 0 <= layer < self.layers]
        if beyond:
            raise UsageError(f"dense layer {beyond[0]} isn't one of {self.layers} layers")

    @classmethod
    def of_config(cls, config: Any) -> "ModelShape":
        """From a configuration of transformers, or what its `config.json` holds.

        Raises:
            UsageError: it describes another kind of model.
        """
        fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        kind = fields.get("model_type")
        if kind not in MODEL_TYPES:
            raise UsageError(
                f"a model of type {kind!r} has no Megatron layout here; expected one of "
                f"{', '.join(MODEL_TYPES)}",
                remedy="write a Converter for it: docs/converters.md says how",
            )
        heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
        is_mixture, is_second = kind.endswith("_moe"), kind.startswith("qwen2")
        experts = fields.get("num_experts", fields.get("num_local_experts")) if is_mixture else 0
        step, plain = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
        return cls(
            layers=layers,
            hidden=fields["hidden_size"],
            heads=heads,
            groups=fields["num_key_value_heads"],
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            vocab=fields["vocab_size"],
            ffn=fields["intermediate_size"],
            experts=experts,
            expert_ffn=fields["moe_intermediate_size"] if is_mixture else 0,
            shared_ffn=fields.get("shared_expert_intermediate_size", 0) if is_mixture else 0,
            dense_layers=frozenset(
                layer for layer in range(layers)
                if is_mixture and (layer in plain or (layer + 1) % step)
            ),
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            has_qk_norm=not is_second,
            has_qkv_bias=bool(fields.get("qkv_bias", True) if is_second
                              else fields.get("attention_bias", False)),
            has_proj_bias=not is_second and bool(fields.get("attention_bias", False)),
        )  # fmt: skip

    @property
    def dense(self) -> frozenset[int]:
        """The layers that have an MLP."""
        return self.dense_layers if self.experts else frozenset(range(self.layers))

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    def tensors(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint, whole."""
        found = {**self.first_tensors(), **self.last_tensors()}
        for layer in range(self.layers):
            found.update(self.layer_tensors(layer, range(self.experts)))
        return found

    def first_tensors(self) -> dict[str, Shape]:
        """What stands before the first layer."""
        return {"model.embed_tokens.weight": (self.vocab, self.hidden)}

    def last_tensors(self) -> dict[str, Shape]:
        """What stands behind the last layer."""
        head = {} if self.is_tied else {"lm_head.weight": (self.vocab, self.hidden)}
        return {"model.norm.weight": (self.hidden,), **head}

    def layer_tensors(self, layer: int, experts: range) -> dict[str, Shape]:
        """A layer's tensors, with some of its experts if it has any."""
        mlp = self._mlp() if layer in self.dense else self._mixture(experts)
        parts = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            **self._attention(),
            **mlp,
        }
        return {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}

    def _attention(self) -> dict[str, Shape]:
        rows = {
            "q": self.heads * self.head_dim,
            "k": self.groups * self.head_dim,
            "v": self.groups * self.head_dim,
        }
        found: dict[str, Shape] = {"self_attn.o_proj.weight": (self.hidden, rows["q"])}
        for part, width in rows.items():
            found[f"self_attn.{part}_proj.weight"] = (width, self.hidden)
            if self.has_qkv_bias:
                found[f"self_attn.{part}_proj.bias"] = (width,)
        if self.has_proj_bias:
            found["self_attn.o_proj.bias"] = (self.hidden,)
        if self.has_qk_norm:
            found["self_attn.q_norm.weight"] = (self.head_dim,)
            found["self_attn.k_norm.weight"] = (self.head_dim,)
        return found

    def _mlp(self) -> dict[str, Shape]:
        return _gated("mlp", self.ffn, self.hidden)

    def _mixture(self, experts: range) -> dict[str, Shape]:
        found: dict[str, Shape] = {"mlp.gate.weight": (self.experts, self.hidden)}
        if self.has_expert_bias:
            found["mlp.gate.e_score_correction_bias"] = (self.experts,)
        if self.shared_ffn:
            found["mlp.shared_expert_gate.weight"] = (1, self.hidden)
            found.update(_gated("mlp.shared_expert", self.shared_ffn, self.hidden))
        for expert in experts:
            found.update(_gated(f"mlp.experts.{expert}", self.expert_ffn, self.hidden))
        return found


def _gated(prefix: str, width: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }
