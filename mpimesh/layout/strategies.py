"""Strategies of a redistribution with their costs, of which the fastest is taken.

At once: every rank takes its new block from the ranks that have it, and where copies of a reduced
value are wanted, each is reduced once and then passed on. Over nodes there are further ones, for
ranks of a node share its link to the others:

* data that only moves comes to each node once (`two_levels`);
* where messages are short, one collective of a group does it all;
* a reduction is done inside each node first, each rank a piece; then between the nodes; and then
  the result is moved to its place. It takes dims that run inside nodes.

All ranks estimate with the same numbers, so all choose alike. A reduction on two levels rounds
elsewhere than one at once, and elements of half types once more; on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from mpimesh.layout.layout import Layout
from mpimesh.layout.link_costs import LinkCosts
from mpimesh.layout.phase import Phase
from mpimesh.layout.placement import Partial, Replicate, Shard
from mpimesh.layout.tiling import Cut, Integers, Tiling, cut_further, places_of
from mpimesh.layout.two_levels import Exchange, InterNode, IntraNode, can_share, crossing
from mpimesh.mesh import Mesh

__all__ = [
    "AT_ONCE",
    "TWO_LEVELS",
    "MeshCollective",
    "NodeDims",
    "Strategy",
    "TilingChange",
    "collective_of",
    "cut_copies",
    "exchange_s",
    "node_dims",
    "strategies",
]


@dataclass(frozen=True, slots=True)
class MeshCollective:
    """A collective over the ranks along some dims of a mesh, for each coordinate of the others.

    A small all-gather or reduce-scatter of MPI takes about ``log2(n)`` messages one after the
    other, where each rank from each takes ``n - 1``. An all-to-all has as many messages as there
    are pairs, in both MPIs, but starts them from C: with 64 KiB and less for each pair it took 0.2
    to 0.75 of the time of ordered pairs under Open MPI and as long under MPICH; with 1 MiB 0.85 to
    1.2 of it under both, on 4 and 8 ranks of 2 cores. Against that stands packing: ranks of a node
    read boxes in place, and only an all-to-all packs on both sides.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        dims: The names of the dims along which there are several ranks.
        size: How many ranks take part in one of them.
        axis: The array axis that is gathered or scattered; 0 for none.
        op: The reduction; empty for none.
        joined_axis: The axis that an all-to-all makes whole, while it cuts `axis`.
    """

    kind: str
    dims: tuple[str, ...]
    size: int
    axis: int = 0
    op: str = ""
    joined_axis: int = 0

    @property
    def steps(self) -> float:
        """Number of messages that a rank waits for one after the other, if they are short.

        Those of an all-to-all count half, as they were measured.
        """
        if self.kind == "all_to_all":
            return (self.size - 1) / 2
        return ceil(log2(self.size)) * (2 if self.kind == "all_reduce" else 1)

    def __str__(self) -> str:
        """Say it as a person does: ``by all_gather over dp``."""
        return f"by {self.kind} over {', '.join(self.dims)}"


def collective_of(source: Layout, target: Layout, shape: tuple[int, ...]) -> MeshCollective | None:
    """Return the collective that is all there is to do between layouts of one mesh, if there is.

    Every rank has the same blocks before and after, whichever way is taken.
    """
    mesh = source.mesh
    changed = [
        dim
        for dim, pair in enumerate(zip(source.placement, target.placement, strict=True))
        if pair[0] != pair[1]
    ]
    long = [dim for dim in changed if mesh.dims[dim].size > 1]
    names = tuple(mesh.dims[dim].name for dim in long)
    size = prod(mesh.dims[dim].size for dim in long)
    pairs = [(source.placement[dim], target.placement[dim]) for dim in changed]
    if not long:
        return None
    if all(isinstance(old, Partial) and isinstance(new, Replicate) for old, new in pairs):
        everyone = [dim for dim in range(mesh.ndim) if mesh.dims[dim].size > 1]
        whole = len(long) == 1 or long == everyone
        return MeshCollective("all_reduce", names, size, op=source.partial_op) if whole else None
    if len(changed) != 1:
        return None
    (old, new), dim = pairs[0], changed[0]
    if isinstance(old, Shard) and isinstance(new, Replicate):
        cut, uncut = source.tiling(shape), target.tiling(shape)
        if _only_cut(cut, uncut, old.axis, dim):
            return MeshCollective("all_gather", names, size, old.axis)
    if isinstance(old, Partial) and isinstance(new, Shard):
        cut, uncut = target.tiling(shape), source.tiling(shape)
        if _only_cut(cut, uncut, new.axis, dim):
            return MeshCollective("reduce_scatter", names, size, new.axis, old.op)
    if isinstance(old, Shard) and isinstance(new, Shard) and old.axis != new.axis:
        whole_there = list(source.placement)
        whole_there[dim] = Replicate()
        uncut = Layout(mesh, whole_there).tiling(shape)
        before, after = source.tiling(shape), target.tiling(shape)
        if _only_cut(before, uncut, old.axis, dim) and _only_cut(after, uncut, new.axis, dim):
            return MeshCollective("all_to_all", names, size, new.axis, joined_axis=old.axis)
    return None


def _only_cut(cut: Tiling, uncut: Tiling, axis: int, dim: int) -> bool:
    """Tell whether the blocks along `dim` lie one after the other in the block that is not cut."""
    size = cut.mesh.dims[dim].size
    bounds: Integers = cut.bounds[axis][::size]
    return cut.axis_dims[axis][-1] == dim and np.array_equal(bounds, uncut.bounds[axis])


AT_ONCE = "each rank from each"
TWO_LEVELS = "on two levels"


@dataclass(frozen=True, slots=True, eq=False)
class TilingChange:
    """A change of tilings to be planned.

    Attributes:
        first: What the ranks hold.
        last: What they are to hold.
        op: The reduction over `partial`; empty for none.
        partial: The dims of the first mesh along which ranks hold summands.
        kept_partial: The dims along which both stay summands.
        nodes: The node of each rank; empty if all share one.
        same_mesh: Whether both are tilings over one mesh.
        one_shot: Whether each rank may reduce for itself what several are to have.
        collective: The collective of a group that does it all; None if there is none.
    """

    first: Tiling
    last: Tiling
    op: str
    partial: tuple[int, ...]
    kept_partial: tuple[int, ...]
    nodes: tuple[int, ...]
    same_mesh: bool
    one_shot: bool
    collective: MeshCollective | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """One way to change tilings.

    Attributes:
        name: What it is called.
        phases: Its exchanges, one after the other.
        predicted_s: How long it is estimated to take; 0.0 where there is no other, and no estimate.
        collective: What does it in place of its exchanges, and moves the same; None if nothing.
    """

    name: str
    phases: tuple[Exchange, ...]
    predicted_s: float = 0.0
    collective: MeshCollective | None = None


def strategies(change: TilingChange, itemsize: int, links: LinkCosts) -> list[Strategy]:
    """Return the strategies that there are, the fastest first; of equal ones, the simplest."""
    candidates = list(_candidates(change))
    if len(candidates) == 1 and change.collective is None:
        return [Strategy(*candidates[0])]
    seconds_of: dict[Exchange, float] = {}  # by their identity; several strategies begin alike

    def seconds(phase: Exchange) -> float:
        if phase not in seconds_of:
            seconds_of[phase] = exchange_s(phase, itemsize, links)
        return seconds_of[phase]

    ready = [Strategy(name, phases, sum(map(seconds, phases))) for name, phases in candidates]
    if change.collective is not None:
        ready.append(_as_collective(change, change.collective, ready[0], itemsize, links))
    by_time = sorted(ready, key=lambda strategy: strategy.predicted_s)
    # An all-reduce takes the fastest way that was measured, also for few bytes and over nodes.
    return sorted(by_time, key=lambda strategy: "all_reduce" not in strategy.name)


def _as_collective(
    change: TilingChange,
    collective: MeshCollective,
    at_once: Strategy,
    itemsize: int,
    links: LinkCosts,
) -> Strategy:
    """Return the strategy by a collective: the bytes of all at once, in fewer messages."""
    only_bytes = LinkCosts(
        replace(links.intra_node, latency_s=0.0), replace(links.inter_node, latency_s=0.0)
    )
    bytes_s = sum(exchange_s(phase, itemsize, only_bytes) for phase in at_once.phases)
    link = links.inter_node if at_once.phases[0].nodes else links.intra_node
    seconds = bytes_s + collective.steps * link.latency_s
    if collective.kind == "all_to_all":  # all that moves is packed and unpacked
        copied = sum(
            prod(int(np.diff(b).max(initial=0)) for b in t.bounds)
            for t in (change.first, change.last)
        )
        seconds += itemsize * copied / links.intra_node.bytes_per_s
    return Strategy(str(collective), at_once.phases, seconds, collective)


def exchange_s(phase: Exchange, itemsize: int, links: LinkCosts) -> float:
    """Return about how long an exchange takes: the longest, over the ranks, of what comes.

    What comes to a node from others comes over one link, and its ranks meet before and after.
    """
    elements, messages = phase.received()
    if not phase.nodes:
        near = links.intra_node
        times = messages * near.latency_s + elements * (itemsize / near.bytes_per_s)
        return float(times.max(initial=0.0))
    if not messages.any():
        return 0.0
    far_elements, far_messages = crossing(phase)
    node_of = np.array(phase.nodes, np.int64)[places_of(phase.target.mesh).ranks]
    _, nodes = np.unique(node_of, return_inverse=True)
    nodes = nodes.reshape(-1)
    of_node = np.bincount(nodes, weights=far_elements)
    times = (
        far_messages * links.inter_node.latency_s
        + of_node[nodes] * (itemsize / links.inter_node.bytes_per_s)
        + (messages - far_messages) * links.intra_node.latency_s
        + (elements - far_elements) * (itemsize / links.intra_node.bytes_per_s)
    )
    return float(times.max(initial=0.0)) + 2 * links.intra_node.latency_s


def _candidates(change: TilingChange) -> Iterator[tuple[str, tuple[Exchange, ...]]]:
    first, last = change.first, change.last
    if not change.partial:
        yield from _moves(Phase(first, last, kept_partial=change.kept_partial, nodes=change.nodes))
        return
    spread = None if change.one_shot else cut_copies(last, change.kept_partial)
    reduced = Phase(
        first, spread or last, change.op, change.partial, change.kept_partial, change.nodes
    )
    if spread is None:
        yield AT_ONCE, (reduced,)
    else:
        for name, phases in _moves(
            Phase(spread, last, kept_partial=change.kept_partial, nodes=change.nodes)
        ):
            yield name, (reduced, *phases)
    if change.nodes:
        yield from _reductions(change)


def _moves(phase: Phase) -> Iterator[tuple[str, tuple[Exchange, ...]]]:
    """Yield the ways to move what is not to be reduced."""
    yield AT_ONCE, (phase,)
    if phase.nodes and can_share(phase):
        yield TWO_LEVELS, (InterNode(phase), IntraNode(phase))


def _reductions(change: TilingChange) -> Iterator[tuple[str, tuple[Exchange, ...]]]:
    """Yield the ways to reduce inside nodes first.

    Each rank reduces a piece of its node's sum, so the tiles are cut along an axis; the pieces of
    all nodes are reduced by the ranks that are to have them, or by the nearest.
    """
    split = node_dims(change.first.mesh, change.nodes)
    partial, kept_partial = split.dims(change.partial), split.dims(change.kept_partial)
    sizes = [dim.size for dim in split.mesh.dims]
    near = tuple(dim for dim in partial if dim in split.near)
    far = tuple(dim for dim in partial if dim not in split.near and sizes[dim] > 1)
    if not near or not far or not change.first.shape:
        return
    first = split.tiling(change.first)
    last = split.tiling(change.last) if change.same_mesh else change.last
    # Copies inside a node reduce a piece each, too.
    cutting = [
        dim for dim in (*near, *first.free_dims) if dim in split.near and dim not in kept_partial
    ]
    cutting = list(dict.fromkeys(cutting))
    bases = [first]
    if change.same_mesh:
        bases.append(_uncut(last, set(cutting)))
    for axis in range(len(first.shape)):
        here = _cut(first, axis, cutting)
        inside = Phase(
            first, here, change.op, near, (*kept_partial, *far), change.nodes, inside=True
        )
        for base in bases:
            there = _cut(base, axis, cutting)
            free = [dim for dim in there.free_dims if dim in far]
            there = _cut_longest(there, free)
            between = Phase(here, there, change.op, far, kept_partial, change.nodes)
            if change.same_mesh and _are_alike(there, last):
                yield TWO_LEVELS, (inside, between)
                continue
            for _, phases in _moves(
                Phase(there, last, kept_partial=kept_partial, nodes=change.nodes)
            ):
                yield TWO_LEVELS, (inside, between, *phases)


def cut_copies(last: Tiling, kept_partial: tuple[int, ...]) -> Tiling | None:
    """Return a tiling with its copies split, so that nothing is reduced twice; None if it has none.

    What is split innermost stays inside the block that its rank is to have.
    """
    free = [
        dim for dim in last.free_dims if dim not in kept_partial and last.mesh.dims[dim].size > 1
    ]
    return _cut_longest(last, free) if free and last.shape else None


def _cut_longest(tiling: Tiling, dims: list[int]) -> Tiling:
    """Cut by each of `dims` the axis whose longest block can be cut best."""
    for dim in dims:
        lengths = [int(np.diff(bounds).max(initial=0)) for bounds in tiling.bounds]
        tiling = _cut(tiling, lengths.index(max(lengths)), [dim])
    return tiling


def _cut(tiling: Tiling, axis: int, dims: list[int]) -> Tiling:
    """Cut the blocks of one axis by `dims`, innermost."""
    axis_dims, bounds = list(tiling.axis_dims), list(tiling.bounds)
    for dim in dims:
        bounds[axis] = cut_further(bounds[axis], Cut(tiling.mesh.dims[dim].size))
        axis_dims[axis] = (*axis_dims[axis], dim)
    return Tiling(tiling.mesh, tiling.shape, tuple(axis_dims), tuple(bounds), tiling.first_only)


def _uncut(tiling: Tiling, without: set[int]) -> Tiling:
    """Return a tiling that is cut only as far as none of the dims `without` cuts an axis."""
    axis_dims, bounds = [], []
    for dims, edges in zip(tiling.axis_dims, tiling.bounds, strict=True):
        count = next((at for at, dim in enumerate(dims) if dim in without), len(dims))
        axis_dims.append(dims[:count])
        bounds.append(edges[:: prod(tiling.mesh.dims[dim].size for dim in dims[count:])])
    return Tiling(tiling.mesh, tiling.shape, tuple(axis_dims), tuple(bounds))


def _are_alike(one: Tiling, other: Tiling) -> bool:
    return (
        one.axis_dims == other.axis_dims
        and one.first_only == other.first_only
        and all(map(np.array_equal, one.bounds, other.bounds))
    )


# -- a mesh whose dims run either inside nodes or between them -----------------------------


@dataclass(frozen=True, slots=True, eq=False)
class NodeDims:
    """The dims of a mesh, split so that each runs either inside nodes or between them.

    A dim of which some coordinates share a node is split in two: of 8 ranks on nodes of 4 in a
    row, the dim has a far part of 2 and a near part of 4. The ranks, and their order, stay.

    Attributes:
        mesh: The same ranks in the new dims.
        parts: For each dim of the old mesh its new ones, outermost first.
        near: The new dims along which all ranks are on one node, of more than one rank.
    """

    mesh: Mesh
    parts: tuple[tuple[int, ...], ...]
    near: frozenset[int]

    def dims(self, old: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new dims of old ones."""
        return tuple(part for dim in old for part in self.parts[dim])

    def tiling(self, old: Tiling) -> Tiling:
        """Return the same tiles over the new dims."""
        axis_dims = tuple(self.dims(dims) for dims in old.axis_dims)
        return Tiling(self.mesh, old.shape, axis_dims, old.bounds, self.dims(old.first_only))


