"""What is a view and what a copy: one rule, whatever the layout and the number of ranks."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import LayoutError
from tests.helpers import warned
from tests.helpers.depth import is_deep
from tests.helpers.dtensor_check import split
from tests.helpers.ranks import on
from tests.helpers.rule_cases import draw_cases
from tests.helpers.rule_fuzz import evaluated, values

VIEWS: dict[str, Any] = {
    "np.transpose(x)": np.transpose,
    "x.T": lambda x: x.T,
    "x.mT": lambda x: x.mT,
    "np.swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "np.moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "np.rollaxis": lambda x: np.rollaxis(x, 1),
    "np.matrix_transpose": np.matrix_transpose,
    "np.linalg.matrix_transpose": np.linalg.matrix_transpose,
    "np.expand_dims": lambda x: np.expand_dims(x, 1),
    "np.atleast_1d": np.atleast_1d,
    "np.atleast_3d": np.atleast_3d,
    "x.real": lambda x: x.real,
    "np.real": np.real,
    "astype(copy=False)": lambda x: x.astype(x.dtype, copy=False),
    "np.expand_dims(x.T)": lambda x: np.expand_dims(x.T, 0).real,
}
"""Views of a real array, as NumPy's."""

COPIES: dict[str, Any] = {
    "reshape": lambda x: x.reshape(-1, 2),
    "reshape in order F": lambda x: x.reshape(-1, 2, order="F"),
    "reshape as it is": lambda x: x.reshape(x.shape),
    "np.ravel": np.ravel,
    "flatten": lambda x: x.flatten(),
    "squeeze": lambda x: x.squeeze(),
    "squeeze of nothing": lambda x: np.squeeze(x, ()),
    "x[...]": lambda x: x[...],
    "x[:2]": lambda x: x[:2],
    "x[0]": lambda x: x[0],
    "x[:, None]": lambda x: x[:, None],
    "np.split": lambda x: np.split(x, [1])[0],
    "np.array_split": lambda x: np.array_split(x, 2, 1)[1],
    "np.unstack": lambda x: np.unstack(x)[0],
    "np.diagonal": np.diagonal,
    "np.flip": np.flip,
    "np.rot90": lambda x: np.rot90(x, 0),
    "np.roll": lambda x: np.roll(x, 0),
    "np.diff": lambda x: np.diff(x, 0),
    "np.einsum": lambda x: np.einsum("ij->ji", x),
    "np.einsum of a diagonal": lambda x: np.einsum("ii->i", x[:2, :2]),
    "np.ix_": lambda x: np.ix_(x[0])[0],
    "np.real_if_close": np.real_if_close,
    "np.apply_over_axes": lambda x: np.apply_over_axes(np.sum, x, ()),
    "np.copy": np.copy,
    "x.copy": lambda x: x.copy(),
    "+x": lambda x: +x,
    "np.concatenate": lambda x: np.concatenate([x]),
    "np.pad": lambda x: np.pad(x, 0),
    "np.tile": lambda x: np.tile(x, 1),
    "np.sort": np.sort,
    "np.real of another dtype": lambda x: x.astype("c16").real,
}
COPIES_HERE: dict[str, Any] = {
    "redistribute": lambda x: x.redistribute(x.placement),
    "start_redistribute": lambda x: x.start_redistribute(x.placement).resolve(),
    "redistribute to R": lambda x: x.redistribute([mm.Replicate()] * x.mesh.ndim),
    "redistribute to S1": lambda x: x.redistribute(["S1"] * x.mesh.ndim),
    "distribute": lambda x: mm.distribute(x.full(), x.mesh, x.placement),
    "asarray(placements=)": lambda x: x.__array_namespace__().asarray(x, placements=x.placement),
    "local_map": lambda x: mm.local_map(lambda one: one, x.placement, out_shapes=x.shape)(x),
    "local_map of what is brought": lambda x: mm.local_map(
        lambda block: block,
        ", ".join("R" * x.mesh.ndim),
        in_placements=", ".join("R" * x.mesh.ndim),
        out_shapes=x.shape,
    )(x),
}
READ_ONLY: dict[str, Any] = {
    "np.broadcast_to": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "np.broadcast_to as it is": lambda x: np.broadcast_to(x, x.shape),
    "np.broadcast_arrays": lambda x: np.broadcast_arrays(x, np.zeros((3, 1, 1)))[0],
    "np.meshgrid": lambda x: np.meshgrid(x[0], x[:, 0], copy=False)[0],
    "x.imag": lambda x: x.imag,
}
LAYOUTS = {
    "a=1": ["S0", "R", "P"],
    "a=2": ["S0", "S1", "R", "P", "S0(1,3)", "S0(0,4)"],
    "a=3": ["S0", "S1", "P"],
    "a=2,b=2": ["S0, S0", "S0, S1", "P, S0"],
}
SHAPES = [(4, 4), (4, 1)]
NAMES = [*VIEWS, *COPIES, *COPIES_HERE, *READ_ONLY]


def _reaches(x, make):
    """Return whether a write reaches `x`: by an operator, by a key, and from `x` the other way."""
    whole = x.full()
    y = make(x)
    y += 1
    by_operator = not np.array_equal(x.full(), whole)
    after = x.full()
    y[...] = 5
    by_key = not np.array_equal(x.full(), after)
    back = y.full()
    x += 3
    return by_operator, by_key, not np.array_equal(y.full(), back)


