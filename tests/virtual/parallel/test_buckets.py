"""Gradient buckets on virtual ranks, against plain sums over what each rank added."""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError, ReduceOpError
from mpimesh.nn import Constant, Parameter
from mpimesh.parallel import GradientBuckets
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def make_parameters(shapes, dtype="float64"):
    parameters = [Parameter(f"p{i}", shape, Constant(0.5)) for i, shape in enumerate(shapes)]
    for place, parameter in enumerate(parameters):
        parameter.materialize(seed=0, dtype=dtype, index=place)
    return parameters


def value_of(rank, number, shape, round_=0):
    """The addend of `rank` to parameter `number`: integers, whose sums are exact."""
    rng = np.random.default_rng([rank, number, round_])
    return rng.integers(-50, 50, shape).astype(np.float64)


def on_ranks(size, body, **options):
    """Run `body(mesh)` on virtual ranks of a mesh ``dp=size``."""

    def main():
        with mm.DeviceMesh(f"dp={size}") as mesh:
            return body(mesh)

    return mm.run_virtual(size, main, **options)


SHAPES = [(3, 4), (5,), (), (2, 2, 2), (7,), (0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_gradients_are_the_sums_over_the_ranks(size, bucket_bytes):
    def body(mesh):
        parameters = make_parameters(SHAPES)
        buckets = GradientBuckets(
            parameters, mesh.group("dp"), mesh=mesh, bucket_bytes=bucket_bytes
        )
        for cycle in range(3):
            buckets.begin()
            # Any order will do, also one of each rank's own.
            for number in np.random.default_rng([cycle, mesh.rank]).permutation(len(parameters)):
                parameter = parameters[number]
                parameter.accumulate(value_of(mesh.rank, number, parameter.shape, cycle))
            buckets.synchronize()
            for number, parameter in enumerate(parameters):
                expected = sum(value_of(r, number, parameter.shape, cycle) for r in range(size))
                assert np.array_equal(parameter.grad, expected)
        return [len(bucket.parameters) for bucket in buckets.buckets]

    sizes = on_ranks(size, body, rendezvous=True)
    assert all(one == sizes[0] for one in sizes)
    assert sum(sizes[0]) == (0 if size == 1 else len(SHAPES))


def test_gradients_live_in_the_buckets_and_nowhere_else():
    def body(mesh):
        parameters = make_parameters([(4,), (3,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        (bucket,) = buckets.buckets
        before = [p.grad.__array_interface__["data"] for p in parameters]
        buckets.begin()
        for parameter in parameters:
            parameter.accumulate(np.ones(parameter.shape))
        buckets.synchronize()
        assert bucket.nbytes == 7 * 8
        assert [p.grad.__array_interface__["data"] for p in parameters] == before
        assert all(np.shares_memory(p.grad, bucket.flat) for p in parameters)

    on_ranks(2, body)


@given(
    st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=examples(30))
def test_uses_are_counted(uses, backwards, cycles, overlap):
    """Parameters used several times in each backward, over several backwards and cycles."""

    def body(mesh):
        parameters = make_parameters([(2,)] * len(uses))
        group = mesh.group("dp")
        buckets = GradientBuckets(parameters, group, mesh=mesh, bucket_bytes=16, overlap=overlap)
        for cycle in range(cycles):
            started = mesh.traffic().calls.get("all_reduce", 0)
            buckets.begin(backwards)
            for _ in range(backwards):
                for number in reversed(range(len(uses))):
                    for _ in range(uses[number]):
                        parameters[number].accumulate(np.full(2, mesh.rank + 1.0))
            early = mesh.traffic().calls.get("all_reduce", 0) - started
            assert early == (len(uses) if overlap and cycle else 0)
            buckets.synchronize()
            for number, parameter in enumerate(parameters):
                assert np.all(parameter.grad == 3.0 * uses[number] * backwards)

    on_ranks(2, body)


def test_reductions_keep_their_order_whatever_comes_first():
    def body(mesh):
        parameters = make_parameters([(2,)] * 3)
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, bucket_bytes=16)
        for cycle in range(2):
            started = mesh.traffic().calls.get("all_reduce", 0)
            buckets.begin()
            counts = []
            for number in (0, 1, 2):  # the last bucket's gradient first
                parameters[number].accumulate(np.ones(2))
                counts.append(mesh.traffic().calls.get("all_reduce", 0) - started)
            assert counts == ([0, 0, 3] if cycle else [0, 0, 0])
            buckets.synchronize()

    on_ranks(2, body)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_said_to_be_complete_need_not_be_counted(overlap):
    """In the first cycle, and where a gradient comes in some backwards only."""

    def body(mesh):
        parameters = make_parameters([(2,)] * 4)
        outside = make_parameters([(2,)])
        group = mesh.group("dp")
        buckets = GradientBuckets(parameters, group, mesh=mesh, bucket_bytes=16, overlap=overlap)
        for cycle in range(3):
            started = mesh.traffic().calls.get("all_reduce", 0)
            buckets.begin(2)
            counts = []
            # The last bucket's gradient comes in the middle cycle only.
            for parameter in [*parameters[2:], *(parameters[:1] if cycle == 1 else [])]:
                parameter.accumulate(np.ones(2))
            for some in (parameters[2:], parameters[:1], parameters[:1], outside, parameters[1:2]):
                buckets.complete(some)
                counts.append(mesh.traffic().calls.get("all_reduce", 0) - started)
            # Bucket 3 holds parameter 0 and waits for bucket 2, whose turn is first.
            assert counts == ([2, 2, 2, 2, 4] if overlap else [0] * 5)
            buckets.synchronize()
            assert mesh.traffic().calls.get("all_reduce", 0) - started == 4
            for number, parameter in enumerate(parameters):
                added = number > 1 or (number == 0 and cycle == 1)
                assert np.all(parameter.grad == 2.0 * added)

    on_ranks(2, body)


def test_what_is_complete_is_not_reduced_under_no_sync():
    def body(mesh):
        parameters = make_parameters([(2,)] * 2)
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, bucket_bytes=16)
        for last in (False, True):
            with nullcontext() if last else buckets.no_sync():
                buckets.begin()
                parameters[1].accumulate(np.ones(2))
                buckets.complete(parameters)
                assert buckets.started == last
        buckets.synchronize()
        assert np.all(parameters[1].grad == 4.0)

    on_ranks(2, body)


@pytest.mark.parametrize("size", [1, 3])
def test_several_steps_are_reduced_once(size):
    def body(mesh):
        parameters = make_parameters([(3,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        for cycle in range(2):
            before = mesh.traffic().calls.get("all_reduce", 0)
            for step in range(3):
                if step < 2:
                    with buckets.no_sync():
                        add(buckets, parameters, mesh, cycle * 3 + step)
                        assert buckets.begun
                else:
                    add(buckets, parameters, mesh, cycle * 3 + step)
            after = mesh.traffic().calls.get("all_reduce", 0)
            assert after - before == len(buckets.buckets)
            for number, parameter in enumerate(parameters):
                expected = sum(
                    value_of(rank, number, parameter.shape, cycle * 3 + step)
                    for rank in range(size)
                    for step in range(3)
                )
                assert np.array_equal(parameter.grad, expected)

    def add(buckets, parameters, mesh, round_):
        buckets.begin()
        for number, parameter in enumerate(parameters):
            parameter.accumulate(value_of(mesh.rank, number, parameter.shape, round_))
        buckets.synchronize()

    on_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2])
def test_an_untouched_parameter_takes_part_with_zeros(size):
    def body(mesh):
        parameters = make_parameters([(3,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        for _ in range(2):
            buckets.begin()
            if mesh.rank == size - 1:
                parameters[0].accumulate(np.ones(3))
            expected = ["p1"] if mesh.rank == size - 1 else ["p0", "p1"]
            assert buckets.untouched() == expected
            buckets.synchronize()
            assert np.all(parameters[0].grad == 1)
            assert np.all(parameters[1].grad == 0)

    on_ranks(size, body)


def test_strict_names_parameter_and_ranks_everywhere():
    def body(mesh):
        parameters = make_parameters([(3,), (2,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        buckets.begin()
        parameters[2].accumulate(np.ones(2))
        if mesh.rank:
            parameters[1].accumulate(np.ones(2))
        with raises(MismatchError, "group 'dp'", "p1", 0):
            buckets.synchronize(strict=True)
        buckets.begin()
        for parameter in parameters:
            parameter.accumulate(np.ones(parameter.shape))
        buckets.synchronize(strict=True)

    on_ranks(2, body)


def test_strict_tells_parameters_of_one_name_apart():
    """Each rank had a gradient of some weight and some bias, so it found none missing."""

    def body(mesh):
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers.materialize(seed=0)
        parameters = layers.parameters()
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        buckets.begin()
        for parameter in parameters[2 * mesh.rank :][:2]:
            parameter.accumulate(np.ones(parameter.shape, np.float32))
        with raises(MismatchError, "weight of parameter 0", "bias of parameter 3", "[0]", "[1]"):
            buckets.synchronize(strict=True)

    on_ranks(2, body)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_and_mean(dtype):
    def body(mesh):
        parameters = make_parameters([(3,)], dtype) + make_parameters([(2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, op="mean")
        assert [bucket.dtype for bucket in buckets.buckets] == ["float64", dtype]
        buckets.begin()
        for parameter in parameters:
            parameter.accumulate(np.full(parameter.shape, mesh.rank, parameter.dtype))
        buckets.synchronize()
        assert all(np.all(parameter.grad == 0.5) for parameter in parameters)

    on_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_use_is_refused(size):
    def body(mesh):
        group = mesh.group("dp")
        parameters = make_parameters([(3,), (2,)])
        with raises(ModuleError, "'p0'", 2):
            GradientBuckets([*parameters, parameters[0]], group, mesh=mesh)
        with raises(ModuleError, "op", "'max'"):
            GradientBuckets(parameters, group, mesh=mesh, op="max")
        with pytest.raises(ReduceOpError):
            GradientBuckets(parameters, group, mesh=mesh, op="median")  # type: ignore[arg-type]
        with raises(ModuleStateError, "'late'", (2,), "materialize(seed=..."):
            GradientBuckets([Parameter("late", (2,), Constant(0.0))], group, mesh=mesh)
        with raises(ModuleError, "names", 1, 2):
            GradientBuckets(parameters, group, mesh=mesh, names=["a"])

        buckets = GradientBuckets(parameters, group, mesh=mesh, names=["a", "b"])
        with raises(ModuleError, "'p1'", "buckets.close()"):
            GradientBuckets(parameters[1:], group, mesh=mesh)
        (stranger,) = make_parameters([(2,)])
        with raises(ModuleError, f"rank {mesh.rank}", stranger):
            buckets.submit(stranger)
        with raises(ModuleStateError, f"rank {mesh.rank}", "'a'", "zero_grad()", "begin()"):
            parameters[0].accumulate(np.ones(3))
        buckets.zero_grad()
        parameters[0].accumulate(np.ones(3))
        buckets.synchronize()
        assert np.all(parameters[0].grad == size)

        parameters[1].requires_grad = False
        with raises(ModuleStateError, f"rank {mesh.rank}", ["b"]):
            buckets.begin()
        buckets.close()
        again = GradientBuckets(parameters, group, mesh=mesh)
        assert again.parameters == (parameters[0],)
        parameters[1].requires_grad = True
        with raises(ModuleStateError, f"rank {mesh.rank}", ["p1"]):
            again.begin()

    on_ranks(size, body)


def test_a_gradient_that_comes_too_late_is_named():
    def body(mesh):
        parameters = make_parameters([(3,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        for _ in range(2):
            buckets.begin()
            parameters[0].accumulate(np.ones(3))
            if buckets.buckets[0].handle is None:
                buckets.synchronize()
        with raises(ModuleStateError, "gradient 2", "'p0'", "overlap=False"):
            parameters[0].accumulate(np.ones(3))
        with raises(ModuleStateError, f"rank {mesh.rank}", "synchronize()"):
            buckets.zero_grad()
        buckets.cancel(started=True)
        assert np.all(parameters[0].grad == 0)
        assert not buckets.begun

    on_ranks(2, body)


@pytest.mark.skipif(
    os.environ.get("MPIMESH_CHECKS") == "2", reason="the ranks start reductions on different lines"
)
def test_cancel_meets_ranks_that_had_started():
    def body(mesh):
        parameters = make_parameters([(3,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, bucket_bytes=16)
        for cycle in range(4):
            buckets.begin()
            if cycle == 2:
                if mesh.rank:
                    parameters[1].accumulate(np.ones(2))
                buckets.cancel(started=True)
                assert not any(parameter.grad.any() for parameter in parameters)
                continue
            for parameter in reversed(parameters):
                parameter.accumulate(np.ones(parameter.shape))
            buckets.synchronize()
            assert all(np.all(parameter.grad == 2) for parameter in parameters)

    on_ranks(2, body)


def test_cancel_does_not_end_no_sync():
    def body(mesh):
        parameters = make_parameters([(3,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh)
        with buckets.no_sync():
            for cycle in range(2):
                buckets.begin()
                for parameter in parameters:
                    parameter.accumulate(np.full(parameter.shape, 1.0 + mesh.rank))
                if not cycle:
                    buckets.cancel(started=True)  # as on a rank that was not under no_sync
            buckets.synchronize()
            assert all(np.all(parameter.grad == 1 + mesh.rank) for parameter in parameters)

    on_ranks(2, body)


@pytest.mark.parametrize("difference", ["shape", "dtype", "name", "count", "bucket_bytes"])
def test_ranks_that_differ_are_told_where(difference):
    def body(mesh):
        odd = mesh.rank == 1
        shapes = [(3,), (4,) if odd and difference == "shape" else (2,)]
        shapes += [(9,)] if odd and difference == "count" else []
        dtype = "float32" if odd and difference == "dtype" else "float64"
        names = ["a", "z" if odd and difference == "name" else "b", "c"][: len(shapes)]
        size = 64 if odd and difference == "bucket_bytes" else 128
        values = {
            "shape": ("parameter 1", "rank 0: b (2,) float64", "rank 1: b (4,) float64"),
            "dtype": ("parameter 0", "rank 0: a (3,) float64", "rank 1: a (3,) float32"),
            "name": ("parameter 1", "rank 0: b", "rank 1: z"),
            "count": ("parameter 2", "rank 0: none", "rank 1: c (9,)"),
            "bucket_bytes": ("rank 0", "bucket_bytes 128", "rank 1", "bucket_bytes 64"),
        }[difference]
        with raises(MismatchError, "group 'dp'", *values):
            GradientBuckets(
                make_parameters(shapes, dtype),
                mesh.group("dp"),
                mesh=mesh,
                names=names,
                bucket_bytes=size,
            )

    on_ranks(2, body)


def test_reductions_are_recorded():
    def body(mesh):
        tracer = mm.Tracer(mesh.rank)
        parameters = make_parameters([(3,), (2,)])
        buckets = GradientBuckets(parameters, mesh.group("dp"), mesh=mesh, tracer=tracer)
        buckets.begin()
        buckets.synchronize()
        (event,) = tracer.events()
        assert (event.name, event.category) == ("all_reduce bucket 0", "collective")
        assert event.nbytes == 5 * 8

    on_ranks(2, body)