@lru_cache(maxsize=16)
def node_dims(mesh: Mesh, nodes: tuple[int, ...]) -> NodeDims:
    """Split the dims of a mesh by the node of each rank.

    Where nodes follow no dims, nothing is near.

    Cost:
        O(ranks) for each divisor of a dim's size, once.
    """
    grid = np.array(nodes, np.int64)[mesh.ids.reshape(mesh.shape)]
    dims: list[tuple[str, int]] = []
    parts: list[tuple[int, ...]] = []
    near: set[int] = set()
    names = set(mesh.dim_names)
    for number, (name, size) in enumerate(mesh.dims):
        outer, inner, first_is_near = _factors(np.moveaxis(grid, number, 0))
        if inner == 1 or outer == 1:
            if outer == 1 and size > 1:
                near.add(len(dims))
            parts.append((len(dims),))
            dims.append((name, size))
            continue
        split = [(_unused(f"{name}_far", names), outer), (_unused(f"{name}_near", names), inner)]
        near.add(len(dims) + (not first_is_near))
        parts.append((len(dims), len(dims) + 1))
        dims += split[::-1] if first_is_near else split
    return NodeDims(Mesh(dims, mesh.ids), tuple(parts), frozenset(near))


def _factors(grid: Integers) -> tuple[int, int, bool]:
    """Return how many ranks along the first axis are far and near, and whether near is outermost.

    Of all ways to split it, that with the most near ranks.
    """
    size = len(grid)
    for inner in range(size, 1, -1):
        if size % inner:
            continue
        rows = grid.reshape(size // inner, inner, *grid.shape[1:])
        if (rows == rows[:, :1]).all():
            return size // inner, inner, False
        rows = grid.reshape(inner, size // inner, *grid.shape[1:])
        if (rows == rows[:1]).all():
            return size // inner, inner, True
    return size, 1, False


def _unused(name: str, names: set[str]) -> str:
    while name in names:
        name += "_"
    names.add(name)
    return name
