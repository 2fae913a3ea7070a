"""The lineage by itself: REFs, chains, and plans against a brute-force search."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import NotFound, UsageError
from plait.lineage import ChannelRef, DigestRef, Edge, Lineage, SeqRef, State, parse_ref

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "ref"),
    [("41", SeqRef(41)), ("main", ChannelRef("main")), ("main~3", ChannelRef("main", 3)),
     ("dc-eu.1", ChannelRef("dc-eu.1")), (DIGEST, DigestRef(DIGEST))],
)  # fmt: skip
def test_a_ref_reads_as_people_write_it(text: str, ref: object) -> None:
    parsed = parse_ref(text)
    assert parsed == ref
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "main~", "main~-1", "main~1~2", "~1", "41~1", "a b", "sha256:ff", "٤"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no version"):
        parse_ref(text)


def state(number: int) -> State:
    return State("layout", f"{number:032x}")


def chain_of(length: int) -> Lineage:
    lineage = Lineage()
    for seq in range(1, length + 1):
        lineage.add_version(seq, seq - 1 or None, state(seq))
    return lineage


def test_steps_back_end_where_the_line_begins() -> None:
    lineage = chain_of(4)
    assert [lineage.back(4, steps) for steps in range(4)] == [4, 3, 2, 1]
    with pytest.raises(NotFound):
        lineage.back(4, 4)
    assert lineage.distance(2, 4) == 2
    assert lineage.distance(4, 2) is None


edges = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 5)),  # base
        st.integers(0, 5),
        st.integers(0, 100),  # cost
        st.booleans(),  # external
    ),
    max_size=12,
)


def brute_force(graph: list[Edge], base: State | None, target: State) -> int | None:
    """Cheapest cost by relaxing every edge until nothing changes."""
    costs: dict[State, int] = {} if base is None else {base: 0}
    for _ in range(10):
        for edge in graph:
            if edge.base is None:
                if not edge.external or base is None:
                    costs[edge.target] = min(costs.get(edge.target, 10**9), edge.cost)
                continue
            for source, sink in itertools.permutations((edge.base, edge.target)):
                if source in costs:
                    costs[sink] = min(costs.get(sink, 10**9), costs[source] + edge.cost)
    return costs.get(target)


@settings(max_examples=200, deadline=None)
@given(edges, st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 5))
def test_a_plan_is_the_cheapest_chain_and_hangs_together(
    rows: list[tuple[int | None, int, int, bool]], held: int | None, wanted: int
) -> None:
    lineage = Lineage()
    graph = [
        Edge(f"m{n}", None if b is None else state(b), state(t), c, external=x and b is None)
        for n, (b, t, c, x) in enumerate(rows)
    ]
    for edge in graph:
        lineage.add_edge(edge)
    base, target = None if held is None else state(held), state(wanted)
    steps = lineage.cheapest(base, target, allow_external=True)
    expected = brute_force(graph, base, target)
    if expected is None:
        assert steps is None
        return
    assert steps is not None
    assert sum(step.edge.cost for step in steps) == expected
    here = base
    for number, step in enumerate(steps):
        assert step.base == here or (number == 0 and step.base is None)
        here = step.target
    assert here == target


def test_without_anchors_a_dearer_chain_of_deltas_is_the_plan_or_there_is_none() -> None:
    lineage = Lineage()
    lineage.add_edge(Edge("anchor", None, state(2), 5))
    lineage.add_edge(Edge("other", None, state(3), 5))
    lineage.add_edge(Edge("delta", state(1), state(2), 50))
    ways = [
        lineage.cheapest(state(1), state(2), allow_external=True, allow_anchor=allowed)
        for allowed in (True, False)
    ]
    assert [[step.edge.manifest for step in way or []] for way in ways] == [["anchor"], ["delta"]]
    assert lineage.cheapest(state(1), state(3), allow_external=True, allow_anchor=False) is None
    assert lineage.cheapest(None, state(2), allow_external=True, allow_anchor=False) is None


def test_without_external_anchors_there_may_be_no_plan() -> None:
    lineage = Lineage()
    lineage.add_edge(Edge("m", None, state(1), 5, external=True))
    assert lineage.cheapest(None, state(1), allow_external=False) is None
    assert lineage.cheapest(state(2), state(1), allow_external=True) is None