@pytest.mark.parametrize("dims", LAYOUTS)
def test_whether_a_write_reaches_the_array_depends_on_the_function_alone(dims):
    def main(mesh):
        wrong: list[Any] = []
        for shape in SHAPES:
            a = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
            for placement in LAYOUTS[dims]:
                for names, expected in ((VIEWS, True), (COPIES | COPIES_HERE, False)):
                    for name, make in names.items():
                        if name not in COPIES_HERE:
                            try:
                                make(a)
                            except (ValueError, IndexError):
                                continue
                        found = _reaches(split(a, mesh, placement), make)
                        if found != (expected,) * 3:
                            wrong.append((name, placement, shape, found))
                for name, make in READ_ONLY.items():
                    x = split(a, mesh, placement)
                    y = make(x)
                    for write in (lambda y: y.fill(1), lambda y: y.__iadd__(1)):
                        try:
                            write(y)
                            wrong.append((name, placement, "is written"))
                        except ValueError:
                            pass
                    before = y.full()
                    x += 3
                    if not np.array_equal(y.full(), before):
                        wrong.append((name, placement, "changes with x"))
        return wrong

    found = on(dims, main)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("dims", LAYOUTS)
def test_a_write_through_a_view_is_as_in_numpy(dims):
    """Also where operands and result overlap, and where operands have to move first."""

    def by(x):
        return x * x  # as x is split

    writes: dict[str, Any] = {
        "+= 1": lambda x, y: np.add(y, 1, out=y),
        "*= itself": lambda x, y: np.multiply(y, y, out=y),
        "+= turned": lambda x, y: np.add(y, by(x), out=y) if x.shape == y.shape else None,
        "of x into its view": lambda x, y: np.copyto(y, x) if x.shape == y.shape else None,
        "[0] = ": lambda x, y: y.__setitem__(0, 7),
        "[...] = of itself": lambda x, y: y.__setitem__(..., y[::-1]),
        "by a mask": lambda x, y: y.__setitem__(y > 4, 0),
        "np.put": lambda x, y: np.put(y, [0, 3], 9),
        "sort": lambda x, y: y.sort(-1),
        "fill": lambda x, y: y.fill(2),
    }

    def main(mesh):
        wrong: list[Any] = []
        rng = np.random.default_rng(0)
        for placement in (one for one in LAYOUTS[dims] if "P" not in one):
            for name, view in VIEWS.items():
                for how, write in writes.items():
                    a = rng.integers(0, 9, (4, 4)).astype(float)
                    x = split(a, mesh, placement)
                    write(x, view(x))
                    write(a, view(a))
                    if not np.array_equal(x.full(), a):
                        wrong.append((name, how, placement))
        return wrong

    found = on(dims, main)
    assert found == [[]] * len(found)


def test_parts_of_complex_numbers_are_views():
    def main(mesh):
        for placement in ("S0", "R", "P"):
            a = np.array([1 + 2j, 3 - 4j, 5j])
            x = split(a, mesh, placement)
            for part in (x.real, np.real(x)):
                part += 1
            for part in (x.imag, np.imag(x)):
                part[0] = 7
            np.testing.assert_array_equal(x.full(), [3 + 7j, 5 - 4j, 2 + 5j])
        # Of a product that is waited for there is no such view.
        x = mm.DTensor.from_local(np.full(2, 1j), mesh, [mm.Partial("prod")], shape=(2,))
        with pytest.raises(ValueError, match="read-only"):
            x.real[0] = 1
        return True

    for size in (1, 2, 3):
        assert all(on(f"a={size}", main))


def test_a_reshape_cannot_be_asked_to_be_a_view():
    def main(mesh):
        for placement in ("S0", "R"):
            x = mm.zeros((4, 3), mesh, placement)
            for shape in ((3, 4), (4, 3)):
                with pytest.raises(LayoutError, match="copy=False"):
                    np.reshape(x, shape, copy=False)
        return True

    for size in (1, 2):
        assert all(on(f"a={size}", main))


@pytest.mark.timeout(300)
def test_no_other_function_gives_what_an_argument_has():
    """Random calls of every rule: a result that shares memory with an operand is a known view."""
    views = {"transpose", "swapaxes", "moveaxis", "rollaxis", "T", "mT", "real", "imag"}
    views |= {"expand_dims", "atleast_1d", "atleast_2d", "atleast_3d", "conj", "conjugate"}
    views |= {"matrix_transpose", "astype"}
    cases = [
        case
        for case in draw_cases(7, 1_000 if is_deep() else 250)
        if case.rule not in ("operator", "operator.setitem")
        and not any(word in case.text for word in ("out=", "then(", "set("))
        and not views & {*case.text.replace("(", ".").replace(")", ".").split(".")}
    ]
    shared = []

    def run(case):
        def main(mesh):
            arrays = [split(values(one), mesh, one.placement) for one in case.operands]
            try:
                found = evaluated(case, arrays)
            except Exception:
                return
            pairs = product(_leaves(found), arrays)
            if any(np.shares_memory(one.local, other.local) for one, other in pairs):
                shared.append(str(case))

        on(case.dims, main)

    with warned.ignored:
        for case in cases:
            run(case)
    assert not shared, shared[:10]


def _leaves(tree):
    if isinstance(tree, mm.DTensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _leaves(one)
