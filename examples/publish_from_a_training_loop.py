"""Publish every optimizer step of a plain torch loop.

plait serve &
python examples/publish_from_a_training_loop.py
plait log toy
"""

import os

import torch

from plait_client.registry import RegistryClient
from plait_trainer import Publisher

STEPS = 5


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with (
        RegistryClient(os.environ.get("PLAIT_URL", "http://127.0.0.1:8400")) as client,
        # The FP32 weights are published as the BF16 that the rollouts run.
        Publisher(model, optimizer, client=client, policy="toy", dtype="BF16") as publisher,
    ):
        publisher.publish({"step": 0})
        for step in range(1, STEPS + 1):
            inputs = torch.randn(32, 64)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Returns once the change is captured; upload and commit run behind the next step.
            future = publisher.publish({"step": step, "loss": loss.item()})
        version = future.result()
    print(
        f"{version.policy}@{version.seq}: {version.changed_elements} of "
        f"{version.total_elements} elements changed, {version.payload_bytes} bytes"
    )


if __name__ == "__main__":
    main()
