"""What differs between two versions, tensor by tensor, from their deltas where there are some."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import NoPlan
from plait.layout import Layout
from plait.weights import Weights
from plait.wire import HeldState, VersionDocument
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.disk import disk_errors
from plait_client.fetch import FetchedStep, Fetcher
from plait_client.plans import check_plan
from plait_client.progress import Progress
from plait_client.steps import added_frames, groups_of
from plait_client.words import by_tensor

_COMPARED_ITEMS = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How many elements of one tensor differ."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed: int
    total: int


def compare_versions(
    fetcher: Fetcher, first: VersionDocument, second: VersionDocument, progress: Progress
) -> list[TensorChange]:
    """Every tensor that differs, by name.

    Raises:
        LayoutChanged: the two have different tensors.
        Others as `checkout`, where an anchor lies between them.
    """
    layout = fetcher.layout(first.layout_digest)
    if second.layout_digest != first.layout_digest:
        layout.require_equal(
            fetcher.layout(second.layout_digest), what=f"{second.policy}@{second.seq}"
        )
    held = HeldState(layout_digest=first.layout_digest, fingerprint=first.fingerprint)
    try:
        plan = fetcher.client.plan(first.policy, held, second.version_digest, allow_anchor=False)
    except NoPlan:
        counts = _counts_of_checkouts(fetcher, first, second, progress)
    else:
        check_plan(plan, held)
        progress.begin("fetching", plan.total_bytes)
        steps = [fetcher.fetch_step(step, progress) for step in plan.steps]
        counts = _counts_of_deltas(steps, layout)
    return [
        TensorChange(tensor.name, tensor.dtype, tensor.shape, counts[tensor.name], tensor.items)
        for tensor in layout.tensors
        if counts.get(tensor.name)
    ]


def _counts_of_deltas(steps: Sequence[FetchedStep], layout: Layout) -> dict[str, int]:
    groups = groups_of(steps)
    changes: dict[str, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
    for group in groups:
        for frame, delta in added_frames(group):
            words = frame.words_of(delta.positions)
            for name, rows, items in by_tensor(layout, words, frame.item_bytes):
                changes.setdefault(name, []).append((items, delta.differences[rows]))
    return {name: _count(parts) for name, parts in changes.items()}


def _count(parts: Sequence[tuple[NDArray[np.int64], NDArray[Any]]]) -> int:
    """Items whose differences don't add up to zero. Parts of different groups may overlap."""
    items = np.concatenate([items for items, _ in parts])
    differences = np.concatenate([differences for _, differences in parts])
    distinct, position = np.unique(items, return_inverse=True)
    sums = np.zeros(distinct.size, differences.dtype)
    np.add.at(sums, position, differences)
    return int(np.count_nonzero(sums))


def _counts_of_checkouts(
    fetcher: Fetcher, first: VersionDocument, second: VersionDocument, progress: Progress
) -> dict[str, int]:
    with disk_errors(f"write {fetcher.cache.root}"):
        fetcher.cache.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=fetcher.cache.root, prefix="diff-") as name:
        folders = []
        for version in (first, second):
            folder = Path(name) / str(version.seq)
            ref = f"{version.policy}@{version.seq}"
            checkout(fetcher.client, ref, folder, fetcher=fetcher, progress=progress)
            folders.append(CheckpointFolder(folder))
        return dict(_differing(*folders))


def _differing(first: Weights, second: Weights) -> Iterator[tuple[str, int]]:
    for tensor in first.layout.tensors:
        old, new = first.bits(tensor.name), second.bits(tensor.name)
        parts = (slice(i, i + _COMPARED_ITEMS) for i in range(0, tensor.items, _COMPARED_ITEMS))
        yield tensor.name, sum(int(np.count_nonzero(old[part] != new[part])) for part in parts)
