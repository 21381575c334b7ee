"""A redistribution on NumPy blocks in one process, and what it must come to; random layouts."""

from __future__ import annotations

import itertools
from functools import lru_cache, reduce
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mpimesh.layout import Layout, Partial, Replicate, Shard
from mpimesh.mesh import Mesh

COMBINE: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
IDENTITY = {"sum": 0.0, "prod": 1.0, "min": np.inf, "max": -np.inf}


@lru_cache(maxsize=4096)
def oracle_box(layout, shape, rank):
    """The block of `rank`: each dim cuts the indices that those before it left, as NumPy does."""
    left = [np.arange(length + 1) for length in shape]  # with the end, so that empty ones stand
    for coord, dim, spec in zip(
        layout.mesh.coords_of(rank), layout.mesh.dims, layout.placement, strict=True
    ):
        if not isinstance(spec, Shard):
            continue
        indices = left[spec.axis]
        where: Any = dim.size if spec.sizes is None else np.cumsum(spec.sizes)[:-1]
        parts = np.array_split(indices[:-1], where)
        before = sum(map(len, parts[:coord]))
        left[spec.axis] = indices[before : before + len(parts[coord]) + 1]
    return tuple((int(indices[0]), int(indices[-1])) for indices in left)


def cut(array, box, origin=None):
    """The part `box` of an array, or of a block that begins at `origin`."""
    begins = [0] * len(box) if origin is None else [start for start, _ in origin]
    slices = (slice(a - k, b - k) for (a, b), k in zip(box, begins, strict=True))
    return array[(*slices, ...)]  # a view, also of an array without axes


def elements(box):
    return prod(stop - start for start, stop in box)


def partial_dims(layout):
    return [k for k, spec in enumerate(layout.placement) if isinstance(spec, Partial)]


def reduced(op, values):
    value = reduce(COMBINE[op], values)
    return value / len(values) if op == "mean" else value


def first_blocks(layout, shape, rng):
    """The array, and a block of it for each rank; summands that differ along partial dims."""
    mesh, waiting = layout.mesh, partial_dims(layout)
    summands: dict[tuple[int, ...], Any] = {}
    blocks = {}
    for rank in mesh.ids:
        key = tuple(mesh.coords_of(rank)[dim] for dim in waiting)
        if key not in summands:
            summands[key] = rng.integers(-4, 5, shape).astype(float)
        blocks[rank] = cut(summands[key], oracle_box(layout, shape, rank)).copy()
    values = [summands[key] for key in sorted(summands)]
    return (reduced(layout.partial_op, values) if waiting else values[0]), blocks


def exchanged(phase, held, counts, nodes=None):
    """The blocks of the ranks after one phase; both sides must speak of the same boxes.

    Adds to the (elements, messages, those of them from other nodes) of each rank in `counts`.
    """
    given: dict[tuple[int, int], list[Any]] = {}
    for giver in phase.source.mesh.ids:
        for taker, box in phase.gives(giver):
            if elements(box) or not box:
                given.setdefault((giver, taker), []).append(box)
    boxes = {rank: phase.source.box(rank) for rank in phase.source.mesh.ids}
    after = {}
    for rank in phase.target.mesh.ids:
        if not phase.target.holds(rank):
            assert phase.takes(rank) == []
            continue
        own = phase.target.box(rank)
        fresh = np.full([stop - start for start, stop in own], np.nan)
        block = held[rank].copy() if phase.in_place else fresh
        for take in phase.takes(rank):
            values = []
            for who in take.ranks:
                values.append(cut(held[who], take.box, boxes[who]))
                if who != rank:
                    assert given[who, rank].pop(0) == take.box
                    far = nodes is not None and nodes[who] != nodes[rank]
                    size = elements(take.box)
                    counts[rank] += (size, 1, size * far, int(far))
            value = reduce(COMBINE[phase.op], values) if phase.op else values[0]
            assert phase.op or len(values) == 1
            assert np.isnan(cut(block, take.box, own)).all(), "taken twice"
            assert not np.isnan(value).any(), "taken of what is not there"
            cut(block, take.box, own)[...] = value
        after[rank] = block
    assert not any(given.values()), f"given, but not taken: {given}"
    return after


def simulate(plan, blocks, nodes=None):
    """The blocks in the end: each phase in turn, the division, and what fills the rest.

    Also, for each rank of both meshes, the elements and messages it received, and how many of
    them from other nodes.
    """
    ranks = dict.fromkeys([*plan.source.mesh.ids, *plan.target.mesh.ids])
    counts = {rank: np.zeros(4, np.int64) for rank in ranks}
    reducing = [number for number, phase in enumerate(plan.phases) if phase.op]
    for number, phase in enumerate(plan.phases):
        blocks = exchanged(phase, blocks, counts, nodes)
        if number in reducing[-1:]:
            blocks = {rank: block / plan.divisor for rank, block in blocks.items()}
    assert not any(np.isnan(block).any() for block in blocks.values()), "never taken"
    if not plan.fill:
        return blocks, counts
    full = {}
    for rank in plan.target.mesh.ids:
        box = plan.block(rank)
        full[rank] = np.full([stop - start for start, stop in box], IDENTITY[plan.fill])
        if rank in blocks:
            cut(full[rank], plan.phases[-1].target.box(rank), box)[...] = blocks[rank]
    return full, counts


