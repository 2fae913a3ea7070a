"""Publish from a `transformers.Trainer` (or one of TRL's): one callback.

plait serve &
python examples/publish_from_a_trainer.py
plait log tiny-llama
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from plait_client.connection import connected
from plait_trainer.callback import PlaitCallback


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count in steps of their number."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(16) * (index + 1) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder, max_steps=6, learning_rate=1e-4, per_device_train_batch_size=8,
                save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            ),
            train_dataset=Counting(),
            # Every second optimizer step becomes a version, beside the first and the last state.
            callbacks=[PlaitCallback(policy="tiny-llama", every=2)],
        )  # fmt: skip
        trainer.train()
    with connected() as client:
        version = client.version("tiny-llama", "main")
    print(
        f"{version.policy}@{version.seq}: step {version.metadata['step']}, "
        f"{version.changed_elements} of {version.total_elements} elements changed"
    )


if __name__ == "__main__":
    main()
