"""Placements and their texts."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import LayoutError, UnknownNameError
from mpimesh.layout import PARTIAL_OPS, Partial, Placement, PlacementSpec, Replicate, Shard

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
    with pytest.raises(AttributeError, match="cannot assign"):
        Shard(1).axis = 3  # type: ignore[misc]


def test_tvm_words_for_specs():
    assert PlacementSpec.sharding(1) == Shard(1)
    assert PlacementSpec.replica() == Replicate()
    with pytest.raises(TypeError, match="abstract"):
        PlacementSpec()  # type: ignore[abstract]
    with pytest.raises(LayoutError, match="must not be negative, got -1"):
        PlacementSpec.sharding(-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(-1), "the axis of a Shard must not be negative, got -1"),
        (lambda: Shard(True), "the axis of a Shard must be a whole number, got True"),
        (lambda: Shard(cast(Any, 1.0)), "must be a whole number, got 1.0"),
        (lambda: Shard(cast(Any, "0")), "must be a whole number, got '0'"),
        (lambda: Shard(cast(Any, None)), "must be a whole number, got None"),
        (lambda: Shard(0, sizes=()), r"must be a row of whole numbers, .* got \(\)"),
        (lambda: Shard(0, sizes=cast(Any, 3)), "must be a row of whole numbers, .* got 3"),
        (lambda: Shard(0, sizes=cast(Any, {1, 2})), r"rank in order, got \{1, 2\}"),
        (lambda: Shard(0, sizes=cast(Any, {1: 2})), r"rank in order, got \{1: 2\}"),
        (lambda: Shard(0, sizes=cast(Any, {1: 2}.keys())), "rank in order, got dict_keys"),
        (lambda: Shard(0, sizes=cast(Any, iter([1]))), "rank in order, got <list_iterator"),
        (lambda: Shard(0, sizes=cast(Any, "12")), "rank in order, got '12'"),
        (lambda: Shard(0, sizes=cast(Any, np.array(3))), "rank in order, got array"),
        (lambda: Shard(0, sizes=[1, -2]), "a size of a Shard must not be negative, got -2"),
        (
            lambda: Shard(0, sizes=cast(Any, [1, 2.5])),
            "a size of a Shard must be a whole number, got 2.5",
        ),
        (lambda: Partial("median"), "Partial knows sum, mean, prod, min, max, got 'median'"),
        (lambda: Partial(cast(Any, None)), "got None"),
    ],
)
def test_specs_that_are_refused(make: Any, message: str):
    with pytest.raises(LayoutError, match=message):
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
    with pytest.raises(LayoutError, match="write R, S"):
        Placement.from_text(text)
    with pytest.raises(LayoutError, match="write R, S"):
        Placement.of(f"dp={text}", ["dp"])
    with pytest.raises(LayoutError, match="write R, S"):
        Placement([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=S0,", "cannot be read at ''"),
        ("dp=S0,,tp=R", "cannot be read at ''"),
        ("=R", "cannot be read at '=R'"),
        ("dp=", "cannot be ''"),
        ("dp=S0 tp=R", "cannot be 'S0 tp=R'"),
        ("dp=S0; tp=R", "cannot be 'S0; tp=R'"),
        ("dp=S0, R", "cannot be read at ' R'"),
        ("dp==R", "cannot be '=R'"),
        ("d p=R", "cannot be read at 'd p=R'"),
        ("dp=R, dp=R", "names dim 'dp' twice"),
        ("dp=RR", "cannot be 'RR'"),
    ],
)
def test_texts_with_names_that_are_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        Placement.of(text, ["dp", "tp"])


@pytest.mark.parametrize("name", ["pp", "DP", "unsharded"])
def test_a_name_that_is_no_dim(name):
    for placements in (f"{name}=R", {name: "R"}):
        with pytest.raises(UnknownNameError, match=f"names dim '{name}', but the mesh has dp, tp"):
            Placement.of(placements, ["dp", "tp"])
    with pytest.raises(UnknownNameError, match="but the mesh has none"):
        Placement.of({name: "R"}, [])


@pytest.mark.parametrize("placements", ["R", "R, R, R", [Replicate()], "", [], ["S0"] * 3])
def test_one_spec_for_each_dim(placements):
    with pytest.raises(LayoutError, match=r"specs?, but the mesh has 2 dims \(dp, tp\)"):
        Placement.of(placements, ["dp", "tp"])


@pytest.mark.parametrize("wrong", [3, None, 2.5, Shard(0)])
def test_what_is_no_placement(wrong):
    with pytest.raises(LayoutError, match="placements cannot be"):
        Placement.of(wrong, ["dp"])
    with pytest.raises(LayoutError, match="a mesh dim's placement cannot be"):
        Placement([wrong] if not isinstance(wrong, Shard) else [(wrong,)])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match="text must be a str"):
        Placement.from_text(wrong)


def test_a_text_is_not_taken_for_specs():
    with pytest.raises(LayoutError, match=r"Placement\.from_text\('RR'\)"):
        Placement("RR")


def test_a_placement_is_a_sequence():
    placement = Placement(["S0", "R", Partial()])
    assert list(placement) == [Shard(0), Replicate(), Partial()]
    assert (placement[0], placement[-1], len(placement)) == (Shard(0), Partial(), 3)
    assert placement[1:] == (Replicate(), Partial())
    assert str(placement) == "S[0], R, P"
    assert hash(placement) == hash(Placement.from_text("S[0] R P"))
    assert Placement.of(placement, ["a", "b", "c"]) is placement
