"""Fourier transforms of split arrays: what NumPy gives, and how often they are cut anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import AxisError, DTypeError, ShapeError
from tests.helpers.depth import deep, examples
from tests.helpers.dtensor_check import agree, layouts, numbers, placements_of, split

CLOSE = 1e-9
FFT: Any = np.fft
ONE_AXIS: list[Any] = [
    np.fft.fft,
    np.fft.ifft,
    np.fft.rfft,
    np.fft.irfft,
    np.fft.hfft,
    np.fft.ihfft,
]
SEVERAL: list[Any] = [
    np.fft.fftn,
    np.fft.ifftn,
    np.fft.rfftn,
    np.fft.irfftn,
    np.fft.fft2,
    np.fft.ifft2,
    np.fft.rfft2,
    np.fft.irfft2,
    lambda x: np.fft.fftn(x, (4, 9)),
    lambda x: np.fft.rfftn(x, axes=(1, 0), norm="ortho"),
    lambda x: np.fft.irfftn(x, (5, 3, 6), axes=(2, 0, 1), norm="forward"),
    lambda x: np.fft.fft(x, 3, axis=0),
    lambda x: np.fft.rfft(x, 9, axis=1, norm="forward"),
    np.fft.fftshift,
    lambda x: np.fft.ifftshift(x, 1),
    lambda x: np.fft.ifftshift(x, (0, 0)),
    lambda x: np.fft.fftshift(x, (0, -3)),
]


@pytest.mark.parametrize("dims", [*deep("a=1"), "a=3", *deep("a=4"), "a=2,b=2"])
@pytest.mark.filterwarnings("ignore:`axes` should not be:DeprecationWarning")
def test_transforms(dims):
    x = numbers((5, 6, 4), float)
    every = placements_of(3, dims.count("="))
    cases: list[Any] = []
    for number, function in enumerate(SEVERAL):
        placements = every if "," not in dims else every[number % 7 :: 7]
        cases += [(function, [x], [p]) for p in placements]
    agree(dims, cases, CLOSE)


@settings(max_examples=examples(12))
@given(st.data())
def test_any_axis_of_any_dtype(data):
    size = data.draw(st.integers(1, 4))
    cases: list[Any] = []
    halves: list[Any] = []
    for _ in range(4):
        function = data.draw(st.sampled_from(ONE_AXIS))
        shape = data.draw(st.sampled_from([(9,), (2, 5), (4, 3), (0, 3)]))
        axis = data.draw(st.integers(-1 if shape[0] else len(shape) - 1, len(shape) - 1))
        n = data.draw(st.none() | st.integers(2, 11))
        if function in (np.fft.rfft, np.fft.ihfft):
            dtype = data.draw(st.sampled_from([int, float, bool, np.float16]))
        else:
            dtype = data.draw(st.sampled_from([int, float, complex, bool, np.float16]))
        x = numbers(shape, dtype)
        placement = data.draw(layouts(shape, size, partial=dtype is not bool))
        row = halves if dtype is np.float16 else cases
        row.append((partial(function, n=n, axis=axis), [x], [placement]))
    agree(f"a={size}", cases, 1e-5)
    agree(f"a={size}", halves, 2e-2)  # summands of half types are rounded, each for itself


def test_what_moves_is_cut_anew_once():
    """The whole axes go first; then one exchange, of a quarter of the array from each to each."""

    def main():
        with mm.DeviceMesh("a=4") as mesh:
            x = mm.distribute(numbers((8, 4, 16), complex), mesh, "S0")
            before = mesh.traffic().snapshot()
            found = FFT.fftn(x)
            assert (mesh.traffic() - before).received_bytes == x.nbytes // 16 * 3
            assert found.layout.text == "a=S2"
            assert FFT.fft2(x).layout.text == "a=S0"
        with mm.DeviceMesh("a=2,b=2") as mesh:  # pencils: no axis has room for both dims
            x = mm.distribute(numbers((4, 4, 2), complex), mesh, "S0, S1")
            assert FFT.fftn(x).layout.text == "a=S1, b=S2"

    mm.run_virtual(4, main)


def test_sums_stay_sums():
    def main():
        with mm.DeviceMesh("a=2,b=2") as mesh:
            x = split(numbers((4, 4), float), mesh, "P, S0")
            assert FFT.fft(x).layout.text == "a=P, b=S0"
            assert FFT.fft2(x).layout.text == "a=P, b=S1"

    mm.run_virtual(4, main)


def test_what_is_no_transform():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.zeros((4, 4), mesh, "S0")
            for call, error in [
                (lambda: FFT.fft(x, 0), ShapeError),
                (lambda: FFT.fft(x, axis=2), AxisError),
                (lambda: FFT.fftn(x, (3,), axes=(0, 1)), ShapeError),
                (lambda: FFT.rfftn(x, axes=()), AxisError),
                (lambda: FFT.fft(x, out=np.zeros((4, 4), complex)), DTypeError),
                (lambda: FFT.rfft(x.astype(complex)), TypeError),
                (lambda: FFT.fft(x, norm="none"), ValueError),
            ]:
                with pytest.raises(error):
                    call()

    mm.run_virtual(2, main)
