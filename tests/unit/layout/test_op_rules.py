"""Patterns of operations, and the rule that moves the fewest bytes."""

from __future__ import annotations

from itertools import product

from hypothesis import given, strategies as st

from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import Layout, Operand, Placement, op_rules, plan_redistribution
from mpimesh.layout.op_rules import (
    KEEP,
    Linearity,
    Pattern,
    broadcast_shape,
    einsum_pattern,
    elementwise_pattern,
    matmul_pattern,
    reduced_shape,
    reduction_pattern,
    rule_for,
)
from mpimesh.mesh import Mesh
from tests.helpers.raises import raises


def placement(text):
    return Placement.from_text(text)


def rule(dims, operands, pattern, shape):
    made = tuple(Operand(lengths, placement(text)) for lengths, text in operands)
    found = rule_for(Mesh(dims), made, pattern, shape, 8)
    return [*map(str, found.inputs), str(found.output)]


def test_stretched_axes_have_no_letter():
    pattern = elementwise_pattern([(3, 1), (4,), ()], (2, 3, 4))
    assert pattern.inputs == ((1, KEEP), (2,), ())
    assert pattern.output == (0, 1, 2)
    assert pattern.is_elementwise
    assert rule("x=2", [((3, 1), "S1"), ((3, 4), "S1")], elementwise_pattern(
        [(3, 1), (3, 4)], (3, 4)), (3, 4)) == ["R", "S[1]", "S[1]"]  # fmt: skip


def test_letters_that_stand_twice_or_are_summed_for_nothing_are_not_split():
    assert einsum_pattern("ii->i", [(3, 3)]).pattern.letters == ()
    assert reduction_pattern((2, 3), {0}, "").letters == (1,)
    assert reduction_pattern((2, 3), {0}, "sum").letters == (1, 0)


def test_reductions():
    pattern = reduction_pattern((2, 3, 4), {1}, "max", keepdims=True, others=[(3, 1)], front=1)
    assert pattern == Pattern(
        ((0, 1, 2), (1, KEEP)), (KEEP, 0, KEEP, 2), "max", (Linearity((0,), ("max",)),)
    )
    assert reduced_shape((2, 3, 4), {0, 2}) == (3,)
    assert rule("x=2", [((4, 6), "S0")], reduction_pattern((4, 6), {0}, "min"), (6,)) == [
        "S[0]", "P(min)",
    ]  # fmt: skip
    # Another reduction waits already, so this one cannot.
    found = rule("x=2,y=2", [((4, 6), "P, S0")], reduction_pattern((4, 6), {0}, "min"), (6,))
    assert "P," not in found[0]


def test_shapes_of_products():
    assert matmul_pattern((5, 1, 2, 3), (4, 3, 7)).shape == (5, 4, 2, 7)
    assert matmul_pattern((3,), (3,)).shape == ()
    assert matmul_pattern((2, 3), (3,)).shape == (2,)
    assert einsum_pattern("i...,...j", [(2, 5, 3), (5, 3, 4)]).shape == (5, 3, 2, 4)
    assert einsum_pattern("b...ij,b...jk->...bik", [(2, 7, 3, 4), (2, 1, 4, 5)]).shape == (
        7, 2, 3, 5,
    )  # fmt: skip
    with raises(ShapeError, "einsum", "i...->i", "ellipsis"):
        einsum_pattern("i...->i", [(2, 3)])
    with raises(ShapeError, "einsum", "'ii'", "twice", (1, 7)):
        einsum_pattern("ii", [(1, 7)])
    assert einsum_pattern("ii,ij->ij", [(1, 1), (4, 3)]).shape == (4, 3)
    with raises(ShapeError, (2,), (3,)):
        broadcast_shape([(2,), (3,)])


