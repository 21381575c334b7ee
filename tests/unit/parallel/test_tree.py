"""Trees of arrays: apart and together again, and their interfaces as messages."""

from __future__ import annotations

import json
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ModuleError, ModuleStateError, ShapeError, TransportError
from mpimesh.parallel.microbatch import LEAF, Structure, flatten, tree_map
from mpimesh.parallel.task import (
    FIRST_PIECE_BYTES,
    Interface,
    Leaf,
    Task,
    check_gradient,
    check_output,
    length_of,
    pieces,
)
from tests.helpers.raises import raises

DTYPES = st.sampled_from(["float64", "float32", "float16", "int8", "bool", "complex64", "M8[s]"])
ARRAYS = st.builds(
    lambda shape, dtype: np.zeros((3, *shape), dtype),
    st.lists(st.integers(0, 3), max_size=3),
    DTYPES,
)
TREES = st.recursive(
    ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@given(TREES)
def test_what_is_taken_apart_is_put_together_again(tree):
    leaves, structure = flatten(tree)
    assert Structure.from_json(json.loads(json.dumps(structure.to_json()))) == structure
    assert structure.num_leaves == len(leaves) == len(structure.paths())
    again = structure.unflatten(leaves)
    assert flatten(again)[1] == structure
    assert all(a is b for a, b in zip(flatten(again)[0], leaves, strict=True))
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        assert eval(f"tree{path}") is leaf
    found = structure.leaves_of(tree)
    assert found is not None
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    assert tree_map(lambda leaf, path: path, tree, name="x") == structure.unflatten(
        ["x" + path for path in structure.paths()]
    )


@given(TREES, TREES)
def test_a_tree_fits_its_own_structure_only(tree, other):
    structure, another = flatten(tree)[1], flatten(other)[1]
    assert (structure.leaves_of(other) is not None) == (structure == another)


def test_the_order_of_a_dict_does_not_matter():
    one, other = {"a": np.ones(2), "b": np.zeros(2)}, {"b": np.zeros(2), "a": np.ones(2)}
    assert flatten(one)[1] == flatten(other)[1]
    leaves, structure = flatten(other)
    assert list(structure.unflatten(leaves)) == ["a", "b"]
    assert leaves[0] is other["a"]


Point = namedtuple("Point", "a b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (3.0, ("y",)),
        ((np.ones(2), None), ("[1]", "NoneType")),
        ({"a": (np.ones(2), [np.ones(2)])}, ("'a'", "[1]")),
        ((), ()),
        ({"a": {}}, ("'a'",)),
        ({1: np.ones(2)}, (1,)),
        (Point(np.ones(2), np.ones(2)), ("y",)),
    ],
)
def test_what_is_no_tree_is_refused(tree, message):
    with raises(ModuleError, *message):
        flatten(tree, name="y")


def test_too_few_leaves_are_refused():
    with raises(ModuleError, "'a'", 2, 1):
        Structure((LEAF, Structure((LEAF,), ("a",)))).unflatten([1])


# -- interfaces ---------------------------------------------------------------------------------


def task_of(rows, count=0, interfaces=None, sizes=()):
    task = Task()
    task.lay_out(
        (rows, count, (), (), None),
        {} if interfaces is None else interfaces,
        stages={},
        replicas=1,
        replica=0,
        most=max(count, 1),
        alike=False,
        sizes=sizes,
    )
    return task


@given(TREES)
def test_an_interface_is_announced(tree):
    _, interface = check_output(tree, stage=0, rows=3, interface=None)
    known, other = task_of(3, interfaces={4: interface}), task_of(3)
    first, *rest = known.announcement(4, 0)
    left, text = length_of(first)
    assert left == sum(piece.size for piece in rest)
    other.hear(4, 0, np.concatenate([text, *rest]))
    assert other.interface(4, 0) == other.interface(4, 5) == interface
    assert other.announced == {4}


