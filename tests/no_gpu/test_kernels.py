"""Layers, losses, optimizers and generated arrays through CuPy, with the numbers of NumPy."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from mpimesh import nn, optim
from mpimesh.arrays.namespace import fused
from mpimesh.nn import activations, attention, norms
from mpimesh.optim import optimizer
from tests.helpers.nn_cases import CASES

DTYPES = ("float16", "float32", "float64")
_FUSED = (
    *(activations.gelu, activations.gelu_slope),
    *(activations.gelu_tanh, activations.gelu_tanh_slope),
    *(norms.scale_and_shift, attention.exp_less, optimizer._adam),
)


def driver() -> Any:
    """Return CUDA's place. Not imported: that would take CUDA's place in any process."""
    return sys.modules["tests.no_gpu.plugin"].driver


def same(got: Any, expected: Any, dtype: Any) -> None:
    import cupy

    assert (got is None) == (expected is None)
    if got is not None:
        assert isinstance(got, cupy.ndarray)
        assert got.dtype == expected.dtype
        tolerance = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-10}[dtype]
        np.testing.assert_allclose(got.get(), expected, tolerance, tolerance * 10)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(case, dtype):
    import cupy

    x, told = case.x(4, dtype), []
    for xp in (np, cupy):
        layer, ctx = case.make(), nn.Context(**case.context)
        layer.materialize(seed=3, dtype=dtype, xp=xp)
        y = layer(xp.asarray(x), ctx)
        dx = layer.backward(y, ctx)
        told.append([y, dx, *(one.grad for one in layer.parameters())])
    for on_host, on_device in zip(*told, strict=True):
        same(on_device, on_host, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses(dtype):
    import cupy

    rng = np.random.default_rng(0)
    y, other = (rng.normal(size=(5, 7)).astype(dtype) for _ in range(2))
    places = np.array([0, 3, -100, 6, 1])
    for loss, target in ((nn.CrossEntropy(ignore_index=-100), places), (nn.mse_loss, other)):
        expected = loss.value_and_grad(y, target, denominator=4.0)
        got = loss.value_and_grad(cupy.asarray(y), cupy.asarray(target), denominator=4.0)
        assert got[0] == pytest.approx(expected[0], rel=1e-3)
        same(got[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.AdamW(ps, lr=0.01),
        lambda ps: optim.Adam(ps, lr=0.01, weight_decay=0.1),
        lambda ps: optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_optimizers(make, dtype):
    import cupy

    told = []
    for xp in (np, cupy):
        layer, rng = nn.Linear(4, 3), np.random.default_rng(1)
        layer.materialize(seed=0, dtype=dtype, xp=xp)
        optimizer, norms = make(layer.parameters()), []
        for _ in range(3):
            for one in layer.parameters():
                one.grad = xp.asarray(rng.normal(size=one.shape).astype(dtype))
            norms.append(float(optim.clip_grad_norm(layer.parameters(), 0.5)))
            optimizer.step()
        told.append((norms, [one.data for one in layer.parameters()]))
    assert told[1][0] == pytest.approx(told[0][0], rel=1e-3)
    for on_host, on_device in zip(told[0][1], told[1][1], strict=True):
        same(on_device, on_host, dtype)


def _can_compile() -> bool:
    from cupy.cuda import compiler

    try:
        with warnings.catch_warnings(action="ignore"):
            compiler.compile_using_nvrtc("__global__ void nothing() {}", (), arch="80")
    except Exception:
        return False
    return True


def _run_all_fused(dtype: str) -> list[str]:
    """Run each fused formula, and return the texts of their kernels."""
    import cupy

    start = len(driver().sources)
    x, column, row = (cupy.ones(shape, dtype) for shape in ((4, 5), (4, 1), (5,)))
    for make in _FUSED:
        formula = fused(cupy, make)
        if make is optimizer._adam:
            formula(x, x + 1, x + 2, x + 3, 0.9, 0.1, 0.99, 0.01, 1.0, 1e-8, 0.1)
        elif make is norms.scale_and_shift:
            formula(x, column, row, row)
        elif make is attention.exp_less:
            formula(x, column)
        else:
            formula(*[x] * formula_arguments(make))
    return [source for source, _ in driver().sources[start:]]


def formula_arguments(make: Any) -> int:
    return int(make(np).__code__.co_argcount)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_formula_is_one_kernel_that_computes_in_its_own_dtype(dtype):
    import cupy

    x = cupy.ones((4, 5), dtype)
    before = driver().launched
    y, slope = fused(cupy, activations.gelu_slope)(x, x)
    assert driver().launched == before + 1
    assert (y.dtype, slope.dtype) == (dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_of_formulas_can_be_compiled(dtype):
    from cupy.cuda import compiler

    if not _can_compile():
        pytest.skip("needs NVRTC, as of nvidia-cuda-nvrtc")
    names = {make.__name__.strip("_") for make in _FUSED}
    _run_all_fused(dtype)
    done = set()
    kept = {"float16": "float16", "float32": "float", "float64": "double"}[dtype]
    for source, options in driver().sources:
        kernel = re.search(r"__global__ void (\w+)\(.*?CArray<(\w+),", source)
        if kernel and kernel[1] in names and kernel[2] == kept and kernel[1] not in done:
            done.add(kernel[1])
            made, _ = compiler.compile_using_nvrtc(source, tuple(options), arch="80")
            assert made
    assert done == names
