"""Halos, shifts and functions of blocks under MPI, against NumPy on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.shared_memory import nodes_of
from tests.helpers.depth import deep

ROWS, COLUMNS = 13, 17


@pytest.fixture(params=["in shared memory", "two ranks a node", "by messages"])
def where(request, monkeypatch):
    """Have the blocks read in place, read and sent, or sent."""
    shared = "never" if request.param == "by messages" else "always"
    monkeypatch.setenv("MPIMESH_NODE_SHARED", shared)
    with nodes_of(2 * (request.param == "two ranks a node")):
        yield


def whole():
    return np.random.default_rng(1).standard_normal((ROWS, COLUMNS))


def meshes(comm):
    sizes = [n for n in range(1, comm.size + 1) if comm.size % n == 0]
    return [f"y={n},x={comm.size // n}" for n in sizes]


def stepped(u: Any) -> Any:
    """Return an average of each inner point and four others, two of them diagonal."""
    return (u[1:-1, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[:-2, :-2] + u[2:, 2:]) / 5


@pytest.mark.parametrize("boundary", [*deep("periodic"), 0.5, *deep("edge")])
def test_a_stencil_has_the_bits_of_one_rank(comm, where, boundary):
    pad: dict[str, Any] = {"periodic": {"mode": "wrap"}, "edge": {"mode": "edge"}}.get(
        boundary, {"constant_values": boundary}
    )
    expected = whole()
    for _ in range(20):
        expected = stepped(np.pad(expected, 1, **pad))
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            x = mm.distribute(whole(), mesh, "y=S0, x=S1")
            halo = mm.Halo(x, 1, boundary)
            now, then = halo.field(x), halo.field()
            for _ in range(20):
                padded = halo.exchange(now)
                then.local[...] = stepped(padded)
                now, then = then, now
            assert np.array_equal(now.tensor.full(), expected)


def test_wide_halos_come_from_several_ranks(comm, where):
    """Wider than blocks, and than the array."""
    width = {0: (15, 3), 1: (1, 30)}
    expected = np.pad(whole(), list(width.values()), mode="wrap")
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            x = mm.distribute(whole(), mesh, "y=S1, x=S0")
            padded = mm.Halo(x, width).exchange(x)
            (top, bottom), (left, right) = x.layout.box(x.shape, mesh.rank)
            assert np.array_equal(padded, expected[top : bottom + 18, left : right + 31])


def test_a_halo_under_way_leaves_the_block_to_be_read(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        x = mm.distribute(np.arange(3.0 * comm.size), mesh, "x=S0")
        halo = mm.Halo(x)
        fields = [halo.field(x) for _ in range(3)]
        started = [halo.start(field) for field in fields]
        total = sum(field.local.sum() for field in fields)
        assert total == 3 * x.local.sum()
        for coming in reversed(started):
            padded = coming.resolve()
            assert padded[0] == (3 * mesh.rank - 1) % (3 * comm.size)
            assert padded[-1] == (3 * mesh.rank + 3) % (3 * comm.size)


def test_shift_is_roll(comm, where):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        x = mm.distribute(whole(), mesh, "x=S0")
        for steps in (1, -2, 7, 40):
            assert np.array_equal(mm.shift(x, steps, 0).full(), np.roll(whole(), steps, 0))
        moved = mm.shift(x, (2, -1), (0, 1), wrap=False, fill=9).full()
        assert np.array_equal(moved[2:, :-1], whole()[:-2, 1:])
        assert (moved[:2] == 9).all()
        assert (moved[:, -1] == 9).all()


def test_a_function_of_blocks(comm):
    @mm.local_map(out_placements=("x=S0", "x=P"), in_placements="x=S0")
    def centred(u, *, block):
        return u + np.arange(*block.box[0])[:, None], u.sum(axis=0)

    with mm.DeviceMesh("x=-1", comm) as mesh:
        x = mm.distribute(whole(), mesh, "x=S1")
        y, sums = centred(x)
        assert np.array_equal(y.full(), whole() + np.arange(ROWS)[:, None])
        np.testing.assert_allclose(sums.full(), whole().sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("width", [*deep(1), {0: (2, 0), 1: (0, 3)}])
def test_a_rank_receives_its_halo_and_nothing_else(comm, where, width):
    """The elements around a block of 12 x 10, but for what the rank has itself."""
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            shape = 12 * mesh.dim_size("y"), 10 * mesh.dim_size("x")
            halo = mm.Halo.of_shape(shape, mesh, "y=S0, x=S1", width, dtype="f4")
            field = halo.field()
            halo.exchange(field)
            padded = own = 1
            for size, dim, pair in zip((12, 10), "yx", halo.plan.width, strict=True):
                padded *= size + sum(pair)
                # A dim of one rank has its own other end beyond each of its ends.
                own *= size + (sum(pair) if mesh.dim_size(dim) == 1 else 0)
            assert mesh.traffic().received_bytes == 4 * (padded - own) == halo.received_bytes
