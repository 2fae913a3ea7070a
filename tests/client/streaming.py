"""One publish or checkout in a process that may hold little more than Python itself.

    python -m tests.client.streaming URL CACHE HEADROOM publish FOLDER POLICY
    python -m tests.client.streaming URL CACHE HEADROOM checkout FOLDER POLICY@REF

HEADROOM bytes on top of what the imports and a first small run took: the limit is on private
memory (RLIMIT_DATA), since files that are mapped, the checkpoints, are the kernel's to drop.
"""

import faulthandler
import resource
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import safetensors.numpy

from plait.codec import (
    FrameDelta,
    apply,
    decode_delta,
    decode_dense,
    detect,
    encode_delta,
    encode_dense,
    increment_on,
    negate,
)
from plait.cut import plain_cut
from plait.weights import fingerprint_weights
from plait_client.cache import ChunkCache
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    threading.stack_size(1 << 20)  # what a thread reserves would count, 8 MiB each
    url, cache, headroom, verb, folder, name = sys.argv[1:]
    with RegistryClient(url) as client:
        fetcher = Fetcher(client, ChunkCache(Path(cache)))
        client.config()
        _load_kernels()
        limit = _private_bytes() + int(headroom)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if verb == "publish":
            publish(Request(Path(folder), name), fetcher)
        else:
            checkout(client, name, Path(folder), fetcher=fetcher)


def _private_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith("VmData:"))


def _load_kernels() -> None:
    """Runs all of the codec once: what numba compiles and loads isn't what is measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        safetensors.numpy.save_file({"w": np.zeros(9, np.float16)}, folder / "model.safetensors")
        weights = CheckpointFolder(folder, writable=True)
        (frame,) = plain_cut(weights.layout, for_anchor=True).frames
        decode_dense(encode_dense(0, frame, weights), frame)
        delta = detect(frame, weights, weights)
        one = np.ones(1, np.uint16)
        delta = FrameDelta(2, np.zeros(1, np.uint32), one, delta.increment)
        delta = decode_delta(encode_delta(0, frame, negate(delta)), frame)
        increment_on(frame, weights, delta)
        apply(frame, weights, delta)
        fingerprint_weights(weights)


if __name__ == "__main__":
    main()
