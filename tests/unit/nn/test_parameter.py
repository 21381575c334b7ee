from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

from mpimesh import Mesh
from mpimesh.errors import DTypeError, LayoutError, ModuleError, ModuleStateError, ShapeError
from mpimesh.layout import Layout
from mpimesh.nn import Constant, Parameter, Uniform
from tests.helpers.raises import raises


def materialized(shape=(2, 3), dtype="float64"):
    parameter = Parameter("weight", shape, Uniform(1.0))
    parameter.materialize(seed=0, dtype=dtype)
    return parameter


def test_a_parameter_is_cheap_until_materialized():
    parameter = Parameter("weight", (10**6, 10**6), Constant(0.0))
    assert (parameter.data, parameter.grad, parameter.dtype) == (None, None, None)
    assert parameter.size == 10**12
    with raises(ModuleStateError, "'weight'", (10**6, 10**6), "materialize(seed=..."):
        parameter.value()
    with pytest.raises(ModuleStateError):
        Parameter("w", (2,), Constant(0.0)).accumulate(np.ones(2))


@pytest.mark.parametrize("dtype", ["int32", "complex64", "longdouble", None, "no dtype"])
def test_other_dtypes_are_refused(dtype):
    with raises(DTypeError, "float16", "float32", "float64", repr(dtype)):
        Parameter("weight", (2,), Constant(0.0)).materialize(seed=0, dtype=dtype)


def test_negative_extents_are_refused():
    with raises(ModuleError, "shape", "'weight'", -1):
        Parameter("weight", (2, -1), Constant(0.0))


@pytest.mark.parametrize("owned", [False, True])
def test_gradients_add_up(owned):
    parameter = materialized()
    g = np.ones((2, 3))
    parameter.accumulate(g, owned=owned)
    assert (parameter.grad is g) == owned
    parameter.accumulate(np.full((2, 3), 2.0), owned=owned)
    np.testing.assert_array_equal(parameter.grad, np.full((2, 3), 3.0))
    if not owned:
        np.testing.assert_array_equal(g, np.ones((2, 3)))


@pytest.mark.parametrize(
    "g",
    [np.ones((2, 3), "float64"), np.asfortranarray(np.ones((2, 3), "float32")), np.float32(1)],
    ids=["wide", "fortran", "scalar"],
)
def test_memory_of_another_kind_is_copied_even_if_owned(g):
    parameter = materialized(g.shape, "float32")
    parameter.accumulate(g, owned=True)
    parameter.accumulate(g, owned=True)
    assert isinstance(parameter.grad, np.ndarray)
    assert parameter.grad.dtype == np.float32
    assert parameter.grad.flags.c_contiguous
    assert parameter.grad is not g
    np.testing.assert_array_equal(parameter.grad, np.full(g.shape, 2.0))


@pytest.mark.parametrize(
    ("g", "error", "values"),
    [
        (np.ones((3, 2)), ShapeError, ((2, 3), (3, 2))),
        (np.ones((2, 3), int), DTypeError, ("int64",)),
        (np.ones((2, 3), complex), DTypeError, ("complex128",)),
    ],
)
def test_gradients_that_do_not_fit_are_refused(g, error, values):
    with raises(error, "gradient", "'weight'", *values):
        materialized().accumulate(g)


def test_rows_add_up():
    parameter = materialized()
    seen: list[Parameter] = []
    parameter.on_ready = seen.append
    parameter.accumulate_rows(np.array([1]), np.ones((1, 3)))
    parameter.accumulate_rows(np.array([1, 0]), np.ones((2, 3)))
    np.testing.assert_array_equal(parameter.grad, [[1.0] * 3, [2.0] * 3])
    assert seen == [parameter, parameter]


def test_attached_memory_holds_the_gradient():
    flat = np.full(8, 7.0)
    view = flat[1:7].reshape(2, 3)
    parameter = materialized()
    seen: list[float] = []
    parameter.on_ready = lambda ready: seen.append(ready.grad.sum())
    parameter.attach_grad(view)
    assert parameter.is_attached
    assert (flat == 7).all()  # memory that nobody looks at is not touched
    assert parameter.grad is view
    np.testing.assert_array_equal(flat, [7, 0, 0, 0, 0, 0, 0, 7])
    for _ in range(2):
        parameter.accumulate(np.ones((2, 3)), owned=True)
    assert seen == [6.0, 12.0]
    np.testing.assert_array_equal(flat, [7, 2, 2, 2, 2, 2, 2, 7])
    parameter.zero_grad()
    assert parameter.grad is view
    np.testing.assert_array_equal(flat, [7, 0, 0, 0, 0, 0, 0, 7])
    parameter.detach_grad()
    assert parameter.grad is None


def test_what_was_accumulated_moves_into_attached_memory():
    parameter = materialized()
    parameter.accumulate(np.full((2, 3), 5.0))
    view = np.zeros((2, 3))
    parameter.attach_grad(view)
    np.testing.assert_array_equal(view, np.full((2, 3), 5.0))


