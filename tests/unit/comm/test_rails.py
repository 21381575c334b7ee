"""Rails between nodes, and rows of pieces cut into windows."""

from __future__ import annotations

from hypothesis import given, strategies as st

from mpimesh.comm.over_nodes import NO_RANK, Rails
from mpimesh.comm.shared_work import length, windows
from mpimesh.errors import TransportError
from tests.helpers.raises import raises


@st.composite
def nodes(draw):
    """Ranks in any order over up to 5 nodes, each node's in theirs, nodes by their first."""
    of_rank = draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
    found = [[r for r, node in enumerate(of_rank) if node == one] for one in dict.fromkeys(of_rank)]
    return found


@given(nodes())
def test_every_block_reaches_every_other_node_once(found):
    ranks = sorted(rank for node in found for rank in node)
    smallest = min(map(len, found))
    for node in found:
        seen_by = [Rails(found, rank) for rank in node]
        arriving = []
        for place, rails in enumerate(seen_by):
            assert rails.here == node
            assert rails.count == smallest
            coming = rails.remote_sources(place)
            assert bool(coming) <= (place < smallest)
            arriving += coming
        assert sorted(arriving) == sorted(set(ranks) - set(node))


@given(nodes())
def test_all_ranks_of_a_rail_agree_on_what_travels(found):
    """Each has its own node's block at its own node's number, in the same turn as all."""
    everyone = [rank for node in found for rank in node]
    rails = Rails(found, everyone[0])
    for other in everyone:
        seen = Rails(found, other)
        assert [seen.sources(rail) for rail in range(seen.count)] == [
            rails.sources(rail) for rail in range(rails.count)
        ]
        assert found[seen.node_of[other]].count(other) == 1
    carried = []
    for rail in range(rails.count):
        for turn, row in enumerate(rails.sources(rail)):
            for number, rank in enumerate(row):
                if rank != NO_RANK:
                    assert found[number].index(rank) == turn * rails.count + rail
                    carried.append(rank)
    assert sorted(carried) == sorted(everyone)
    # No turn in vain.
    assert any(rank != NO_RANK for rail in range(rails.count) for rank in rails.sources(rail)[-1])


@given(nodes())
def test_the_leaders_of_a_node_work_for_all_on_it(found):
    for node in found:
        rails = Rails(found, node[0])
        for place, rank in enumerate(node):
            expected = [r for r in node if (node.index(r) - place) % rails.count == 0]
            assert [rank, *rails.followers(place)] == (expected if place < rails.count else [rank])


def test_a_rank_on_no_rail_is_told_so():
    with raises(TransportError, "rail"):
        _ = Rails([[0, 1], [2]], 1).comm


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20))
def test_windows_lay_the_pieces_one_after_the_other(sizes, step):
    row = [(piece, place) for piece, size in enumerate(sizes) for place in range(size)]
    seen = []
    cut = list(windows(sizes, step))
    for number, window in enumerate(cut):
        inside: list[tuple[int, int]] = []
        for fragment in window:
            assert fragment.at == len(inside)
            assert length(fragment.place) == length(fragment.part) > 0
            inside += [(fragment.piece, i) for i in range(fragment.part.start, fragment.part.stop)]
        assert len(inside) == (step if number < len(cut) - 1 else len(row) - number * step)
        seen += inside
    assert seen == row
