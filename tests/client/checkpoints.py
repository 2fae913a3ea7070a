"""Small checkpoints of every kind of tensor, and an independent fingerprint of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors import TensorSpec

# name → (safetensors' dtype, raw item dtype, shape)
SPECS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "model.embed.weight": ("BF16", "<u2", (64, 48)),
    "model.norm.weight": ("F32", "<u4", (48,)),
    "model.half": ("F16", "<u2", (17, 3)),
    "model.steps": ("I64", "<u8", (5,)),
    "model.mask": ("BOOL", "<u1", (33,)),
    "model.packed": ("U8", "<u1", (3, 5, 7)),
    "model.fp8": ("F8_E4M3", "<u1", (40, 3)),
    "model.scale": ("F32", "<u4", ()),
    "model.empty": ("BF16", "<u2", (0, 16)),
    "model.ünïcode": ("BF16", "<u2", (3,)),
}
LIBRARY_DTYPES = {
    "BF16": "bfloat16", "F32": "float32", "F16": "float16", "I64": "int64",
    "BOOL": "bool", "U8": "uint8", "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip

Bits = dict[str, NDArray[Any]]


def first_bits(seed: int = 0) -> Bits:
    """Random bits, with NaN payloads, infinities, zeros of both signs and subnormals among them."""
    random = np.random.default_rng(seed)
    bits: Bits = {}
    for name, (dtype, item, shape) in SPECS.items():
        high = 2 if dtype == "BOOL" else 2 ** (8 * np.dtype(item).itemsize)
        bits[name] = random.integers(0, high, shape, dtype=np.uint64).astype(item)
    odd = [0x7FC1, 0x7FFF, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001]
    bits["model.embed.weight"].reshape(-1)[: len(odd)] = odd
    return bits


def stepped(bits: Bits, seed: int) -> Bits:
    """A few changes in every tensor: ±1 mostly, some to NaN payloads, -0.0 and anything."""
    random = np.random.default_rng(seed)
    after = {name: array.copy() for name, array in bits.items()}
    for name, array in after.items():
        if not array.size:
            continue
        flat = array.reshape(-1)
        chosen = np.unique(random.integers(0, flat.size, max(1, flat.size // 50)))
        if SPECS[name][0] == "BOOL":
            flat[chosen] ^= 1
        else:
            flat[chosen] += random.integers(1, 4, chosen.size).astype(flat.dtype)
    embed = after["model.embed.weight"].reshape(-1)
    embed[random.integers(0, embed.size, 4)] = [0x7FC1, 0x8000, 0xFFFF, 0x7F81]
    return after


def write(
    folder: Path,
    bits: Mapping[str, NDArray[Any]],
    *,
    files: int = 1,
    specs: Mapping[str, tuple[str, str, tuple[int, ...]]] = SPECS,
    config: bool = True,
) -> Path:
    """A checkpoint folder as the safetensors library writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(bits)
    weight_map = {}
    for number in range(files):
        mine = names[number::files]
        file = (
            "model.safetensors"
            if files == 1
            else f"model-{number + 1:05}-of-{files:05}.safetensors"
        )
        arrays = {name: np.ascontiguousarray(bits[name]) for name in mine}
        tensors = {
            name: TensorSpec(
                dtype=LIBRARY_DTYPES[specs[name][0]],
                shape=list(specs[name][2]),
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in arrays.items()
        }
        (folder / file).write_bytes(safetensors.serialize(tensors, {"format": "pt"}))
        weight_map |= dict.fromkeys(mine, file)
    if files > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config:
        (folder / "config.json").write_text('{"model_type": "tiny"}\n')
        (folder / "tokenizer").mkdir(exist_ok=True)
        (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return folder


def read(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder as the safetensors library reads it: dtype, shape, bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            assert name not in found
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    return found


def expected(bits: Bits) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What `read` must find."""
    return {
        name: (SPECS[name][0], SPECS[name][2], np.ascontiguousarray(array).tobytes())
        for name, array in bits.items()
    }


def independent_fingerprint(bits: Mapping[str, NDArray[Any]]) -> str:
    """The fingerprint as the format's text defines it, in plain NumPy."""
    lanes, word = [0, 0], 0
    for name in sorted(bits, key=str.encode):
        raw = np.ascontiguousarray(bits[name]).reshape(-1)
        values = (raw if raw.itemsize == 1 else raw.view("<u2")).astype(np.uint64)
        key = (
            (np.arange(values.size, dtype=np.uint64) + np.uint64(word)) << np.uint64(16)
        ) | values
        word += values.size
        for lane, seed, shifts, multipliers in (
            (0, 0x9E3779B97F4A7C15, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)),
            (1, 0xC2B2AE3D27D4EB4F, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)),
        ):
            mixed = key + np.uint64(seed)
            for shift, multiplier in zip(shifts, (*multipliers, 1), strict=True):
                mixed ^= mixed >> np.uint64(shift)
                mixed *= np.uint64(multiplier)
            lanes[lane] = (lanes[lane] + int(mixed.sum(dtype=np.uint64))) % 2**64
    return f"{lanes[0]:016x}{lanes[1]:016x}"