def crossing_at_least(source, target, shape, nodes):
    """The fewest elements that come to nodes: what a node needs, and none of its ranks has."""
    wanted = {nodes[rank]: np.zeros(shape, bool) for rank in target.mesh.ids}
    for rank in target.mesh.ids:
        cut(wanted[nodes[rank]], oracle_box(target, shape, rank))[...] = True
    for rank in source.mesh.ids:
        if nodes[rank] in wanted:
            cut(wanted[nodes[rank]], oracle_box(source, shape, rank))[...] = False
    return sum(int(lacking.sum()) for lacking in wanted.values())


def assert_holds(layout, shape, blocks, array):
    """Each rank has its block of `array`; along partial dims, what reduces to it."""
    mesh, waiting = layout.mesh, partial_dims(layout)
    assert sorted(blocks) == sorted(mesh.ids)
    for rank in mesh.ids:
        coords = list(mesh.coords_of(rank))
        values = []
        for along in itertools.product(*(range(mesh.dims[dim].size) for dim in waiting)):
            for dim, coord in zip(waiting, along, strict=True):
                coords[dim] = coord
            values.append(blocks[mesh.rank_at(*coords)])
        value = reduced(layout.partial_op, values) if waiting else values[0]
        expected = cut(array, oracle_box(layout, shape, rank))
        if not np.array_equal(value, expected):  # sums of whole numbers are exact, means are not
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-9)


def lacking(source, target, shape, rank):
    """The number of elements of its new block that `rank` does not hold yet."""
    wanted = np.zeros(shape, bool)
    cut(wanted, oracle_box(target, shape, rank))[...] = True
    if source.mesh.contains_rank(rank):
        cut(wanted, oracle_box(source, shape, rank))[...] = False
    return int(wanted.sum())


# -- random ones --------------------------------------------------------------------------

MAX_RANK = 23


@st.composite
def small_meshes(draw, ranks=range(MAX_RANK + 1)):
    """A mesh of up to three dims over any of `ranks`, in any order."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=3).filter(lambda s: prod(s) <= len(ranks)))
    dims = [(f"d{k}", size) for k, size in enumerate(sizes)]
    if draw(st.booleans()) and ranks[0] == 0:
        return Mesh(dims)
    return Mesh(dims, draw(st.permutations(ranks))[: prod(sizes)])


@st.composite
def mesh_pairs(draw):
    """Two meshes: one and the same, of the same ranks, overlapping, or apart."""
    kind = draw(st.sampled_from(["same", "permuted", "any", "apart"]))
    if kind == "apart":
        middle = MAX_RANK // 2
        return draw(small_meshes(range(middle))), draw(small_meshes(range(middle, MAX_RANK + 1)))
    first = draw(small_meshes())
    if kind == "same":
        return first, first
    if kind == "permuted":
        return first, Mesh(first.dims, draw(st.permutations(list(first.ids))))
    return first, draw(small_meshes())


array_shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
ops = st.sampled_from(sorted(COMBINE))


@st.composite
def layouts(draw, mesh, shape, partial=True):
    """Any layout on `mesh` that fits `shape`."""
    op = draw(ops)
    kinds = ["R"] + ["S"] * 2 * bool(shape) + ["P"] * partial
    lengths = {axis: [length] for axis, length in enumerate(shape)}
    specs: list[Any] = []
    for dim in mesh.dims:
        kind = draw(st.sampled_from(kinds))
        if kind == "R":
            specs.append(Replicate())
        elif kind == "P":
            specs.append(Partial(op))
        else:
            axis = draw(st.integers(0, len(shape) - 1))
            pieces = lengths[axis]
            sizes = None
            if len(set(pieces)) == 1 and draw(st.booleans()):
                edges = st.lists(st.integers(0, pieces[0]), min_size=dim.size - 1)
                edges = edges.map(lambda row, n=dim.size: sorted(row[: n - 1]))  # type: ignore[misc]
                sizes = np.diff([0, *draw(edges), pieces[0]]).tolist()
            specs.append(Shard(axis, sizes=sizes))
            lengths[axis] = [
                part
                for piece in pieces
                for part in (sizes or [len(p) for p in np.array_split(range(piece), dim.size)])
            ]
    return Layout(mesh, specs)


@st.composite
def moves(draw, partial=True, apart=False):
    """Draw (source, target, shape)."""
    shape = draw(array_shapes)
    if apart:
        middle = MAX_RANK // 2
        pair = (
            draw(small_meshes(range(middle))),
            draw(small_meshes(range(middle, MAX_RANK + 1))),
        )
    else:
        pair = draw(mesh_pairs())
    source, target = (draw(layouts(mesh, shape, partial)) for mesh in pair)
    return source, target, shape
