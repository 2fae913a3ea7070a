"""The state of the last publish, read from the registry: the committed parent and what is pending.

Only chunks with frames of the wanted tensors are fetched, and only these frames are decoded. What
comes out is for the caller to prove: by the tensors' own fingerprints.
"""

from collections.abc import Collection, Iterator

import numpy as np

from plait.codec.algebra import FrameDelta, negate
from plait.codec.chunks import read_chunk
from plait.codec.frames import decode_delta, decode_dense
from plait.cut import FrameSpec
from plait.errors import BaseMismatch, LayoutChanged
from plait.store import Store
from plait.weights import UNSIGNED, Piece, Weights, pieces
from plait.wire import PlanStep, VersionDocument
from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.plans import plan_stored
from plait_client.registry import RegistryClient
from plait_trainer.deltas import Deltas, changed_items
from plait_trainer.partial_weights import SomeWeights
from plait_trainer.share import Share


def read_back(
    client: RegistryClient,
    parent: VersionDocument,
    share: Share,
    pending: Deltas,
    names: Collection[str],
    *,
    store: Store | None = None,
) -> Weights:
    """The named tensors of the local layout, as the version and the pending changes make them.

    Args:
        pending: changes from the version on, by their frames' numbers in the share's cut.
        store: of the registry's objects, if this host reads it itself.
    Raises:
        BaseMismatch: the version's line begins with weights that the registry doesn't hold.
        LayoutChanged: the version has another layout.
        PlaitError: the registry is away, or what it stores is damaged.
    """
    layout = share.layout
    if parent.layout_digest != layout.digest:
        raise LayoutChanged(f"version {parent.seq} has layout {parent.layout_digest}")
    wanted = [layout[name] for name in names]
    arrays = {spec.name: np.zeros(spec.items, UNSIGNED[spec.item_bytes]) for spec in wanted}
    weights = SomeWeights(layout, arrays)
    fetcher = Fetcher(client, ChunkCache(), store=store)
    for step in plan_stored(client, parent.policy, str(parent.seq)).steps:
        _follow(fetcher, step, weights, version=parent.seq)
    for number, delta in pending.items():
        _add(share.cut.cut.frames[number], delta, weights)
    return SomeWeights(share.local, {name: share.part(name, arrays[name]) for name in names})


def _follow(fetcher: Fetcher, step: PlanStep, weights: SomeWeights, *, version: int) -> None:
    """One manifest on the way to a version, as far as it reaches these tensors."""
    if step.kind == "external":
        raise BaseMismatch(
            f"the registry doesn't hold the weights that the line begins with ({step.target}), so "
            f"that nothing can be read back from version {version}",
            remedy=f"publisher.attach(base=…) with the weights of version {version}, of a checkout "
            "say: the next publish is the difference to them",
            expected=step.target,
        )
    manifest = fetcher.manifest(step.manifest_digest)
    if manifest.cut is None:
        return
    cut = fetcher.cut(manifest.cut, weights.layout)
    keys = {chunk.digest: chunk.key for chunk in step.chunks}
    for entry in manifest.chunks:
        reached = {n for n in entry.frames if any(_own(cut.frames[n], weights))}
        if not reached:
            continue
        data = fetcher.object(entry.digest, entry.size, keys.get(entry.digest, ""))
        for encoded in read_chunk(data, entry=entry).frames:
            frame = cut.frames[encoded.number]
            if encoded.number not in reached:
                continue
            if step.kind == "anchor":
                items = decode_dense(encoded, frame)
                for piece in _own(frame, weights):
                    view = piece.view(weights.bits(piece.tensor.name))
                    end = piece.frame_offset + piece.items
                    view[...] = items[piece.frame_offset : end].reshape(view.shape)
            else:
                delta = decode_delta(encoded, frame)
                _add(frame, negate(delta) if step.kind == "reverse" else delta, weights)


def _own(frame: FrameSpec, weights: SomeWeights) -> Iterator[Piece]:
    """The frame's pieces in these tensors."""
    for piece in pieces(frame, weights.layout):
        if piece.tensor.name in weights.arrays:
            yield piece


def _add(frame: FrameSpec, delta: FrameDelta, weights: SomeWeights) -> None:
    """Applies what of a delta lies in these tensors."""
    for piece in _own(frame, weights):
        items, rows = changed_items(piece, delta)
        weights.bits(piece.tensor.name)[items] += delta.differences[rows]
