"""The Python array API standard: all its names are there, or are said to be missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor import array_api as xp
from mpimesh.dtensor.dispatch import FUNCTIONS
from mpimesh.errors import LayoutError, UnknownNameError
from tests.helpers.dtensor_check import numbers, same, split

# https://data-apis.org/array-api/2023.12
NAMES = """
e inf nan newaxis pi
arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like tril
triu zeros zeros_like
bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128
astype can_cast finfo iinfo isdtype result_type
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert
bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1
floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p
log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative not_equal positive pow real remainder round sign signbit sin sinh square sqrt subtract tan
tanh trunc
take __array_namespace_info__ matmul matrix_transpose tensordot vecdot
broadcast_arrays broadcast_to concat expand_dims flip moveaxis permute_dims repeat reshape roll
squeeze stack tile unstack
argmax argmin nonzero searchsorted where
unique_all unique_counts unique_inverse unique_values
argsort sort cumulative_sum max mean min prod std sum var all any
linalg fft
"""
METHODS = """
__abs__ __add__ __and__ __array_namespace__ __bool__ __complex__ __dlpack__ __dlpack_device__ __eq__
__float__ __floordiv__ __ge__ __getitem__ __gt__ __index__ __int__ __invert__ __le__ __lshift__
__lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __rshift__ __setitem__
__sub__ __truediv__ __xor__ to_device dtype device mT ndim shape size T
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_is_there_or_said_to_be_missing(name):
    assert hasattr(xp, name) != (name in xp.MISSING)


@pytest.mark.parametrize("name", METHODS.split())
def test_every_method_is_there_or_said_to_be_missing(name):
    assert hasattr(mm.DTensor, name) != (name in xp.MISSING)


def test_missing_names_are_the_standards():
    assert set(xp.MISSING) <= {*NAMES.split(), *METHODS.split()}


def test_arrays_are_made():
    def main() -> None:
        with mm.DeviceMesh("a=3") as mesh, mm.default_layout(mesh, "S1"):
            made: list[tuple[Any, Any]] = [
                (xp.zeros((2, 5)), np.zeros((2, 5))),
                (xp.ones(4, dtype=xp.int8), np.ones(4, np.int8)),
                (xp.full((2, 4), 7), np.full((2, 4), 7)),
                (xp.eye(4, 7, k=1), np.eye(4, 7, 1)),
                (xp.eye(3, dtype=int), np.eye(3, dtype=int)),
                (xp.arange(7), np.arange(7)),
                (xp.arange(2, 11, 3, placements="S0"), np.arange(2, 11, 3)),
                (xp.arange(7, step=2), np.arange(0, 7, 2)),
                (xp.linspace(0, 1, 5, endpoint=False), np.linspace(0, 1, 5, endpoint=False)),
                (xp.asarray([[1, 2, 3]]), np.array([[1, 2, 3]])),
                (xp.asarray(xp.arange(4), dtype=float), np.arange(4.0)),
                (xp.from_dlpack(np.arange(3)), np.arange(3)),
                (xp.zeros_like(xp.ones((2, 4), dtype=int)), np.zeros((2, 4), int)),
                (xp.full_like(split(numbers((2, 4)), mesh, "P"), 3), np.full((2, 4), 3)),
                (xp.asarray(5, device=mesh), np.asarray(5)),
            ]
            for found, expected in made:
                same(found, expected)
            assert made[0][0].layout.text == "a=S1"
            assert made[5][0].layout.text == "a=R"
            assert xp.empty((3, 3)).shape == xp.empty_like(xp.ones((3, 3))).shape == (3, 3)
            rows = [np.arange(3), np.arange(2), np.arange(4)]
            split_rows = [xp.asarray(row, placements="S0") for row in rows]
            for indexing in ("xy", "ij"):
                same(
                    xp.meshgrid(*split_rows, indexing=indexing),
                    np.meshgrid(*rows, indexing=indexing),
                )

    mm.run_virtual(3, main)


def test_names_that_numpy_has_otherwise():
    x = numbers((5, 3))

    def main() -> None:
        with mm.DeviceMesh("a=2") as mesh:
            for place in ("S0", "S1", "R", "P"):
                y = split(x, mesh, place)
                same(xp.sort(y, axis=0, descending=True), np.sort(x, 0)[::-1])
                same(xp.argsort(y, axis=0), np.argsort(x, 0, kind="stable"))
                same(xp.argsort(y, axis=1, descending=True), np.argsort(-x, 1, kind="stable"))
                same(xp.concat([y, y], axis=0), np.concatenate([x, x]))
                same(xp.permute_dims(y, (1, 0)), x.T)
                same(xp.astype(y, xp.float32), x.astype("f4"))
                assert xp.iinfo(y).bits == 64
                assert y.device is mesh
                assert y.to_device(mesh) is y
                assert y.__array_namespace__(api_version="2023.12") is xp
                with pytest.raises(UnknownNameError, match=r"2030\.12"):
                    y.__array_namespace__(api_version="2030.12")
            with mm.DeviceMesh("b=2") as other:
                moved = y.to_device(other)
                assert moved.device is other
                same(moved, x)

    mm.run_virtual(2, main)


def test_what_the_namespace_says_of_itself():
    def main() -> None:
        info = xp.__array_namespace_info__()
        assert info.devices() == []
        assert info.default_device() is None
        with mm.DeviceMesh("a=1") as mesh, mm.default_layout(mesh):
            assert info.default_device() is mesh
            assert info.devices() == [mesh]
        assert info.capabilities()["boolean indexing"]
        assert info.default_dtypes()["real floating"] == np.float64
        assert info.dtypes(kind="bool") == {"bool": np.dtype(bool)}
        with pytest.raises(LayoutError, match="device="):
            xp.zeros(3)

    mm.run_virtual(1, main)


def test_what_is_missing_is_said_as_it_is():
    """The extensions are not there, but NumPy's functions of these names have rules."""
    assert np.fft.fft in FUNCTIONS
    assert np.linalg.inv in FUNCTIONS
    for name in ("fft", "linalg"):
        assert f"numpy.{name} has rules" in xp.MISSING[name]
