"""Tensors of the layout that the engine doesn't hold: kept by the agent, as one more rank.

An extra head, a duplicate of a tie, a table that the engine computes itself: without them the sum
over the ranks would never close. Their bits lie in one file in the spool, patched in step with the
engine; a journal of absolute old and new bits makes the patch repeatable after a kill.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.canonical import digest_of
from plait.errors import MapUnproven
from plait.layout import Layout
from plait.tensors import DTYPES
from plait.weights import Weights, readable_bits
from plait_rollout.sglang.chain import Step, added_up
from plait_rollout.sglang.holder import Holder, Part, Staged
from plait_rollout.sglang.pieces import Piece
from plait_rollout.sglang.spool import Spool
from plait_rollout.sglang.tally import Tally


class UnheldTensors:
    """A holder of whole tensors in a mapped file.

    Args:
        layout: of the policy.
        names: the tensors that no rank holds; may be none.
        source: where their bits are taken from when there is no file of this engine's yet.
        fresh: the engine was started anew, so a file of an earlier one means nothing.
    Raises:
        MapUnproven: there is neither a file nor a source.
    """

    def __init__(
        self,
        layout: Layout,
        names: Sequence[str],
        spool: Spool,
        *,
        source: Weights | None,
        fresh: bool,
    ) -> None:
        self._folder = spool.root / "unheld"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._staged: tuple[str, Staged] | None = None
        tag = digest_of("\0".join([layout.digest, *names]).encode()).removeprefix("sha256:")
        path = self._folder / f"{tag[:32]}.bits"
        if names and (fresh or not path.exists()):
            _fill(path, layout, names, source)
        self.pieces = tuple(_whole(layout, name) for name in names)
        tensors = _open(path, layout, names) if names else {}
        self._holder = Holder(layout, self.pieces, lambda: tensors)
        self._shared: frozenset[int] = frozenset()

    def fingerprint(self) -> Tally:
        return self._holder.fingerprint(self._shared)

    def stage(self, move: str, cut: Any, steps: Sequence[Step]) -> Staged:
        deltas = added_up(cut, steps, self._holder.wants) if cut and self.pieces else iter(())
        staged = self._holder.stage(deltas, self._shared)
        self._staged = (move, staged)
        return staged

    def journal(self, move: str) -> None:
        """Writes down old and new bits of a staged move, before the engine is touched."""
        if not self.pieces:
            return
        assert self._staged is not None
        assert self._staged[0] == move  # the adapter journals what it staged
        rows: dict[str, Any] = {}
        for at, part in enumerate(self._staged[1].parts):
            rows[f"{at}.piece"] = np.array(part.piece)
            rows[f"{at}.numbers"] = part.numbers
            rows[f"{at}.differences"] = part.differences
            rows[f"{at}.old"] = part.old
        partial = self._folder / ".journal.partial"
        with partial.open("wb") as file:
            np.savez(file, **rows)
        for old in self._folder.glob("*.npz"):
            old.unlink()
        partial.replace(self._folder / f"{move}.npz")

    def apply(self, move: str) -> Tally:
        """Writes a journalled move's new bits, whatever part of them stands there already."""
        staged = self._journalled(move)
        self._holder.undo(staged, self._shared)
        return self._holder.apply(staged, self._shared)

    def undo(self, move: str) -> Tally:
        """Writes a journalled move's old bits back; nothing to do where none was journalled."""
        return self._holder.undo(self._journalled(move), self._shared)

    def _journalled(self, move: str) -> Staged:
        path = self._folder / f"{move}.npz"
        if not path.exists():
            return Staged((), Tally(), Tally())
        with np.load(path) as rows:
            count = len(rows.files) // 4
            parts = tuple(
                Part(
                    int(rows[f"{at}.piece"]),
                    rows[f"{at}.numbers"],
                    rows[f"{at}.differences"],
                    rows[f"{at}.old"],
                )
                for at in range(count)
            )
        return Staged(parts, Tally(), Tally())


def _whole(layout: Layout, name: str) -> Piece:
    items = layout[name].items
    return Piece(name, name, (items,), 0, (1,), 0, (1,))


def _fill(path: Path, layout: Layout, names: Sequence[str], source: Weights | None) -> None:
    if source is None:
        raise MapUnproven(
            f"the engine doesn't hold {list(names)[:8]}, and nothing says what their bits are",
            remedy="name a folder that holds the version the engine was started with",
        )
    source.layout.require_equal(layout, what="the layout")
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for name in names:
            file.write(readable_bits(source, layout[name]).tobytes())
            file.write(bytes(-file.tell() % 8))  # every tensor starts aligned
    partial.replace(path)


def _open(path: Path, layout: Layout, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The file's tensors, each over a storage of its own, mapped and writable."""
    tensors, start = {}, 0
    for name in names:
        tensor = layout[name]
        mapped = np.memmap(path, np.uint8, "r+", offset=start, shape=(tensor.nbytes,))
        flat = torch.from_numpy(mapped)
        tensors[name] = flat.view(DTYPES.get(tensor.dtype, torch.uint8))
        start += tensor.nbytes + -tensor.nbytes % 8
    return tensors
