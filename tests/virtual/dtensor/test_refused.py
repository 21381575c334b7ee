"""Functions of NumPy without a rule for split arrays: refused with a reason, or done on copies."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor.dispatch import FUNCTIONS, REFUSED, name_of
from mpimesh.errors import DTypeError, LayoutError, NoRuleError
from tests.helpers.depth import is_deep
from tests.helpers.dtensor_check import on
from tests.helpers.raises import raises
from tests.helpers.rule_cases import draw_cases
from tests.helpers.rule_fuzz import Case, problems


def test_every_function_of_numpy_has_a_rule_or_a_reason():
    """NumPy of another version may lack some, or have more: those are refused with the advice."""
    known = {}
    for module in (np, np.linalg, np.fft):
        for name in dir(module):
            function: Any = None if name.startswith("_") else getattr(module, name, None)
            if hasattr(function, "_implementation"):  # how NumPy marks those that others may do
                known[name_of(function)] = function
    assert len(known) > 200
    both = [name for name, function in known.items() if function in FUNCTIONS and name in REFUSED]
    assert both == []
    version = np.lib.NumpyVersion(np.__version__)
    if version >= "2.4.0" and version < "2.5.0":  # the lists are those of this one
        neither = {n for n, function in known.items() if function not in FUNCTIONS} - {*REFUSED}
        assert neither == set()
        assert {*REFUSED} - {*known} == set()


def test_what_is_refused_says_what_to_do():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x: Any = mm.zeros((4, 4), mesh, "S0")
            for call, advice in [
                (lambda: np.save("x.npy", x), "root=0"),
                (lambda: np.apply_along_axis(np.sum, 0, x), "local_map"),
                (lambda: np.polyadd(x[:, 0], [1]), "allow_gather"),
                (lambda: np.place(x, x > 0, [1]), r"x\[mask\] = value"),
            ]:
                with pytest.raises(NoRuleError, match=advice):
                    call()
            with mm.allow_gather():
                np.place(x, x == 0, [1, 2])
            assert x.full().tolist() == [[1, 2, 1, 2]] * 4

    mm.run_virtual(2, main)


def test_masked_arrays_are_refused_wherever_they_come_in():
    masked = np.ma.masked_greater(np.arange(4.0), 2)

    def write(x):
        x[...] = masked

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x: Any = mm.zeros(4, mesh, "R")
            for call in (
                lambda: mm.distribute(masked, mesh, "S0"),
                lambda: mm.DTensor.from_local(masked, mesh, "S0"),
                lambda: mm.DTensor.from_local(masked, mesh, "S0", shape=(8,)),
                lambda: mm.from_callback((4,), mesh, "S0", lambda index: masked[index]),
                lambda: mm.full(4, masked, mesh, "R"),
                lambda: mm.dtensor.DVariable(masked, layout="S0", mesh=mesh),
                lambda: x + masked,
                lambda: np.add(masked, x),
                lambda: np.concatenate([x, masked]),
                lambda: write(x),
            ):
                with pytest.raises(DTypeError, match=r"masked array.*x\.filled"):
                    call()

    mm.run_virtual(2, main)


def test_functions_without_a_rule_work_on_copies():
    """Every rank has all of them, so nothing is gathered."""
    a, b = np.diag([2.0, 4.0]), np.array([1.0, 2.0])

    def main(mesh):
        x, y = mm.distribute(a, mesh, "R"), mm.distribute(b, mesh, "R")
        before = mesh.traffic().snapshot()
        found: Any = np.linalg.solve(x, y)
        assert found.layout.is_replicated
        assert found.local.tolist() == [0.5, 0.5]
        assert (mesh.traffic() - before).received_bytes == 0
        with pytest.raises(NoRuleError, match="solve"):
            np.linalg.solve(x.redistribute("S0"), y)

    on("a=2", main)


@pytest.mark.parametrize("how", ["R", "allow_gather"])
def test_what_is_whole_or_gathered_takes_every_option(how):
    """On arrays that every rank has whole, and on all where gathering is allowed."""
    cases = []
    for case in draw_cases(11, 4_000 if is_deep() else 120):
        if how == "R":
            place = ", ".join("R" * len(case.dims.split(",")))
            case = replace(case, operands=tuple(replace(x, placement=place) for x in case.operands))
        else:
            case = replace(case, text=f"gathering(lambda: {case.text})")
        cases.append(case)
    refused: list[str] = []

    def note(case: Case, why: str) -> None:
        # Results are cast into `out` by the rule "same_kind", where some functions of NumPy cast
        # more; and nothing is written into summands, gathered or not.
        casts = "out=" in case.text and "cannot be written into" in why and "casting=" in why
        summands = "P" in case.operands[0].placement and "sum it up first" in why
        if not casts and not summands:
            refused.append(f"{case}  # {why}")

    assert problems(cases, note) == []
    assert refused == []


SPECIAL: list[Any] = [
    lambda x: np.maximum.reduceat(x, [0, 2], axis=0),
    lambda x: np.unique(x, axis=0),
    lambda x: np.diff(x, axis=0, prepend=0.0, append=[[1.0, 2.0, 3.0]]),
    lambda x: np.histogram(x, bins="auto")[0],
    lambda x: np.pad(x, 1, "mean"),
    lambda x: np.searchsorted(x[0], [1.0, 5.0], sorter=[2, 0, 1]),
    lambda x: np.einsum(x, [0, 1], x, [2, 1], [2, 0]),
    lambda x: np.linspace(x, 9.0, 3, retstep=True)[1],
    lambda x: x[True],
    lambda x: np.apply_along_axis(np.sort, 0, x),
    lambda x: np.polyfit(np.arange(4.0), x, 1),
    lambda x: written(x, lambda y: np.add.at(y, ([0, 0], [1, 1]), 5.0)),
    lambda x: written(x, lambda y: np.place(y, y > 3, [-1.0, -2.0])),
    lambda x: written(x, lambda y: np.place(arr=y, vals=[-1.0, -2.0], mask=y > 3)),
    lambda x: written(x, lambda y: y.__setitem__(True, 7.0)),
    lambda x: np.maximum.reduceat(x, [0, 2], out=np.zeros_like(x[:2])),
]


def written(x: Any, write: Any) -> Any:
    y = x.copy()
    write(y)
    return y


def test_functions_and_options_without_a_rule_work_where_gathering_is_allowed():
    values = np.random.default_rng(0).integers(0, 9, (4, 3)).astype(float)

    def main(mesh):
        for place in ("R", "S0", "S1"):
            for number, call in enumerate(SPECIAL):
                x = mm.distribute(values, mesh, place)
                cure = ""
                try:
                    call(x)
                except NoRuleError as refusal:
                    cure = str(refusal)
                words = ("allow_gather", "local_map", "mask")
                assert not cure or (place != "R" and any(word in cure for word in words))
                x = mm.distribute(values, mesh, place)
                with mm.allow_gather() if place != "R" else contextlib.nullcontext():
                    found = call(x)
                np.testing.assert_allclose(found.full(), call(values), err_msg=f"{number} {place}")

    on("a=2", main)


def test_what_asks_for_an_array_names_calls_that_take_split_ones():
    a, plain = np.arange(12.0).reshape(4, 3), np.arange(10.0)

    def main(mesh):
        x, k = mm.distribute(a, mesh, "S0"), mm.distribute(np.array([3, 0, 2, 2]), mesh, "S0")
        generator = np.random.default_rng(0)
        calls: Any = {
            "np.concatenate": (lambda: np.r_[x, x], lambda: np.concatenate([x, x]), np.r_[a, a]),
            "np.stack": (lambda: np.c_[k, k], lambda: np.stack([k, k], axis=1), None),
            "mm.distribute(a, mesh, 'R')[x]": (
                lambda: plain[k],
                lambda: mm.distribute(plain, mesh, "R")[k],
                plain[[3, 0, 2, 2]],
            ),
            "x[mm.Random(0).permutation(len(x))]": (
                lambda: generator.permutation(x),
                lambda: x[mm.Random(0).permutation(len(x))],
                a[mm.Random(0).permutation(len(a))],
            ),
            "mm.local_map": (lambda: np.asarray(x), None, None),
        }
        for words, (refused, cure, expected) in calls.items():
            with raises(LayoutError, words):
                refused()
            if cure is not None and expected is not None:
                assert np.array_equal(cure().full(), expected)
        with raises(LayoutError, "mm.distribute", "from_local"):
            mm.DTensor(a)  # type: ignore[arg-type]

    for size in (1, 3):
        on(f"a={size}", main)


def test_names_of_other_libraries_say_what_stands_for_them():
    draws = {"standard_normal": "normal()", "random": "uniform()", "randint": "integers()"}
    for name, words in (draws | {"choice": "x[order[:k]]", "shuffle": "permutation(n)"}).items():
        with raises(AttributeError, f"'Random' object has no attribute '{name}'", words):
            getattr(mm.Random(0), name)

    names = {
        "init_device_mesh": "DeviceMesh",
        "distribute_tensor": "distribute",
        "barrier": "mesh.",
    }
    for name, words in names.items():
        with raises(AttributeError, f"'mpimesh' has no attribute '{name}'", words):
            getattr(mm, name)

    def main(mesh):
        with raises(AttributeError, "mesh.coord(dim)"):
            mesh.get_local_rank("a")
        x = mm.ones((4,), mesh, "S0")
        for name, words in {
            "numpy": "full()",
            "compute": "full()",
            "rechunk": "redistribute",
        }.items():
            with raises(AttributeError, f"'DTensor' object has no attribute '{name}'", words):
                getattr(x, name)
            assert not hasattr(x, name)
            assert name not in dir(x)

    on("a=2", main)
