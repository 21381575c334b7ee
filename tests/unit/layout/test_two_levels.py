"""Plans over nodes: what comes to each once, sums made inside them, and which way is taken."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import LayoutError
from mpimesh.layout import Layout, LinkCost, LinkCosts, Phase, plan_redistribution
from mpimesh.layout.strategies import AT_ONCE, TWO_LEVELS, node_dims
from mpimesh.layout.two_levels import InterNode, IntraNode, crossing
from mpimesh.mesh import Mesh
from tests.helpers.depth import examples
from tests.helpers.layout_oracle import (
    MAX_RANK,
    assert_holds,
    crossing_at_least,
    elements,
    first_blocks,
    moves,
    simulate,
)
from tests.helpers.raises import raises

SLOW_BETWEEN = LinkCosts(LinkCost(1e-9, 1e12), LinkCost(1e-9, 1e3))
"""Where what crosses the network is all that counts."""
LATE_BETWEEN = LinkCosts(LinkCost(1e-9, 1e12), LinkCost(1.0, 1e12))
"""Where the number of messages between nodes is."""

node_lists = st.lists(st.integers(0, 2), min_size=MAX_RANK + 1, max_size=MAX_RANK + 1)


def counted(phase, nodes):
    """The receipts of each rank, box by box: elements, boxes, those of them from other nodes."""
    rows = np.zeros((4, phase.target.mesh.size), np.int64)
    for column, rank in zip(rows.T, phase.target.mesh.ids, strict=True):
        for take in phase.takes(rank):
            for who in take.ranks:
                size, far = elements(take.box), nodes[who] != nodes[rank]
                column += (who != rank) * np.array([size, 1, size * far, far], np.int64)
    return rows.tolist()


@settings(max_examples=examples(150))
@given(moves(partial=False), node_lists)
def test_what_is_fetched_and_shared_is_what_is_taken_at_once(move, nodes):
    """Whether or not it is fastest: counts, and each byte that a node lacks once."""
    source, target, shape = move
    whole = Phase(source.tiling(shape), target.tiling(shape), nodes=tuple(nodes))
    fetching, sharing = InterNode(whole), IntraNode(whole)
    for phase in (whole, fetching, sharing):
        assert counted(phase, nodes) == np.stack([*phase.received(), *crossing(phase)]).tolist()
        takes = {
            (who, rank, take.box)
            for rank in target.mesh.ids
            for take in phase.takes(rank)
            for who in take.ranks
            if who != rank
        }
        gives = {(rank, *give) for rank in source.mesh.ids for give in phase.gives(rank)}
        gives = gives if phase is not sharing else {
            (rank, *give) for rank in target.mesh.ids for give in phase.gives(rank)
        }  # fmt: skip
        assert takes == gives
    at_once = whole.received()[0]
    assert (fetching.received()[0] + sharing.received()[0] == at_once).all()
    assert crossing(fetching)[0].sum() == crossing_at_least(source, target, shape, nodes)
    assert not crossing(sharing)[0].any()
    for rank in target.mesh.ids:
        boxes = [take.box for phase in (fetching, sharing) for take in phase.takes(rank)]
        assert sum(map(elements, boxes)) == elements(target.box(shape, rank))
        for take in sharing.takes(rank):  # of what its peers have by then
            assert take.box in [one.box for one in fetching.takes(take.ranks[0])]


@pytest.mark.parametrize("per_node", [2, 4])
@pytest.mark.parametrize(
    ("dims", "source", "target", "copies"),
    [
        ("a=8", "P", "S0", 1),
        ("a=8", "P", "S1", 1),
        ("a=8", "P", "R", 2),
        ("a=8", "S0", "R", 1),
        ("a=2,b=4", "P,P", "S0,S1", 1),
        ("a=2,b=4", "P,P", "R,R", 2),
    ],
)
def test_each_byte_crosses_once(dims, source, target, copies, per_node):
    """To reduce takes each node's share from all other nodes; to have it everywhere, once more."""
    mesh, shape = Mesh(dims), (16, 16)
    nodes = [rank // per_node for rank in range(8)]
    others = 8 // per_node - 1
    before, after = Layout(mesh, source), Layout(mesh, target)
    plan = plan_redistribution(before, after, shape, 8, nodes=nodes, links=SLOW_BETWEEN)
    assert plan.strategies[0][0] == TWO_LEVELS
    assert plan.crossing_bytes == copies * others * 16 * 16 * 8
    array, blocks = first_blocks(before, shape, np.random.default_rng(1))
    held, _ = simulate(plan, blocks, nodes)
    assert_holds(after, shape, held, array)


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["a=6", "a=2,b=4", "a=4,b=2", "a=2,b=2,c=2"]),
    st.sampled_from([lambda r: r // 2, lambda r: r % 2, lambda r: r // 4, lambda r: r // 2 % 2]),
    st.data(),
)
def test_sums_are_right_whatever_way_is_taken(dims, node_of, data):
    mesh = Mesh(dims)
    specs = st.lists(st.sampled_from(["P", "P", "S0", "S1", "R"]), min_size=mesh.ndim,
                     max_size=mesh.ndim)  # fmt: skip
    source, target = (Layout(mesh, data.draw(specs)) for _ in range(2))
    shape = data.draw(st.sampled_from([(9, 7), (1, 3), (40, 2)]))
    nodes = [node_of(rank) for rank in mesh.ids]
    array, blocks = first_blocks(source, shape, np.random.default_rng(2))
    plans = [
        plan_redistribution(source, target, shape, 4096, nodes=nodes, links=links)
        for links in (SLOW_BETWEEN, LATE_BETWEEN)
    ]
    for plan in plans:
        held, counts = simulate(plan, blocks, nodes)
        assert_holds(target, shape, held, array)
        assert plan.crossing_bytes == 4096 * sum(row[2] for row in counts.values())
    at_once = Phase(source.tiling(shape), target.tiling(shape), nodes=tuple(nodes))
    if "P" not in f"{source} {target}":
        assert plans[0].crossing_bytes <= 4096 * crossing(at_once)[0].sum()


def test_dims_are_split_where_a_node_ends():
    mesh = Mesh("a=2,b=8")
    split = node_dims(mesh, tuple(rank // 4 for rank in range(16)))
    assert split.mesh.dims_text == "a=2,b_far=2,b_near=4"
    assert split.parts == ((0,), (1, 2))
    assert split.near == {2}
    assert list(split.mesh.ids) == list(mesh.ids)
    in_turn = node_dims(mesh, tuple(rank % 4 for rank in range(16)))
    assert in_turn.mesh.dims_text == "a=2,b_near=2,b_far=4"
    assert in_turn.near == {0, 1}
    uneven = node_dims(mesh, tuple(int(rank > 2) for rank in range(16)))
    assert (uneven.mesh.dims, uneven.near) == (mesh.dims, frozenset())


PAIRS = Mesh("a=2,b=2")
NODES = [0, 0, 1, 1]


def test_small_arrays_go_at_once_and_large_ones_on_two_levels():
    layouts = Layout(PAIRS, "S0,S0"), Layout(PAIRS, "R,R")
    small = plan_redistribution(*layouts, (16,), 8, nodes=NODES)
    large = plan_redistribution(*layouts, (1 << 20,), 8, nodes=NODES)
    assert [name for name, _ in small.strategies] == [AT_ONCE, TWO_LEVELS]
    assert [name for name, _ in large.strategies] == [TWO_LEVELS, AT_ONCE]
    assert large.predicted_s() == large.strategies[0][1] < large.strategies[1][1]
    assert large.crossing_bytes == 8 << 20
    fast = LinkCosts(inter_node=LinkCost(2e-6, 1e12))
    assert plan_redistribution(*layouts, (1 << 20,), 8, nodes=NODES, links=fast).strategies[0][
        0
    ] == (AT_ONCE)


def test_the_text_says_the_way_and_why():
    layouts = Layout(PAIRS, "S0,S0"), Layout(PAIRS, "R,R")
    plan = plan_redistribution(*layouts, (1 << 20,), 8, nodes=NODES)
    assert str(plan).splitlines()[1:] == [
        "  1. each rank takes what is near, and a part of what its node lacks: 16 MiB in 8 "
        "messages, 8 MiB of it between nodes",
        "  2. ranks of a node read these parts of each other: 8 MiB in 4 messages",
        "  all ranks receive 24 MiB in 12 messages; rank 0 the most: 6 MiB in 3",
        "  peak memory of rank 0: 18 MiB; about 1.7 ms at 2 us a message and 5 GB/s, as assumed",
        "  done on two levels; each rank from each it would take about 2.1 ms",
    ]
    near, far = LinkCost(1e-6, 1e10, measured=True), LinkCost(5e-6, 2.5e9, measured=True)
    plan = plan_redistribution(*layouts, (1 << 20,), 8, nodes=NODES, links=LinkCosts(near, far))
    assert (
        "at 1 us a message and 10 GB/s in a node, 5 us a message and 2.5 GB/s between nodes, "
        "as measured"
    ) in str(plan)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (
            LinkCosts(intra_node=LinkCost(1e-6, 1e10, measured=True)),
            "1 us a message and 10 GB/s in a node, as measured, "
            "and 2 us a message and 5 GB/s between nodes, as assumed",
        ),
        (
            LinkCosts(inter_node=LinkCost(5e-6, 2.5e9, measured=True)),
            "2 us a message and 5 GB/s in a node, as assumed, "
            "and 5 us a message and 2.5 GB/s between nodes, as measured",
        ),
        (LinkCosts(), "at 2 us a message and 5 GB/s, as assumed"),
    ],
)
def test_the_text_says_of_each_link_whether_it_was_measured(links, said):
    layouts = Layout(PAIRS, "S0,S0"), Layout(PAIRS, "R,R")
    assert said in str(plan_redistribution(*layouts, (1 << 20,), 8, nodes=NODES, links=links))


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        ("S0", "R", "by all_gather over a"),
        ("S1", "R", "by all_gather over a"),
        ("P", "S1", "by reduce_scatter over a"),
        ("P", "R", "by all_reduce over a"),
        ("S0", "S1", "by all_to_all over a"),
        ("S0", "S0(2,2,2,2,2,2,4,0)", None),
        ("R", "S0", None),
    ],
)
def test_collectives_that_do_it_all(source, target, found):
    """Each rank is a node of its own: 7 messages, or 3 one after the other."""
    mesh = Mesh("a=8")
    layouts = Layout(mesh, source), Layout(mesh, target)
    options: dict[str, Any] = {"nodes": range(8), "links": LATE_BETWEEN}
    plan = plan_redistribution(*layouts, (16, 16), 8, **options, collectives=True)
    assert plan.collective is None if found is None else str(plan.collective) == found
    assert found is None or plan.strategies[0][0] == found
    assert plan_redistribution(*layouts, (16, 16), 8, **options).collective is None


