"""`publish --grain`: checkouts as before, in chunks that ranks can fetch apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from plait_client.checkout import checkout
from plait_client.fetch import Fetcher
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient

SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.norm.weight": (16,),
    "model.layers.0.self_attn.k_proj.weight": (16, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}


def write(folder: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_key_value_heads": 8}))
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folder


def test_a_line_along_a_grain_is_checked_out_in_any_order(
    client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(4)
    versions = [{name: random.integers(0, 9, s, dtype=np.uint16) for name, s in SHAPES.items()}]
    for _ in range(3):
        new = {name: array.copy() for name, array in versions[-1].items()}
        for array in new.values():
            array += (random.random(array.shape) < 0.3).astype(np.uint16)
        versions.append(new)
    for seq, arrays in enumerate(versions, 1):
        folder = write(tmp_path / str(seq), arrays)
        version = publish(Request(folder, policy, grain=8 if seq != 3 else 1), fetcher)
        manifest = client.manifest(version.manifest_digest)
        slots = {chunk.slot for chunk in manifest.chunks}
        assert slots == (set(range(9)) if seq != 3 else {0})
    out = tmp_path / "out"
    for seq in (2, 4, 1, 3, 2):
        checkout(client, f"{policy}@{seq}", out, fetcher=fetcher)
        found = safetensors.numpy.load_file(out / "model.safetensors")
        assert all(np.array_equal(found[n], a) for n, a in versions[seq - 1].items())
