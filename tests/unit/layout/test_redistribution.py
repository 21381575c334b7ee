"""Redistribution plans as values: refusals, memory, texts, and plans for thousands of ranks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpimesh.errors import LayoutError
from mpimesh.layout import Layout, LinkCost, LinkCosts, Partial, plan_redistribution
from mpimesh.mesh import Mesh
from tests.helpers.raises import raises

PAIR = Mesh("a=2")


@pytest.mark.parametrize("itemsize", [0, -8, 1.5])
def test_an_itemsize_that_is_refused(itemsize):
    with raises(LayoutError, "itemsize", itemsize):
        plan_redistribution(Layout(PAIR, "S0"), Layout(PAIR, "R"), (4,), itemsize)


def test_layouts_that_do_not_fit_the_shape():
    with raises(LayoutError, "Shard(1)", "a=2", (4,)):
        plan_redistribution(Layout(PAIR, "S1"), Layout(PAIR, "R"), (4,))
    with raises(LayoutError, "Shard(1)", "a=2", (4,)):
        plan_redistribution(Layout(PAIR, "R"), Layout(PAIR, "S1"), (4,))
    with raises(LayoutError, (1, 2), (4,)):
        plan_redistribution(Layout(PAIR, "R"), Layout(PAIR, "S0(1,2)"), (4,))
    with raises(LayoutError, (-4,)):
        plan_redistribution(Layout(PAIR, "R"), Layout(PAIR, "R"), (-4,))


def test_nodes_must_have_every_rank():
    target = Layout(Mesh("b=2", [4, 6]), "R")
    with raises(LayoutError, "nodes", "0 to 6", 6):
        plan_redistribution(Layout(PAIR, "S0"), target, (4,), nodes=[0] * 6)
    plan = plan_redistribution(Layout(PAIR, "R"), target, (4,), nodes=np.arange(7) % 3)
    assert plan.phases[0].takes(6)[0].ranks == (0,)  # both on node 0
    assert plan.phases[0].takes(4)[0].ranks == (1,)  # both on node 1


def test_a_plan_tells_what_each_rank_holds():
    target = Layout(Mesh("b=2", [1, 2]), "S0")
    plan = plan_redistribution(Layout(PAIR, "S0"), target, (6,), 8)
    assert [plan.source_block(rank) for rank in range(4)] == [((0, 3),), ((3, 6),), None, None]
    assert [plan.block(rank) for rank in range(4)] == [None, ((0, 3),), ((3, 6),), None]
    assert [plan.received_bytes(rank) for rank in range(4)] == [0, 24, 24, 0]
    assert [plan.sent_bytes(rank) for rank in range(4)] == [24, 24, 0, 0]
    assert [plan.messages(rank) for rank in range(4)] == [0, 1, 1, 0]
    assert (plan.total_bytes, plan.total_messages) == (48, 2)
    # rank 1: its old block, its new one, and both of them packed
    assert [plan.peak_bytes(rank) for rank in range(4)] == [48, 96, 48, 0]
    assert [plan.peak_bytes(rank, max_bytes=16) for rank in range(4)] == [40, 64, 40, 0]


def test_peak_memory_of_a_rank_that_only_gives_in_two_exchanges():
    plan = plan_redistribution(Layout(PAIR, "P"), Layout(Mesh("b=2", [5, 6]), "R"), (400, 40), 8)
    assert len(plan.phases) == 2
    whole = 400 * 40 * 8
    assert plan.peak_bytes(0) == 2 * whole  # its block, and all of it packed
    # In the second exchange: a half, the whole, and a half packed for each side.
    assert plan.peak_bytes(5) == 5 * whole // 2
    assert plan.peak_bytes(7) == 0


def test_what_is_small_is_reduced_in_one_exchange():
    layouts = Layout(PAIR, "P"), Layout(PAIR, "R")
    assert len(plan_redistribution(*layouts, (4096,), 8).phases) == 1
    assert len(plan_redistribution(*layouts, (4097,), 8).phases) == 2
    assert len(plan_redistribution(Layout(PAIR, "P"), Layout(PAIR, "S0"), (4097,), 8).phases) == 1


def test_reductions_move_what_a_ring_would():
    mesh = Mesh("a=8")
    whole = 8 * 1024 * 8
    scattered = plan_redistribution(Layout(mesh, "P"), Layout(mesh, "S0"), (8, 1024), 8)
    assert scattered.traffic()[0].tolist() == [7 * whole // 8] * 8
    reduced = plan_redistribution(Layout(mesh, "P"), Layout(mesh, "R"), (8, 1024), 8)
    assert reduced.traffic()[0].tolist() == [2 * 7 * whole // 8] * 8


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "mean"])
def test_becoming_partial_moves_nothing(op):
    mesh = Mesh("a=2,b=2")
    for specs in ("R,R", "S0,R", "S0,S1"):
        source = Layout(mesh, specs)
        target = Layout(mesh, [Partial(op), source.placement[1]])
        assert plan_redistribution(source, target, (5, 3)).total_bytes == (
            0 if op != "mean" or specs == "R,R" else plan_bytes_of_mean(source)
        )


def plan_bytes_of_mean(source):
    """The bytes that each rank lacks along dim a: a mean's summands are whole."""
    whole = Layout(source.mesh, ["R", source.placement[1]])
    return plan_redistribution(source, whole, (5, 3)).total_bytes