def test_large_blocks_are_not_packed_for_an_all_to_all():
    layouts = Layout(Mesh("a=8"), "S0"), Layout(Mesh("a=8"), "S1")
    kinds = [
        plan_redistribution(*layouts, (n, n), 8, nodes=range(8), collectives=True).collective
        for n in (16, 1024)
    ]
    assert [one and one.kind for one in kinds] == ["all_to_all", None]


def test_blocks_that_do_not_lie_in_a_row_are_not_gathered():
    mesh = Mesh("a=4,b=4")
    options: dict[str, Any] = {
        "nodes": range(16),
        "links": LATE_BETWEEN,
        "collectives": True,
    }
    outer = plan_redistribution(Layout(mesh, "S0,S0"), Layout(mesh, "R,S0"), (32,), 8, **options)
    inner = plan_redistribution(Layout(mesh, "S0,S0"), Layout(mesh, "S0,R"), (32,), 8, **options)
    assert outer.collective is None
    assert str(inner.collective) == "by all_gather over b"


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "values"),
    [
        (-1.0, 1.0, (-1.0, 1.0)),
        (0.0, 0.0, (0.0, 0.0)),
        (np.inf, 1.0, ("latency_s", np.inf)),
        ("1", 1.0, ("latency_s", "'1'")),
        (True, 1.0, ("latency_s", True)),
    ],
)
def test_links_that_there_are_not(latency_s, bytes_per_s, values):
    with raises(LayoutError, "link", *values):
        LinkCost(latency_s, bytes_per_s)


# -- thousands of ranks -------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [8, 64])
@pytest.mark.parametrize(
    ("before", "after"), [("S0,S0", "R,R"), ("R,S0", "R,R"), ("P,P", "R,R"), ("P,P", "S0,S1")]
)
def test_plans_for_thousands_of_ranks(before, after, per_node):
    """A second of processor time at most, and memory for a rank's own messages."""
    mesh, nodes = Mesh("a=64,b=64"), np.arange(4096) // per_node
    layouts = Layout(mesh, before), Layout(mesh, after)
    start_s = time.process_time()
    plan = plan_redistribution(*layouts, (8192, 8192), 8, nodes=nodes)
    found = [(phase.takes(77), phase.gives(77)) for phase in plan.phases]
    took_s = time.process_time() - start_s
    assert took_s < 2  # half of it on an idle machine
    assert sum(len(takes) for takes, _ in found) <= 4096 + 128
    if per_node == 8:
        plan_redistribution(*layouts, (8192, 8192), 8)  # what is kept of a mesh is there
        tracemalloc.start()
        again = plan_redistribution(*layouts, (8192, 8192), 16, nodes=nodes)
        assert [phase.takes(78) for phase in again.phases]
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 64 << 20  # a table of all pairs of ranks would have 128 MiB
