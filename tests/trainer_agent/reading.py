"""What a version holds, read from the registry alone: planner, chunks, codec."""

import torch

from plait.codec.algebra import apply, increment_on
from plait.codec.chunks import read_chunk
from plait.codec.frames import decode_delta, decode_dense
from plait.cut import Cut
from plait.layout import Layout
from plait.tensors import DTYPES, StateDictWeights
from plait.weights import Weights, fingerprint_weights, scatter
from plait.wire import PlanStep
from plait_client.registry import RegistryClient
from plait_trainer.live import TensorView


def weights_at(
    client: RegistryClient, policy: str, ref: object, held: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a version, from nothing; or from `held` where its line begins externally."""
    plan = client.plan(policy, None, str(ref))
    layout = client.layout(plan.layout_digest)
    tensors = held or {
        spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in layout.tensors
    }
    weights = StateDictWeights(layout, tensors)
    for step in plan.steps:
        follow(client, step, layout, weights)
    assert str(fingerprint_weights(weights)) == plan.fingerprint
    return tensors


def follow(client: RegistryClient, step: PlanStep, layout: Layout, weights: Weights) -> None:
    manifest = client.manifest(step.manifest_digest)
    assert step.kind in ("anchor", "forward", "external")
    if manifest.cut is None:
        return
    cut: Cut = client.cut(manifest.cut)
    cut.check_against(layout)
    for entry in manifest.chunks:
        for encoded in read_chunk(client.chunk(entry.digest), entry=entry).frames:
            frame = cut.frames[encoded.number]
            if step.kind == "anchor":
                scatter(frame, weights, decode_dense(encoded, frame))
            else:
                delta = decode_delta(encoded, frame)
                assert increment_on(frame, weights, delta) == encoded.increment
                apply(frame, weights, delta)


def assert_bits_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        got, wanted = (
            TensorView(name, each, each.dtype).bits(0, each.numel()).tobytes()
            for each in (found[name], tensor)
        )
        assert got == wanted, name
