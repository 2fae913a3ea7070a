"""Models of transformers, and of Megatron-Core itself, on a CPU: same sizes, one checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import (
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, PADDED_VOCAB, HIDDEN, SEQUENCE = 101, 128, 32, 12
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
_MIXTURE = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip

KINDS = ("dense", "tied", "biased", "mixture", "sparse", "shared")


def checkpoint_model(kind: str, seed: int = 0) -> Any:
    """A model of transformers whose every tensor is random, norms and biases included."""
    torch.manual_seed(seed)
    if kind in ("dense", "tied"):
        changes = {"tie_word_embeddings": kind == "tied", "head_dim": 8}
        model: Any = Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, **changes}))
    elif kind == "biased":
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES))
    elif kind == "shared":
        shared = {"shared_expert_intermediate_size": 40}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**_SIZES, **_MIXTURE, **shared}))
    else:
        plain = {"mlp_only_layers": [1]} if kind == "sparse" else {}
        config = Qwen3MoeConfig(**{**_SIZES, **_MIXTURE, **plain, "head_dim": 8})
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model.eval().float()


def inputs() -> torch.Tensor:
    return torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE) * 7 % VOCAB


@contextlib.contextmanager
def megatron_on_a_cpu() -> Iterator[None]:
    """Megatron-Core asks CUDA for its device, here the CPU, and for random numbers, here none."""
    from torch import cuda

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(cuda, "current_device", return_value="cpu"))
        patches.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.moe import moe_utils

        undisturbed = mock.patch.object(CudaRNGStatesTracker, "fork", contextlib.nullcontext)
        patches.enter_context(undisturbed)
        # Its router looks for Transformer Engine's under a name that it only has with it.
        patches.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


@contextlib.contextmanager
def grid(folder: Path, rank: int = 0, world: int = 1, **sizes: int) -> Iterator[None]:
    """A process group over gloo and Megatron-Core's grids in it."""
    with megatron_on_a_cpu():
        from megatron.core import parallel_state

        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world
        )
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
            dist.barrier()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def megatron_model(
    config: PretrainedConfig, *, grouped: bool = False, chunk: int | None = None
) -> torch.nn.Module:
    """This rank's `GPTModel`, or a chunk of it, of the spec that needs no Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    settings = megatron_config(config, grouped)
    spec = get_gpt_decoder_block_spec(
        settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
    )
    return GPTModel(
        settings,
        spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=chunk is None, vp_stage=chunk
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=chunk is None, vp_stage=chunk
        ),
        parallel_output=False,
        vp_stage=chunk,
    ).eval()


def megatron_config(config: PretrainedConfig, grouped: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    is_qwen2 = config.model_type.startswith("qwen2")
    mixture = {}
    if experts := getattr(config, "num_experts", 0):
        plain = config.mlp_only_layers
        shared = getattr(config, "shared_expert_intermediate_size", None)
        mixture = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_layer_freq": [int(i not in plain) for i in range(config.num_hidden_layers)],
            "moe_grouped_gemm": grouped,
            "moe_use_legacy_grouped_gemm": grouped,
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": shared is not None,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=is_qwen2,
        qk_layernorm=not is_qwen2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=(
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        **mixture,
    )


@torch.no_grad()
def megatron_logits(model: torch.nn.Module, carried: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the last stage, or what an earlier stage hands on.

    Args:
        carried: what the earlier stage handed on.
    """
    if carried is not None:
        model.set_input_tensor(carried)
    positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    future = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    found: torch.Tensor = model(inputs(), positions, future)
    return found
