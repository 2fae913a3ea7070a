"""Tiny random checkpoints with a trained tokenizer, and deltas between them, without a registry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from plait.codec.algebra import detect
from plait.codec.chunks import Chunk, pack_chunks
from plait.codec.frames import encode_delta
from plait.cut import Cut, plain_cut
from plait.layout import Layout
from plait.manifest import Manifest, Statistics
from plait.tensors import StateDictWeights, layout_of_tensors
from plait.weights import fingerprint_weights
from plait_rollout.engine import Direction, Move, MoveStep

State = dict[str, torch.Tensor]

_KINDS: Mapping[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def make_tiny(path: Path, kind: str = "qwen3", *, tie: bool = False, seed: int = 0) -> Path:
    """Writes a random BF16 checkpoint of about 140,000 parameters."""
    config_class, model_class = _KINDS[kind]
    more = {}
    if kind == "qwen3_moe":
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = config_class(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        tie_word_embeddings=tie, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2, **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["hello tiny world " * 50], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def read_state(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def write_state(folder: Path, like: Path, state: State) -> Path:
    """A whole checkpoint folder of other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in like.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def changed(state: State, *, seed: int, share: float = 0.01) -> State:
    """Another state: a share of every tensor's items moved by a few bits, one of them to -0.0."""
    generator = np.random.default_rng(seed)
    new = {}
    for name, tensor in state.items():
        copy = tensor.clone()
        bits = copy.view(-1).view(torch.int16)
        count = max(int(bits.numel() * share), 2)
        at = torch.from_numpy(generator.choice(bits.numel(), count, replace=False))
        steps = torch.from_numpy(generator.choice([-3, -1, 1, 1, 2], count).astype(np.int16))
        bits[at] += steps
        bits[at[0]] = -0x8000
        new[name] = copy
    return new


def layout_of(state: State) -> Layout:
    return layout_of_tensors(state)


def weights_of(state: State) -> StateDictWeights:
    return StateDictWeights(layout_of(state), state)


def step_between(
    folder: Path,
    old: State,
    new: State,
    *,
    direction: Direction = "forward",
    cut: Cut | None = None,
    slots: Sequence[int] | None = None,
    lie: Callable[[bytes], bytes] | None = None,
) -> MoveStep:
    """The delta from `old` to `new` as a step with its chunks in a folder.

    Args:
        slots: of the cut's frames.
        lie: makes the chunk files' bytes something else than the manifest says.
    """
    a, b = weights_of(old), weights_of(new)
    cut = cut or plain_cut(a.layout, for_anchor=False)
    frames = (
        encode_delta(number, frame, detect(frame, a, b)) for number, frame in enumerate(cut.frames)
    )
    chunks = list(pack_chunks(frames, slots or 0))
    manifest = manifest_of(a.layout, cut, fingerprint_weights(a), fingerprint_weights(b), chunks)
    return MoveStep(manifest, direction, tuple(_files(folder, chunks, lie)))


def manifest_of(
    layout: Layout, cut: Cut, base: Any, target: Any, chunks: Iterable[Chunk]
) -> Manifest:
    chunks = list(chunks)
    size = sum(chunk.size for chunk in chunks)
    return Manifest(
        kind="delta",
        layout=layout.digest,
        cut=cut.digest if chunks else None,
        base=base,
        target=target,
        chunks=tuple(chunk.entry for chunk in chunks),
        statistics=Statistics(0, 0, layout.total_elements, layout.dense_bytes, size),
    )


def _files(
    folder: Path, chunks: Iterable[Chunk], lie: Callable[[bytes], bytes] | None
) -> Iterable[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for chunk in chunks:
        path = folder / chunk.digest.replace(":", "-")
        path.unlink(missing_ok=True)
        path.write_bytes(lie(chunk.data) if lie else chunk.data)
        yield path


def move_of(layout: Layout, cut: Cut, steps: Iterable[MoveStep], stamp: str) -> Move:
    steps = list(steps)
    return Move(layout, cut, steps[0].base, steps[-1].target, steps, stamp)


def bits_of_state(state: State) -> dict[str, NDArray[Any]]:
    return {name: t.contiguous().view(-1).view(torch.int16).numpy() for name, t in state.items()}