def test_the_time_is_that_of_the_busiest_rank_of_each_exchange():
    plan = plan_redistribution(Layout(PAIR, "S0"), Layout(PAIR, "R"), (5,), 8)
    slow = LinkCosts(intra_node=LinkCost(latency_s=1.0, bytes_per_s=8.0))
    assert plan.predicted_s(slow) == 1 + 3
    both = plan_redistribution(Layout(PAIR, "P"), Layout(PAIR, "R"), (8000,), 8)
    assert both.predicted_s(slow) == 2 * (1 + 4000)
    assert plan_redistribution(Layout(PAIR, "R"), Layout(PAIR, "S0"), (5,)).predicted_s() == 0


def test_texts():
    mesh = Mesh("dp=2,tp=2")
    plan = plan_redistribution(Layout(mesh, "S0,R"), Layout(mesh, "R,S1"), (2048, 2048), 8)
    assert str(plan).splitlines() == [
        "2048 x 2048, 8 bytes each: dp=S0, tp=R on dp=2,tp=2 -> dp=R, tp=S1 on dp=2,tp=2",
        "  1. each rank takes what it lacks: 32 MiB in 4 messages",
        "  all ranks receive 32 MiB in 4 messages; rank 0 the most: 8 MiB in 1",
        "  peak memory of rank 0: 48 MiB; about 1.7 ms at 2 us a message and 5 GB/s, as assumed",
    ]
    reduced = plan_redistribution(Layout(mesh, "P,R"), Layout(mesh, "R,R"), (2048, 2048), 8)
    assert "  1. reduce (sum) over dp on the way: 32 MiB in 4 messages" in str(reduced)
    assert "  2. each rank takes what it lacks: 96 MiB in 12 messages" in str(reduced)
    # In the second: its old block, its quarter, the whole, 3 quarters packed for each side.
    assert "  peak memory of rank 0: 120 MiB" in str(reduced)
    kept = plan_redistribution(Layout(mesh, "R,R"), Layout(mesh, "P,R"), ())
    assert str(kept).splitlines() == [
        "a scalar, 1 bytes each: dp=R, tp=R on dp=2,tp=2 -> dp=P, tp=R on dp=2,tp=2",
        "  1. each rank keeps or cuts what it has",
        "  nothing moves between ranks",
    ]


# -- thousands of ranks -------------------------------------------------------------------

LARGE = Mesh("a=64,b=64")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("before", "after", "num_takes", "most_bytes"),
    [
        ("S0,S1", "S1,S0", 1, 4 * MIB),
        ("R,R", "S0,S1", 1, 4 * MIB),
        ("S0,R", "S1,R", 64, 4 * MIB),
        ("S0,S0", "S1,S1", 4096, 16 * MIB),
        ("S0,S0", "R,R", 4096, 16 * MIB),
        ("P,P", "S0,S1", 1, 4 * MIB),
    ],
)
def test_memory_is_that_of_a_rank_s_own_messages(before, after, num_takes, most_bytes):
    """A table of all pairs of ranks would have 16,777,216 entries: 128 MiB."""
    layouts = Layout(LARGE, before), Layout(LARGE, after)
    tracemalloc.start()
    plan = plan_redistribution(*layouts, (8192, 8192), 8)
    taken = plan.phases[0].takes(77)
    given = plan.phases[0].gives(77)
    received, _ = plan.traffic()
    text = str(plan)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < most_bytes
    assert len(taken) == num_takes
    assert len(given) <= 4096
    assert received[77] == plan.received_bytes(77)
    assert text


def test_memory_with_nodes_and_copies_on_another_mesh():
    """Each of 4,096 ranks looks for its node among 4,096 copies."""
    other = Mesh("c=64,d=64", range(4096, 8192))
    nodes = [rank // 8 % 512 for rank in range(8192)]
    tracemalloc.start()
    plan = plan_redistribution(
        Layout(LARGE, "R,R"), Layout(other, "S0,S1"), (8192, 8192), nodes=nodes
    )
    ((part, (who,)),) = [(take.box, take.ranks) for take in plan.phases[0].takes(5000)]
    given = dict(plan.phases[0].gives(who))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 96 * MIB
    assert nodes[who] == nodes[5000]
    assert given[5000] == part
