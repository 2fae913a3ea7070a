"""Who holds what: the ranks' maps put together, and their partial sums added up.

Words that several holders have (replicated norms, KV heads shared by ranks, a tie loaded twice) are
counted once, and all holders must agree on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import MapUnproven, ReplicaUnproven
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait_rollout.sglang.pieces import Piece, overlap_of
from plait_rollout.sglang.tally import Tally


@dataclass(frozen=True, slots=True)
class Ownership:
    """The holders' pieces, compared.

    Attributes:
        shared: for each holder, the numbers of its pieces that are held elsewhere too.
        groups: the holders (holder, piece) of each shared block.
        unheld: tensors that nobody holds.
    """

    shared: tuple[frozenset[int], ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]
    unheld: tuple[str, ...]


def ownership(layout: Layout, holders: Sequence[Sequence[Piece]]) -> Ownership:
    """Compares the holders' maps: each tensor is held whole, each word once or by equals.

    Raises:
        MapUnproven: a tensor is held in part only, or two blocks overlap without being equal.
    """
    blocks: dict[str, dict[tuple[object, ...], list[tuple[int, int]]]] = {}
    for holder, pieces in enumerate(holders):
        for number, piece in enumerate(pieces):
            by_source = blocks.setdefault(piece.tensor, {})
            by_source.setdefault(piece.source, []).append((holder, number))
    unheld = tuple(t.name for t in layout.tensors if t.items and t.name not in blocks)
    groups: list[tuple[tuple[int, int], ...]] = []
    for name, by_source in blocks.items():
        held = [holders[places[0][0]][places[0][1]] for places in by_source.values()]
        _check_whole(name, layout[name].items, held)
        groups += [tuple(places) for places in by_source.values() if len(places) > 1]
    shared: list[set[int]] = [set() for _ in holders]
    for group in groups:
        for holder, number in group:
            shared[holder].add(number)
    return Ownership(tuple(map(frozenset, shared)), tuple(groups), unheld)


def total(owned: Ownership, tallies: Sequence[Tally]) -> tuple[Fingerprint, int]:
    """The sum over all holders, each word once: (fingerprint, items).

    Raises:
        ReplicaUnproven: holders of one block disagree.
    """
    value = sum((tally.owned for tally in tallies), ZERO)
    items = sum(tally.items for tally in tallies)
    for group in owned.groups:
        told = {tallies[holder].shared.get(number, (ZERO, 0)) for holder, number in group}
        if len(told) != 1:
            raise ReplicaUnproven(
                f"holders {[holder for holder, _ in group]} of one replicated block disagree: "
                f"{sorted(str(fingerprint) for fingerprint, _ in told)}"
            )
        ((fingerprint, count),) = told
        value += fingerprint
        items += count
    return value, items


def _check_whole(name: str, items: int, held: Sequence[Piece]) -> None:
    if len(held) > 1:
        item = overlap_of((p.source_start, p.sizes, p.source_strides) for p in held)
        if item is not None:
            raise MapUnproven(f"item {item} of {name!r} lies in two different blocks of the ranks")
    found = sum(piece.items for piece in held)
    if found != items:
        raise MapUnproven(f"the engine holds {found} of the {items} items of {name!r}")
