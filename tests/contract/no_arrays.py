"""A result to come is no array: who uses it as one is told to resolve it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.errors import UnresolvedError
from tests.contract.cases import same
from tests.contract.meshes import mesh_of
from tests.helpers.raises import raises


def check_a_handle_is_no_array_and_says_what_to_write(comm):
    """Operators and NumPy's functions refuse it, whatever stands on the other side."""
    x: Any = np.ones((3, 3))
    uses: dict[str, list[Callable[[Any], object]]] = {
        "handle.resolve() + x": [lambda h: h + 1, lambda h: h + x, lambda h: operator.iadd(h, 1)],
        "x - handle.resolve()": [lambda h: 1.5 - h],
        "handle.resolve() @ x": [lambda h: h @ h],
        "-handle.resolve()": [lambda h: -h],
        "handle.resolve() < x": [lambda h: h < 1],
        "handle.resolve() == x": [lambda h: h == 1, lambda h: h != x],
        "handle.resolve()[i]": [lambda h: h[0]],
        "iter(handle.resolve())": [list],
        "float(handle.resolve())": [float],
        "bool(handle.resolve())": [bool, operator.not_],
        "len(handle.resolve())": [len],
        "format(handle.resolve(), ...)": [lambda h: f"{h:.3f}"],
        "numpy.add(handle.resolve(), ...)": [
            lambda h: x + h,
            lambda h: np.add(h, 1),
            lambda h: np.add(1, 1, out=h),
            lambda h: operator.iadd(x, h),
        ],
        "numpy.sum(handle.resolve(), ...)": [np.sum],
        "numpy.concatenate(handle.resolve(), ...)": [lambda h: np.concatenate([x, h])],
        "numpy.asarray(handle.resolve())": [
            np.asarray,
            np.array,
            lambda h: operator.setitem(x, 0, h),
            lambda h: mesh.group().all_reduce(h),
        ],
    }
    with mesh_of(comm) as mesh:
        group = mesh.group()
        handle, other = group.all_reduce(x + group.rank), group.all_reduce(x.copy())
        call = f"all_reduce(shape (3, 3), float64, sum) on group 'world' at {__file__}:"
        for cure in ("first", "returned"):  # under way, and resolved
            for example, ways in uses.items():
                for use in ways:
                    with raises(UnresolvedError, call, example, cure):
                        use(handle)
            with raises(AttributeError, "shape", "handle.resolve().shape"):
                handle.shape  # noqa: B018
            assert f"{handle}" == str(handle)
            assert handle == handle
            assert handle != other
            assert handle in {handle, other}
            assert not hasattr(handle, "dtype")
            same(handle.resolve(), np.full((3, 3), mesh.size * (mesh.size + 1) / 2))
        other.resolve()
    assert x.min() == x.max() == 1
