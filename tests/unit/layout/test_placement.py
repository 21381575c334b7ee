"""Placements and their texts."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import LayoutError, UnknownNameError
from mpimesh.layout import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from tests.helpers.raises import raises

sizes = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4)
specs = (
    st.just(Replicate())
    | st.builds(Partial, st.sampled_from(PARTIAL_OPS))
    | st.builds(lambda axis, sizes: Shard(axis, sizes=sizes), st.integers(0, 12), sizes)
)
spec_lists = st.lists(specs, max_size=4)
NAMES = ["dp", "tp", "pp", "ep"]


# -- one spec -----------------------------------------------------------------------------


def test_specs_are_values():
    assert Shard(1) == Shard(np.int64(1)) != Shard(0)
    assert Shard(0, sizes=cast(Any, np.array([1, 2]))) == Shard(0, sizes=range(1, 3))
    assert Shard(0, sizes=[1, 2]) == Shard(0, sizes=(1, np.int8(2))) != Shard(0)
    assert Partial() == Partial("sum") != Partial("max")
    assert Partial("avg") == Partial("average") == Partial("mean")
    assert Partial("product") == Partial("prod")
    assert Replicate() == Replicate()
    assert len({Shard(0), Shard(0, sizes=(4,)), Replicate(), Partial(), Partial("min")}) == 5
    for spec in (Shard(2, sizes=(1, 0)), Replicate(), Partial("max")):
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert eval(repr(spec)) == spec
    with raises(AttributeError, "axis"):
        Shard(1).axis = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: Shard(-1), ("Shard", "axis", -1)),
        (lambda: Shard(True), ("Shard", "axis", True)),
        (lambda: Shard(cast(Any, 1.0)), ("Shard", "axis", 1.0)),
        (lambda: Shard(cast(Any, "0")), ("Shard", "axis", "'0'")),
        (lambda: Shard(cast(Any, None)), ("Shard", "axis", None)),
        (lambda: Shard(0, sizes=()), ("Shard", "sizes", ())),
        (lambda: Shard(0, sizes=cast(Any, 3)), ("Shard", "sizes", 3)),
        (lambda: Shard(0, sizes=cast(Any, {1, 2})), ("Shard", "sizes", {1, 2})),
        (lambda: Shard(0, sizes=cast(Any, {1: 2})), ("Shard", "sizes", {1: 2})),
        (lambda: Shard(0, sizes=cast(Any, {1: 2}.keys())), ("Shard", "sizes", "dict_keys([1])")),
        (lambda: Shard(0, sizes=cast(Any, iter([1]))), ("Shard", "sizes", "list_iterator")),
        (lambda: Shard(0, sizes=cast(Any, "12")), ("Shard", "sizes", "'12'")),
        (lambda: Shard(0, sizes=cast(Any, np.array(3))), ("Shard", "sizes", "array(3)")),
        (lambda: Shard(0, sizes=[1, -2]), ("Shard", "size", -2)),
        (lambda: Shard(0, sizes=cast(Any, [1, 2.5])), ("Shard", "size", 2.5)),
        (
            lambda: Partial(cast(Any, "median")),
            ("Partial", "sum, mean, prod, min, max", "'median'"),
        ),
        (lambda: Partial(cast(Any, None)), ("Partial", None)),
    ],
)
def test_specs_that_are_refused(make: Any, values: tuple[Any, ...]):
    with raises(LayoutError, *values):
        make()


# -- texts --------------------------------------------------------------------------------


@given(spec_lists, st.sampled_from([", ", ",", " ", "  ,  ", ""]), st.booleans())
def test_a_text_comes_back(row, between, short):
    placement = Placement(row)
    assert Placement.from_text(str(placement)) == placement
    assert eval(repr(placement)) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    if between or not short:  # "S1" and "2" run together would be another axis
        text = between.join(spec.short if short else str(spec) for spec in row)
        assert Placement.from_text(f" {text} ") == placement
    assert Placement([str(spec) for spec in row]) == placement
    assert Placement([f" {spec.short}" for spec in row]) == placement


@given(spec_lists)
def test_a_text_with_names_comes_back(row):
    names = NAMES[: len(row)]
    placement = Placement(row)
    text = placement.named(names)
    assert Placement.of(text, names) == placement
    assert Placement.of(text.replace(" ", ""), names) == placement
    assert Placement.of(dict(zip(names, row, strict=True)), names) == placement
    some = {name: spec for name, spec in zip(names, row, strict=True) if spec != Replicate()}
    assert Placement.of(some, names) == placement


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("S[0], R", [Shard(0), Replicate()]),
        ("S[0],R", [Shard(0), Replicate()]),
        ("S[0] R", [Shard(0), Replicate()]),
        ("S0R", [Shard(0), Replicate()]),
        ("RR", [Replicate()] * 2),
        ("S[0]S[1]", [Shard(0), Shard(1)]),
        ("", []),
        ("  ", []),
        ("S[10]", [Shard(10)]),
        ("P P(sum) P(max)", [Partial(), Partial(), Partial("max")]),
        ("P(avg), P(average), P(mean)", [Partial("mean")] * 3),
        ("S[0](3,0,1), R", [Shard(0, sizes=(3, 0, 1)), Replicate()]),
    ],
)
def test_texts_that_are_read(text, specs):
    assert Placement.from_text(text) == Placement(specs)


@pytest.mark.parametrize(
    "text",
    [
        *(",", ",R", ",,R", "R,,R", "R,", "R, ,R", ", R", "R;R", "R/R", "R\n", "R\tR", "R,\nR"),
        *("S", "S[", "S[]", "S[1", "S1]", "S[1]]", "S[[1]]", "S[ 1]", "S[1 ]", "S [1]", "S(0)"),
        *("S[-1]", "S-1", "S[+1]", "S[a]", "S[1.5]", "S[01]", "S01", "S[1_0]", "S[٣]", "S٣"),
        *("S[0](", "S[0]()", "S0(1", "S0(1,)", "S0(,1)", "S0(1, 2)", "S0(-1)", "S0 (1)", "S0(1))"),
        *("P(", "P()", "P(median)", "P(max", "P (max)", "P[max]", "P(MAX)", "R(1)", "R[0]", "R0"),
        *("s[0]", "r", "p", "X", "replicate", "Shard(0)", "None", "0", "-", "RxR"),
        "S[99999999999999999999]",
    ],
)
def test_texts_that_are_refused(text):
    with raises(LayoutError, repr(text)):
        Placement.from_text(text)
    with raises(LayoutError, "placement", "R, S[axis] or P"):
        Placement.of(f"dp={text}", ["dp"])
    with raises(LayoutError, repr(text)):
        Placement([text])


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("dp=S0,", "''"),
        ("dp=S0,,tp=R", "''"),
        ("=R", "'=R'"),
        ("dp=", "''"),
        ("dp=S0 tp=R", "'S0 tp=R'"),
        ("dp=S0; tp=R", "'S0; tp=R'"),
        ("dp=S0, R", "' R'"),
        ("dp==R", "'=R'"),
        ("d p=R", "'d p=R'"),
        ("dp=R, dp=R", "'dp' twice"),
        ("dp=RR", "'RR'"),
    ],
)
def test_texts_with_names_that_are_refused(text, culprit):
    with raises(LayoutError, "placement", culprit):
        Placement.of(text, ["dp", "tp"])


@pytest.mark.parametrize("name", ["pp", "DP", "unsharded"])
def test_a_name_that_is_no_dim(name):
    for placements in (f"{name}=R", {name: "R"}):
        with raises(UnknownNameError, name, "dp, tp"):
            Placement.of(placements, ["dp", "tp"])
    with raises(UnknownNameError, name, "none"):
        Placement.of({name: "R"}, [])


@pytest.mark.parametrize(
    ("placements", "specs"),
    [("R", 1), ("R, R, R", 3), ([Replicate()], 1), ("", 0), ([], 0), (["S0"] * 3, 3)],
)
def test_one_spec_for_each_dim(placements, specs):
    with raises(LayoutError, specs, 2, "dp, tp"):
        Placement.of(placements, ["dp", "tp"])


@pytest.mark.parametrize("wrong", [3, None, 2.5, Shard(0)])
def test_what_is_no_placement(wrong):
    with raises(LayoutError, "placements", repr(wrong)):
        Placement.of(wrong, ["dp"])
    spec: Any = (wrong,) if isinstance(wrong, Shard) else wrong
    with raises(LayoutError, "dim", repr(spec)):
        Placement([spec])
    with raises(LayoutError, "text", repr(wrong)):
        Placement.from_text(wrong)


def test_a_text_is_not_taken_for_specs():
    with raises(LayoutError, "Placement.from_text('RR')"):
        Placement("RR")


def test_a_placement_is_a_sequence():
    placement = Placement(["S0", "R", Partial()])
    assert list(placement) == [Shard(0), Replicate(), Partial()]
    assert (placement[0], placement[-1], len(placement)) == (Shard(0), Partial(), 3)
    assert placement[1:] == (Replicate(), Partial())
    assert str(placement) == "S[0], R, P"
    assert hash(placement) == hash(Placement.from_text("S[0] R P"))
    assert Placement.of(placement, ["a", "b", "c"]) is placement
