"""Redistributions, walked through on NumPy blocks: what comes out, and what it moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.layout import (
    DEFAULT_LINK_COSTS,
    Layout,
    LinkCost,
    LinkCosts,
    Phase,
    Shard,
    plan_redistribution,
)
from mpimesh.layout.two_levels import InterNode, IntraNode
from mpimesh.mesh import Mesh
from tests.helpers.depth import deep_but
from tests.helpers.layout_oracle import (
    MAX_RANK,
    assert_holds,
    crossing_at_least,
    elements,
    first_blocks,
    lacking,
    moves,
    oracle_box,
    partial_dims,
    simulate,
)

SPECS = ("R", "S0", "S1", "P")
LARGE = 4096  # bytes of an element: what is reduced for several ranks goes in two exchanges
node_lists = st.lists(st.integers(0, 2), min_size=MAX_RANK + 1, max_size=MAX_RANK + 1)


def walk(source, target, shape, *, array, blocks, itemsize=8, nodes=(), links=DEFAULT_LINK_COSTS):
    """Walk through the plan; check values and bytes."""
    plan = plan_redistribution(source, target, shape, itemsize, nodes=nodes, links=links)
    after, counts = simulate(plan, blocks, nodes or None)
    assert_holds(target, shape, after, array)
    received, messages = plan.traffic()
    assert received.tolist() == [itemsize * counts[rank][0] for rank in target.mesh.ids]
    assert messages.tolist() == [counts[rank][1] for rank in target.mesh.ids]
    assert plan.crossing_bytes == itemsize * sum(row[2] for row in counts.values())
    if not partial_dims(source) and not partial_dims(target):
        assert [type(phase) for phase in plan.phases] in ([Phase], [InterNode, IntraNode])
        least = [itemsize * lacking(source, target, shape, rank) for rank in target.mesh.ids]
        assert received.tolist() == least
        if len(plan.phases) == 2:
            at_least = crossing_at_least(source, target, shape, nodes)
            assert plan.crossing_bytes == itemsize * at_least
    return plan


# The source's placements, so that a failure says which; all of the target's inside.
PAIRS = [
    *((dims, specs, itemsize)
      for dims in ("a=2,b=4", "a=4,b=1")
      for specs in itertools.product(SPECS, repeat=2)
      for itemsize in ((8, LARGE) if "P" in specs else (8,))),
    *(("a=2,b=2,c=2", specs, LARGE) for specs in itertools.product(SPECS, repeat=3)),
]  # fmt: skip
# Summands of two dims of different sizes, and on three dims a placement of its own for each.
QUICK = [
    *(pair for pair in PAIRS if pair[0] == "a=2,b=4" and pair[2] == LARGE),
    *(pair for pair in PAIRS if pair[1] in (("P", "S0", "S1"), ("S1", "R", "P"))),
]


@pytest.mark.parametrize(("dims", "specs", "itemsize"), deep_but(PAIRS, *QUICK), ids=str)
def test_every_pair_of_placements(dims, specs, itemsize):
    mesh, shape = Mesh(dims), (7, 5)
    source = Layout(mesh, specs)
    array, blocks = first_blocks(source, shape, np.random.default_rng(3))
    for others in itertools.product(SPECS, repeat=mesh.ndim):
        walk(source, Layout(mesh, others), shape, array=array, blocks=blocks, itemsize=itemsize)


@pytest.mark.parametrize("itemsize", [8, LARGE])
@pytest.mark.parametrize("nodes", [[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 2, 2]], ids=str)
def test_every_pair_of_placements_over_nodes(nodes, itemsize):
    """A copy that is near must not be one of other summands."""
    mesh, shape = Mesh("a=2,b=2"), (5, 3)
    for specs in itertools.product(("R", "S0", "P"), repeat=2):
        source = Layout(mesh, specs)
        array, blocks = first_blocks(source, shape, np.random.default_rng(3))
        options = {"array": array, "blocks": blocks, "itemsize": itemsize, "nodes": nodes}
        for others in itertools.product(("R", "S0", "P"), repeat=2):
            walk(source, Layout(mesh, others), shape, **options)


SLOW_BETWEEN = LinkCosts(LinkCost(1e-9, 1e12), LinkCost(1e-9, 1e3))
"""Where what crosses the network is all that counts."""


@given(
    moves(),
    st.sampled_from([1, 8, LARGE]),
    st.just(()) | node_lists,
    st.integers(0, 9),
    st.sampled_from([DEFAULT_LINK_COSTS, SLOW_BETWEEN]),
)
def test_any_layout_to_any_layout(move, itemsize, nodes, seed, links):
    source, target, shape = move
    array, blocks = first_blocks(source, shape, np.random.default_rng(seed))
    options = {"array": array, "blocks": blocks, "itemsize": itemsize, "nodes": nodes}
    plan = walk(source, target, shape, **options, links=links)
    for number, rank in enumerate(target.mesh.ids):
        assert plan.received_bytes(rank) == plan.traffic()[0][number]
        assert plan.messages(rank) == plan.traffic()[1][number]
    ranks = {*source.mesh.ids, *target.mesh.ids}
    assert plan.total_bytes == sum(map(plan.received_bytes, ranks))
    assert plan.total_bytes == sum(map(plan.sent_bytes, ranks))
    assert plan.total_messages == sum(map(plan.messages, ranks))
    for rank in ranks:
        held = elements(plan.source_block(rank)) if source.mesh.contains_rank(rank) else 0
        block = elements(plan.block(rank)) if target.mesh.contains_rank(rank) else 0
        assert plan.peak_bytes(rank) >= itemsize * (held + block)
        assert plan.peak_bytes(rank, max_bytes=itemsize) <= plan.peak_bytes(rank)
    assert str(plan).startswith(" x ".join(map(str, shape)) or "a scalar")


@given(moves(partial=False), node_lists)
def test_a_copy_on_the_same_node_is_taken(move, nodes):
    source, target, shape = move
    phase = plan_redistribution(source, target, shape, nodes=nodes).phases[0]
    held = {rank: oracle_box(source, shape, rank) for rank in source.mesh.ids}
    for rank in target.mesh.ids:
        for take in phase.takes(rank):
            (who,) = take.ranks
            copies = [other for other in held if held[other] == held[who]]
            if rank in copies:
                assert who == rank
            elif nodes[rank] in {nodes[other] for other in copies}:
                assert nodes[who] == nodes[rank]


@given(moves(partial=False, apart=True))
def test_copies_are_read_evenly_from_another_mesh(move):
    source, target, shape = move
    (phase,) = plan_redistribution(source, target, shape).phases
    reads = dict.fromkeys(source.mesh.ids, 0)
    for rank in target.mesh.ids:
        for take in phase.takes(rank):
            reads[take.ranks[0]] += 1
    by_block: dict[object, list[int]] = {}
    for rank, count in reads.items():
        block = tuple(source.mesh.coords_of(rank)[dim] for dim in shard_dims(source))
        by_block.setdefault(block, []).append(count)
    assert all(max(counts) - min(counts) <= 1 for counts in by_block.values()), by_block


def test_sizes_do_not_go_on_where_another_dim_splits_the_axis():
    mesh = Mesh("a=2,b=2")
    source, target = Layout(mesh, "a=S0(3,1)"), Layout(mesh, "a=P, b=S0")
    array, blocks = first_blocks(source, (4,), np.random.default_rng(3))
    walk(source, target, (4,), array=array, blocks=blocks)
    alone = plan_redistribution(source, Layout(mesh, "a=P"), (4,))
    assert alone.total_bytes == 0  # each rank contributes what it has


def test_blocks_without_elements_have_no_turn():
    source = Layout(Mesh("a=2"), "R")
    target = Layout(Mesh("b=3", [5, 6, 7]), [Shard(0, sizes=(3, 0, 1))])
    (phase,) = plan_redistribution(source, target, (4,)).phases
    takes = [take.ranks for rank in (5, 6, 7) for take in phase.takes(rank)]
    assert takes == [(0,), (1,)]


def shard_dims(layout):
    return [k for k, spec in enumerate(layout.placement) if str(spec).startswith("S")]
