"""Megatron-Core's layouts once more, made from a checkpoint by copies and loops.

Written from what its modules do with their parameters, not from the converter: heads are put beside
each other one by one, features are stacked and cut, and the whole is made before it is dealt out.
"""

from dataclasses import dataclass

import torch

from plait_trainer.megatron import ModelShape, ParallelPlace

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Style:
    """What a trainer may choose.

    Attributes:
        fused_norms: layer norms inside the linears that read them, as Transformer Engine has them.
        experts: "sequential", "grouped" or "te".
        padded: rows of the embedding in training.
    """

    fused_norms: bool = False
    experts: str = "sequential"
    padded: int = 0


def random_weights(
    shape: ModelShape, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Weights:
    """Random bits, NaN payloads and negative zeros among them, for every tensor of a checkpoint."""
    noise = torch.Generator().manual_seed(seed)
    whole = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    bits = torch.iinfo(whole)
    return {
        name: torch.randint(bits.min, bits.max, size, generator=noise, dtype=torch.int16).view(
            torch.bfloat16
        )
        for name, size in sorted(shape.tensors().items())
    }


def state_of(shape: ModelShape, weights: Weights, place: ParallelPlace, style: Style) -> Weights:
    """A process's own tensors."""
    state: Weights = {}
    if place.is_first:
        table = padded(weights["model.embed_tokens.weight"], style.padded)
        state["embedding.word_embeddings.weight"] = part(table, 0, place.tp_rank, place.tp_size)
    for number, layer in enumerate(place.layers_of(shape.layers)):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items() if name.startswith(f"model.layers.{layer}.")
        }  # fmt: skip
        for name, tensor in layer_state(shape, own, place, style).items():
            state[f"decoder.layers.{number}.{name}"] = tensor.clone()
            if tensor.ndim == 2:
                state[f"decoder.layers.{number}.{name.rpartition('.')[0]}._extra_state"] = None  # type: ignore[assignment]
    if place.is_last:
        state["decoder.final_layernorm.weight"] = weights["model.norm.weight"].clone()
        if not shape.is_tied or not place.is_first:
            head = weights["model.embed_tokens.weight" if shape.is_tied else "lm_head.weight"]
            table = padded(head, style.padded)
            state["output_layer.weight"] = part(table, 0, place.tp_rank, place.tp_size)
    return state


def layer_state(shape: ModelShape, own: Weights, place: ParallelPlace, style: Style) -> Weights:
    before, behind = own["input_layernorm.weight"], own["post_attention_layernorm.weight"]
    is_mixture = "mlp.gate.weight" in own
    state = attention(shape, own, place)
    if style.fused_norms:
        state["self_attention.linear_qkv.layer_norm_weight"] = before
    else:
        state["input_layernorm.weight"] = before
    if style.fused_norms and not is_mixture:
        state["mlp.linear_fc1.layer_norm_weight"] = behind
    else:
        state["pre_mlp_layernorm.weight"] = behind
    if not is_mixture:
        return {**state, **gated(own, "mlp", "mlp", place.tp_rank, place.tp_size)}
    state["mlp.router.weight"] = own["mlp.gate.weight"]
    if shape.has_expert_bias:
        state["mlp.router.expert_bias"] = own["mlp.gate.e_score_correction_bias"]
    if shape.shared_ffn:
        state["mlp.shared_experts.gate_weight"] = own["mlp.shared_expert_gate.weight"]
        state |= gated(own, "mlp.shared_expert", "mlp.shared_experts", place.tp_rank, place.tp_size)
    return {**state, **experts(shape, own, place, style)}


def attention(shape: ModelShape, own: Weights, place: ParallelPlace) -> Weights:
    state: Weights = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in own:
            continue
        heads = {
            part: list(own[f"self_attn.{part}_proj.{kind}"].split(shape.head_dim))
            for part in ("q", "k", "v")
        }
        rows: list[torch.Tensor] = []
        for group in range(shape.groups):
            rows += [heads["q"].pop(0) for _ in range(shape.heads // shape.groups)]
            rows += [heads["k"][group], heads["v"][group]]
        state[f"self_attention.linear_qkv.{kind}"] = part(
            torch.cat(rows), 0, place.tp_rank, place.tp_size
        )
    output = own["self_attn.o_proj.weight"]
    state["self_attention.linear_proj.weight"] = part(output, 1, place.tp_rank, place.tp_size)
    renamed = {
        "self_attn.o_proj.bias": "linear_proj.bias",
        "self_attn.q_norm.weight": "q_layernorm.weight",
        "self_attn.k_norm.weight": "k_layernorm.weight",
    }
    for name, target in renamed.items():
        if name in own:
            state[f"self_attention.{target}"] = own[name]
    return state


def gated(own: Weights, prefix: str, target: str, rank: int, size: int) -> Weights:
    """Each rank has its part of the gate over its part of the up projection."""
    gate, up = own[f"{prefix}.gate_proj.weight"], own[f"{prefix}.up_proj.weight"]
    return {
        f"{target}.linear_fc1.weight": torch.cat(
            [part(gate, 0, rank, size), part(up, 0, rank, size)]
        ),
        f"{target}.linear_fc2.weight": part(own[f"{prefix}.down_proj.weight"], 1, rank, size),
    }


def experts(shape: ModelShape, own: Weights, place: ParallelPlace, style: Style) -> Weights:
    rank, size = place.of("etp")
    count = shape.experts // place.ep_size
    state: Weights = {}
    firsts, seconds = [], []
    for number in range(count):
        expert = place.ep_rank * count + number
        pair = gated(own, f"mlp.experts.{expert}", "x", rank, size)
        first, second = pair["x.linear_fc1.weight"], pair["x.linear_fc2.weight"]
        if style.experts == "sequential":
            state[f"mlp.experts.local_experts.{number}.linear_fc1.weight"] = first
            state[f"mlp.experts.local_experts.{number}.linear_fc2.weight"] = second
        elif style.experts == "te":
            state[f"mlp.experts.linear_fc1.weight{number}"] = first
            state[f"mlp.experts.linear_fc2.weight{number}"] = second
        firsts.append(first.t().reshape(-1))
        seconds.append(second.t())
    if style.experts == "grouped":
        state["mlp.experts.weight1"] = torch.cat(firsts).reshape(shape.hidden, -1)
        state["mlp.experts.weight2"] = torch.cat(seconds)
    return state


def part(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank].clone()


def padded(table: torch.Tensor, rows: int) -> torch.Tensor:
    extra = max(0, rows - len(table))
    return torch.cat([table, torch.full((extra, table.shape[1]), 7.0, dtype=table.dtype)])