def test_summands_stay_where_that_costs_nothing():
    add = (Linearity((0, 1)),)
    pattern = elementwise_pattern([(4, 6), (6,)], (4, 6), add)
    assert rule("x=2", [((4, 6), "P"), ((6,), "R")], pattern, (4, 6)) == ["P", "P", "P"]
    assert rule("x=2", [((4, 6), "P(mean)"), ((6,), "R")], pattern, (4, 6))[2] == "P(mean)"
    assert rule("x=2", [((4, 6), "P(max)"), ((6,), "R")], pattern, (4, 6))[2] == "S[0]"
    assert rule("x=2", [((4, 6), "P"), ((6,), "P(mean)")], pattern, (4, 6))[0] in "P, P(mean)"
    assert rule("x=2", [((4, 6), "P"), ((6,), "S0")], pattern, (4, 6)) == ["S[1]", "S[0]", "S[1]"]


def test_sizes_of_operands_are_kept():
    pattern = elementwise_pattern([(6,), (6,)], (6,))
    assert rule("x=2", [((6,), "S0(5,1)"), ((6,), "R")], pattern, (6,))[2] == "S[0](5,1)"
    # Behind another split the sizes of a whole axis do not fit: they are dropped.
    found = rule("x=2,y=2", [((6,), "S0, R"), ((6,), "R, S0(5,1)")], pattern, (6,))
    Layout(Mesh("x=2,y=2"), placement(found[2])).tiling((6,))


SPECS = ["R", "S0", "S1", "P"]


@given(st.data())
def test_no_other_way_moves_less(data):
    """Against all ways of one product on two mesh dims, tried one by one."""
    a, b = (data.draw(st.sampled_from([(2, 8), (8, 8), (32, 8)])) for _ in range(2))
    b = (8, b[0])
    mesh = Mesh("x=2,y=3")
    texts = [", ".join(data.draw(st.sampled_from(SPECS)) for _ in mesh.dims) for _ in range(2)]
    operands = tuple(Operand(s, placement(t)) for s, t in zip((a, b), texts, strict=True))
    found = matmul_pattern(a, b)
    best = rule_for(mesh, operands, found.pattern, found.shape, 8)

    def moved(inputs, output):
        total = sum(
            plan_redistribution(
                Layout(mesh, one.placement), Layout(mesh, to), one.shape, 8
            ).total_bytes
            for one, to in zip(operands, inputs, strict=True)
        )
        parts = 1
        for dim, spec in zip(mesh.dims, output, strict=True):
            parts *= dim.size if str(spec) == "P" else 1
        return total + (parts - 1) * found.shape[0] * found.shape[1] * 8

    ways = [("R", "R", "R"), ("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "P"),
            ("P", "R", "P"), ("R", "P", "P")]  # fmt: skip
    least = min(
        moved(
            [placement(f"{one[k]}, {two[k]}") for k in range(2)],
            placement(f"{one[2]}, {two[2]}"),
        )
        for one, two in product(ways, repeat=2)
    )
    assert moved(best.inputs, best.output) <= least


def test_many_dims_are_bettered_one_by_one(monkeypatch):
    pattern = matmul_pattern((64, 64), (64, 64)).pattern
    operands = [((64, 64), "S0, S1, R"), ((64, 64), "R, S0, S1")]
    rule_for.cache_clear()
    all_ways = rule("x=2,y=2,z=2", operands, pattern, (64, 64))
    rule_for.cache_clear()
    monkeypatch.setattr(op_rules, "_MOST_TRIED", 1)
    assert rule("x=2,y=2,z=2", operands, pattern, (64, 64)) == all_ways
    assert all_ways == ["S[0], S[1], R", "R, S[0], S[1]", "S[0], P, S[1]"]
    rule_for.cache_clear()


def test_where_it_is_wanted_counts():
    mesh = Mesh("x=2")
    pattern = elementwise_pattern([(8, 8)], (8, 8))
    operands = (Operand((8, 8), placement("R")),)
    assert str(rule_for(mesh, operands, pattern, (8, 8), 8).output) == "R"
    goal = placement("S1")
    assert str(rule_for(mesh, operands, pattern, (8, 8), 8, goal).output) == "R"
    operands = (Operand((), placement("R")),)
    pattern = elementwise_pattern([()], (8, 8))
    assert str(rule_for(mesh, operands, pattern, (8, 8), 8, goal).output) == "R"


def test_what_fits_no_mesh_is_refused():
    with raises(LayoutError, "Shard(2)", "x=2", (3,)):
        Layout(Mesh("x=2"), "S2").tiling((3,))
