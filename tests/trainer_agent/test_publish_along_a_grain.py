"""A publisher with a grain: versions as before, in chunks that ranks can fetch apart."""

import torch

from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.trainer_agent.reading import assert_bits_equal, weights_at


def test_versions_along_a_grain_are_the_model_and_their_chunks_have_slots(
    client: RegistryClient, policy: str
) -> None:
    torch.manual_seed(7)
    state = {
        "model.embed_tokens.weight": torch.randn(64, 16),
        "model.norm.weight": torch.randn(16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(24, 16),
        "model.layers.0.mlp.down_proj.weight": torch.randn(16, 24),
    }
    expected = []
    with Publisher(state, client=client, policy=policy, grain=8) as publisher:
        for _ in range(3):
            publisher.publish().result()
            expected.append({name: tensor.bfloat16() for name, tensor in state.items()})
            for tensor in state.values():
                tensor *= 1.01
    for seq, wanted in enumerate(expected, 1):
        assert_bits_equal(weights_at(client, policy, seq), wanted)
        version = client.version(policy, str(seq))
        manifest = client.manifest(version.manifest_digest)
        assert {chunk.slot for chunk in manifest.chunks} == set(range(9))