def test_a_free_interface_is_of_one_microbatch_and_tells_its_rows():
    _, interface = check_output(PAIR, stage=0, rows=3, interface=None)
    known, other = task_of(10, count=2, sizes=(7, 3)), task_of(10, count=2)
    known.learn(4, 1, interface)
    assert known.interface(4, 0) is None
    with raises(ModuleStateError, 0):
        other.num_rows(0)
    with raises(ModuleStateError, 4):
        known.announcement(4, 0)
    (first,) = known.announcement(4, 1)
    other.hear(4, 1, length_of(first)[1])
    assert other.interface(4, 1) == interface
    assert other.span(1) == slice(7, 10)
    assert other.num_rows(1) == 3
    assert other.announced == known.announced == frozenset()
    other.end()
    assert other.interface(4, 1) is None
    with raises(ModuleStateError, 1):
        other.span(1)


@given(st.integers(0, 3 * FIRST_PIECE_BYTES))
def test_a_text_of_any_length_comes_in_pieces(size):
    text = bytes(i % 251 for i in range(size))
    first, *rest = pieces(text)
    assert first.size <= FIRST_PIECE_BYTES
    assert len(rest) <= 1
    left, beginning = length_of(first)
    assert bytes(np.concatenate([beginning, *rest])) == text
    assert left == sum(piece.size for piece in rest)


@pytest.mark.parametrize("data", [b"", b"mpimesh", b"mpimesh\0", bytes(64), bytes(range(100))])
def test_data_is_no_announcement(data):
    with raises(TransportError, "announcement"):
        length_of(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("dtype", "floating"),
    [("float16", True), ("float64", True), ("complex64", True), ("int64", False), ("bool", False)],
)
def test_what_has_a_gradient(dtype, floating):
    assert Leaf((), np.dtype(dtype)).has_gradient == floating


def test_brain_floats_have_a_gradient():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert Leaf((), np.dtype(ml_dtypes.bfloat16)).has_gradient


PAIR = {"h": np.zeros((3, 2)), "mask": np.zeros((3, 4), bool)}


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            {"h": np.zeros((3, 5)), "mask": PAIR["mask"]},
            (2, "(5,)", "'h'", 3, "(2,)"),
        ),
        (
            {"h": PAIR["h"], "mask": np.zeros((3, 4))},
            ("'mask'", 3),
        ),
        (
            {"h": PAIR["h"], "mask": np.zeros((2, 4), bool)},
            (2, "(2, 4)", "'mask'", 3),
        ),
        (PAIR["h"], ("'h'", "'mask'")),
    ],
)
def test_an_output_that_drifts_names_its_leaf(y, message):
    _, interface = check_output(PAIR, stage=2, rows=3, interface=None)
    with raises(ShapeError, *message):
        check_output(y, stage=2, rows=3, interface=interface)


@pytest.mark.parametrize(
    ("dx", "error", "message"),
    [
        (None, ModuleStateError, (3, 2)),
        ({"h": None, "mask": None}, ModuleStateError, ("'h'",)),
        (PAIR["h"], ShapeError, (2, "'h'")),
        ((PAIR["h"], None), ShapeError, ("NoneType", 2)),
        (
            {"h": np.zeros((3, 1)), "mask": None},
            ShapeError,
            (3, "(3, 1)", "'h'", 2, "(3, 2)"),
        ),
    ],
)
def test_a_gradient_that_does_not_fit_names_its_leaf(dx, error, message):
    _, interface = check_output(PAIR, stage=2, rows=3, interface=None)
    with raises(error, *message):
        check_gradient(dx, stage=3, source=2, rows=3, interface=interface)


def test_a_gradient_where_there_is_none_is_dropped():
    _, interface = check_output(PAIR, stage=2, rows=3, interface=None)
    dx = {"mask": np.ones((3, 4)), "h": np.ones((3, 2))}
    got = check_gradient(dx, stage=3, source=2, rows=3, interface=interface)
    assert len(got) == 1
    tree = interface.gradient_tree(got)
    assert tree["mask"] is None
    assert tree["h"] is dx["h"]


def test_a_stage_that_gives_only_integers_cannot_be_trained():
    _, interface = check_output(np.zeros((3, 2), int), stage=2, rows=3, interface=None)
    assert isinstance(interface, Interface)
    with raises(ModuleStateError, 3):
        check_gradient(np.zeros((3, 2)), stage=3, source=2, rows=3, interface=interface)
