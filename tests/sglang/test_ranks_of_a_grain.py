"""Eight ranks without an engine: each reads its own slots of a grain cut, and no other chunk."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch

from plait.cut import Cut, plain_cut
from plait.grain import grain_cut, slots_of
from plait.manifest import ChunkEntry
from plait_rollout.sglang.chain import Step, added_up, check_chain
from plait_rollout.sglang.holder import Holder
from plait_rollout.sglang.pieces import Piece
from tests.sglang.tiny import State, changed, layout_of, step_between

RANKS, HIDDEN, FEED = 8, 64, 192
LAYER = "model.layers.0."


def state() -> State:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (512, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        LAYER + "self_attn.q_proj.weight": (128, HIDDEN),
        LAYER + "self_attn.k_proj.weight": (HIDDEN, HIDDEN),
        LAYER + "self_attn.v_proj.weight": (HIDDEN, HIDDEN),
        LAYER + "self_attn.o_proj.weight": (HIDDEN, 128),
        LAYER + "mlp.gate_proj.weight": (FEED, HIDDEN),
        LAYER + "mlp.up_proj.weight": (FEED, HIDDEN),
        LAYER + "mlp.down_proj.weight": (HIDDEN, FEED),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def held_by(rank: int, size: int, weights: State) -> Holder:
    """A rank as a tensor-parallel engine fills it: rows, columns, and norms whole."""
    held, pieces = {}, []
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            held[name] = tensor.clone()
            pieces.append(Piece(name, name, (tensor.numel(),), 0, (1,), 0, (1,)))
            continue
        rows, columns = tensor.shape
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            width = columns // size
            held[name] = tensor[:, rank * width : (rank + 1) * width].clone().contiguous()
            pieces.append(
                Piece(name, name, (rows, width), rank * width, (columns, 1), 0, (width, 1))
            )
        else:
            items = rows // size * columns
            held[name] = tensor.view(-1)[rank * items : (rank + 1) * items].clone()
            pieces.append(Piece(name, name, (items,), rank * items, (1,), 0, (1,)))
    return Holder(layout_of(weights), tuple(pieces), lambda: held)


def staged(holder: Holder, cut: Cut, step: Step) -> tuple[Counter[str], set[int]]:
    """Bytes of the chunks that the rank opened, and their slots, once it moved."""
    opened: dict[str, ChunkEntry] = {}

    def locate(chunk: ChunkEntry) -> Path:
        assert chunk.digest not in opened
        opened[chunk.digest] = chunk
        return step.locate(chunk)

    watched = Step(step.manifest, step.direction, locate)
    found = holder.stage(added_up(cut, [watched], holder.wants), frozenset())
    holder.apply(found, frozenset())
    sizes = Counter({digest: chunk.size for digest, chunk in opened.items()})
    return sizes, {chunk.slot for chunk in opened.values()}


def test_a_rank_reads_its_own_slots_and_reaches_the_same_bits(tmp_path: Path) -> None:
    old = state()
    new = changed(old, seed=1, share=0.2)
    layout = layout_of(old)
    slotted = grain_cut(layout, for_anchor=False, kv_heads=8)
    made = step_between(tmp_path, old, new, cut=slotted.cut, slots=slotted.slots)
    files = {c.digest: p for c, p in zip(made.manifest.chunks, made.chunks, strict=True)}
    step = Step(made.manifest, "forward", lambda chunk: files[chunk.digest])
    check_chain(layout.digest, slotted.cut, [step])
    stored = sum(chunk.size for chunk in made.manifest.chunks)
    for size in (1, 2, 4, 8):
        for rank in range(size):
            holder, wanted = held_by(rank, size, old), held_by(rank, size, new)
            sizes, slots = staged(holder, slotted.cut, step)
            assert slots == slots_of(rank, size)
            assert sizes.total() < stored * (1 / size + 0.05)
            assert holder.fingerprint(frozenset()) == wanted.fingerprint(frozenset())


def test_along_no_grain_a_rank_reads_everything(tmp_path: Path) -> None:
    old = state()
    cut = plain_cut(layout_of(old), for_anchor=False)
    made = step_between(tmp_path, old, changed(old, seed=1, share=0.2), cut=cut)
    files = {c.digest: p for c, p in zip(made.manifest.chunks, made.chunks, strict=True)}
    step = Step(made.manifest, "forward", lambda chunk: files[chunk.digest])
    sizes, _ = staged(held_by(3, RANKS, old), cut, step)
    assert sizes.total() == np.sum([chunk.size for chunk in made.manifest.chunks])