@pytest.mark.parametrize(
    ("view", "error", "values"),
    [
        (np.zeros(6), ShapeError, ((2, 3), (6,))),
        (np.zeros((2, 3), "float32"), DTypeError, ("float64", "float32")),
        (np.zeros((3, 2)).T, ShapeError, ("C-contiguous",)),
    ],
)
def test_gradient_memory_that_does_not_fit_is_refused(view, error, values):
    with raises(error, "memory", "'weight'", *values):
        materialized().attach_grad(view)


def test_zeros_in_attached_memory_are_written_when_somebody_looks():
    """The first addend takes their place, so that memory is not written twice."""
    parameter = materialized()
    flat = np.zeros(6)
    parameter.attach_grad(flat.reshape(2, 3))
    parameter.accumulate(np.full((2, 3), 5.0))
    parameter.zero_grad()
    np.testing.assert_array_equal(flat, 5)  # nobody has looked
    parameter.accumulate(np.full((2, 3), 2.0))
    np.testing.assert_array_equal(flat, 2)
    parameter.accumulate(np.full((2, 3), 1.0))
    np.testing.assert_array_equal(flat, 3)
    parameter.zero_grad()
    parameter.accumulate_rows(np.array([1]), np.full((1, 3), 4.0))
    np.testing.assert_array_equal(flat, [0, 0, 0, 4, 4, 4])
    parameter.zero_grad()
    parameter.write_zeros()
    np.testing.assert_array_equal(flat, 0)
    parameter.accumulate(np.full((2, 3), 1.0))
    parameter.zero_grad()
    copied = copy.deepcopy(parameter)
    np.testing.assert_array_equal(copied.grad, 0)
    np.testing.assert_array_equal(parameter.grad, 0)


def test_zero_grad_without_attached_memory_forgets():
    parameter = materialized()
    parameter.accumulate(np.ones((2, 3)))
    parameter.zero_grad()
    assert parameter.grad is None


def test_materializing_again_starts_over():
    parameter = materialized()
    first = parameter.data.copy()
    parameter.data[...] = 0
    parameter.attach_grad(np.zeros((2, 3)))
    parameter.materialize(seed=0, dtype="float64")
    np.testing.assert_array_equal(parameter.data, first)
    assert (parameter.grad, parameter.is_attached) == (None, False)


def test_text():
    assert repr(Parameter("w", (2,), Constant(0.0))) == "Parameter('w', (2,), no memory)"
    frozen = materialized((2,))
    frozen.requires_grad = False
    assert repr(frozen) == "Parameter('weight', (2,), float64, frozen)"


def test_a_copy_is_tied_to_no_buckets():
    """Such as that of a whole model, kept as an average or as the best so far."""
    ready = threading.Lock()  # cannot be copied, as a communicator cannot
    parameter = Parameter("weight", (2, 3), Constant(1.0))
    parameter.materialize(seed=0, dtype="f4")
    flat = np.zeros(6, np.float32)
    parameter.attach_grad(flat.reshape(2, 3))
    parameter.on_ready = lambda _, ready=ready: ready.locked()
    parameter.accumulate(np.ones((2, 3)))
    for copied in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert copied.on_ready is None
        assert not copied.is_attached
        np.testing.assert_array_equal(copied.grad, np.ones((2, 3)))
        copied.accumulate(np.ones((2, 3)))
        copied.value()[...] = 7
        copied.zero_grad()
        assert copied.grad is None
    assert parameter.is_attached
    assert parameter.on_ready is not None
    np.testing.assert_array_equal(parameter.value(), np.ones((2, 3)))
    np.testing.assert_array_equal(flat, np.ones(6))


def test_a_parameter_with_a_layout_is_a_block_of_it():
    whole = materialized((5, 3))
    layout = Layout(Mesh("tp=2"), "tp=S0")
    parts = []
    for rank in range(2):
        part = Parameter("weight", (5, 3), Uniform(1.0))
        part.set_layout(layout, rank)
        part.set_layout(layout, rank)  # as each layer does that shares it
        assert (part.global_shape, part.shape) == ((5, 3), (3 - rank, 3))
        part.materialize(seed=0, dtype="float64")
        assert np.array_equal(part.value(), whole.value()[part.box[0][0] : part.box[0][1]])
        assert part.holders == (rank,)
        twin = copy.deepcopy(part)
        assert (twin.layout, twin.rank, twin.box) == (layout, rank, part.box)
        parts.append(part)
    assert whole.box == ((0, 5), (0, 3))
    with raises(ModuleStateError, "'weight'", (3, 3)):
        parts[0].set_layout(layout, 0)


def test_a_parameter_has_one_layout():
    part = Parameter("weight", (5, 3), Uniform(1.0))
    part.set_layout(Layout(Mesh("tp=2"), "tp=S0"), 0)
    with raises(ModuleError, "'weight'", (5, 3), "tp=S1"):
        part.set_layout(Layout(Mesh("tp=2"), "tp=S1"), 0)
    with raises(LayoutError, "Shard(3)", (5, 3)):
        Parameter("weight", (5, 3), Uniform(1.0)).set_layout(Layout(Mesh("tp=2"), "tp=S3"), 0)
