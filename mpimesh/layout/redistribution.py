"""The plan of a redistribution: a value that every rank works out alike, by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_shape, size_text
from mpimesh.errors import LayoutError
from mpimesh.layout.boxes import Box, Regions, extent, local_box, local_regions, volume
from mpimesh.layout.layout import Layout, same_ranks
from mpimesh.layout.link_costs import DEFAULT_LINK_COSTS, LinkCost, LinkCosts
from mpimesh.layout.placement import Partial, Replicate, Shard
from mpimesh.layout.strategies import (
    MeshCollective,
    TilingChange,
    collective_of,
    exchange_s,
    strategies,
)
from mpimesh.layout.tiling import Cut, Integers, Tiling, places_of
from mpimesh.layout.two_levels import Exchange, InterNode, IntraNode, crossing
from mpimesh.trace import html

__all__ = ["RedistributionPlan", "Stage", "plan_redistribution"]


_ONE_SHOT_BYTES = 32 * 1024
"""Up to this size every rank reduces for itself what several are to have: one exchange less."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One exchange of a plan, as one rank carries it out.

    Attributes:
        regions: What the rank takes and gives.
        shape: The shape of what it takes into; None if it has no such array.
        in_place: Whether it takes into the array that it gives of.
        fill: The reduction with whose identity that array is filled before; empty for none.
        divisor: By what the boxes that are taken are divided afterwards.
    """

    regions: Regions
    shape: tuple[int, ...] | None
    in_place: bool = False
    fill: str = ""
    divisor: int = 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RedistributionPlan:
    """The way of an array from one layout to another, on the same mesh or on another.

    Where nothing is to be reduced, it is one exchange, in which every rank receives exactly what
    its new block has and its old one has not.

    Attributes:
        source: The layout that the array has.
        target: The layout that it is to have.
        shape: Its global shape.
        itemsize: Bytes of an element.
        phases: The exchanges, one after the other.
        divisor: By what the result of the reduction is to be divided, for ``Partial("mean")``.
        fill: The reduction with whose identity a block is filled before what it contributes is
            written into it; empty if the last exchange fills the block.
        links: What times were estimated with.
        strategies: The names of the strategies that there were, each with its estimated seconds;
            the first was taken. Empty if there was one only.
        collective: The collective of a group that does it in place of the exchanges, and moves the
            same, but that an all-reduce counts as a reduce-scatter and an all-gather of parts; None
            if the exchanges are done.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    itemsize: int
    phases: tuple[Exchange, ...]
    divisor: int = 1
    fill: str = ""
    links: LinkCosts = DEFAULT_LINK_COSTS
    strategies: tuple[tuple[str, float], ...] = ()
    collective: MeshCollective | None = None

    def block(self, rank: int) -> Box | None:
        """Return the box that `rank` has in the end; None if it is not in the target's mesh."""
        return _box_of(self.target, self.shape, rank)

    def source_block(self, rank: int) -> Box | None:
        """Return the box that `rank` has in the beginning; None if it is not in that mesh."""
        return _box_of(self.source, self.shape, rank)

    # -- one rank: exact -----------------------------------------------------------------

    def stages(self, rank: int, number_of: Callable[[int], int] = int) -> tuple[Stage, ...]:
        """Return the exchanges as `rank` carries them out.

        Args:
            rank: A rank.
            number_of: Gives the number of a rank in the communicator that carries them out.
        """
        return tuple([self._stage(number, rank, number_of) for number in range(len(self.phases))])

    def _stage(self, number: int, rank: int, number_of: Callable[[int], int]) -> Stage:
        phase = self.phases[number]
        target = phase.target.box(rank) if phase.target.holds(rank) else None
        if number >= self.into_block:
            target = self.block(rank)
        takes = []
        if target is not None:
            needs = phase.takes(rank)
            takes = [(local_box(need.box, target), need.box, need.ranks) for need in needs]
        block_of = partial(self._source_box, phase)
        last_reduction = max((at for at, other in enumerate(self.phases) if other.op), default=-1)
        return Stage(
            local_regions(takes, phase.gives(rank), rank, block_of, number_of, phase.op),
            None if target is None else extent(target),
            phase.in_place,
            self.fill if number == self.into_block else "",
            self.divisor if number == last_reduction else 1,
        )

    def _source_box(self, phase: Exchange, rank: int) -> Box:
        """Return the box that `rank` holds when an exchange begins."""
        block = self.block(rank) if phase.in_place else None
        return phase.source.box(rank) if block is None else block

    def received_bytes(self, rank: int) -> int:
        """Return the bytes that `rank` gets from others."""
        if (table := _all_reduced(self)) is not None:
            return self._of(rank, table[0])
        return self.itemsize * sum(_received(phase, rank)[0] for phase in self.phases)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that others get from `rank`."""
        if (table := _all_reduced(self)) is not None:
            return self._of(rank, table[0])  # each rank gives as much as it gets
        return self.itemsize * sum(
            volume(box) for phase in self.phases for _, box in phase.gives(rank)
        )

    def messages(self, rank: int) -> int:
        """Return how many boxes `rank` gets from others."""
        if (table := _all_reduced(self)) is not None:
            return self._of(rank, table[1])
        return sum(_received(phase, rank)[1] for phase in self.phases)

    def _of(self, rank: int, counts: Integers) -> int:
        """Return the count of one rank; 0 if it is not in the target's mesh."""
        mesh = self.target.mesh
        return int(counts[mesh.offset_of(rank)]) if mesh.contains_rank(rank) else 0

    def peak_bytes(self, rank: int, *, max_bytes: int = 0) -> int:
        """Return the most memory that `rank` needs at once, its old block included.

        Args:
            rank: A rank.
            max_bytes: The limit for packed messages; 0 for none. In shared memory nothing is
                packed, and it is less.
        """
        source_elements = 0 if (box := self.source_block(rank)) is None else volume(box)
        last = 0 if (box := self.block(rank)) is None else volume(box)
        peak, before = source_elements, 0
        for number, phase in enumerate(self.phases):
            if not phase.in_place:
                here = phase.target.mesh.contains_rank(rank)
                after = volume(phase.target.box(rank)) if here else 0
                after = last if number >= self.into_block else after
                blocks, before = before + after, after
            else:
                blocks = before
            packed = sum(volume(box) for _, box in phase.gives(rank)) + _received(phase, rank)[0]
            if max_bytes:
                packed = min(packed, max_bytes // self.itemsize)
            peak = max(peak, source_elements + blocks + packed)
        return self.itemsize * peak

    @property
    def into_block(self) -> int:
        """The number of the first exchange that writes into the block that each rank is to have."""
        return len(self.phases) - 1 - self.phases[-1].in_place

    # -- all ranks -------------------------------------------------------------------------

    def traffic(self) -> tuple[Integers, Integers]:
        """Return the bytes and the messages that each rank of the target's mesh gets from others.

        Shapes:
            result: (ranks of the target's mesh,) each, in row-major order.

        Cost:
            O(ranks), however many messages there are.
        """
        return _traffic(self)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks together get from others."""
        return _totals(self)[0]

    @property
    def total_messages(self) -> int:
        """Boxes that all ranks together get from others."""
        return _totals(self)[1]

    @property
    def crossing_bytes(self) -> int:
        """Bytes that all nodes together get from other nodes; 0 where all ranks share one."""
        return self.itemsize * sum(int(crossing(phase)[0].sum()) for phase in self.phases)

    def predicted_s(self, links: LinkCosts | None = None) -> float:
        """Return about how long it takes: of each exchange the longest of what a rank receives.

        Args:
            links: What a message costs and how fast bytes come; those of the plan if None.
        """
        if links is None and self.strategies:
            return self.strategies[0][1]
        links = self.links if links is None else links
        return sum(exchange_s(phase, self.itemsize, links) for phase in self.phases)

    def __repr__(self) -> str:
        return (
            f"<RedistributionPlan of shape {self.shape}, {self.itemsize} bytes each: "
            f"{self.source} -> {self.target}>"
        )

    def _repr_html_(self) -> str:
        """Show what moves, in notebooks."""
        return html.preformatted(str(self))

    def __str__(self) -> str:
        """Say in a few lines what moves."""
        return _plan_text(self)


def plan_redistribution(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    itemsize: int = 1,
    *,
    nodes: Sequence[int] | Integers = (),
    links: LinkCosts = DEFAULT_LINK_COSTS,
    collectives: bool = False,
) -> RedistributionPlan:
    """Plan how an array gets from `source` to `target`.

    Args:
        source: The layout that it has.
        target: The layout that it is to have; its mesh may be another one, over the same ranks,
            some of them, or none.
        shape: The array's global shape.
        itemsize: Bytes of an element.
        nodes: The node of each rank, so that copies on the same node are taken first, and bytes
            from other nodes come to each node once where that is faster.
        links: How fast bytes get from rank to rank. The same on all ranks that plan, as are all
            arguments.
        collectives: Whether the ranks have groups along the dims of the mesh, so that a
            collective of theirs may do it.

    Raises:
        LayoutError: If a layout does not fit `shape`, `itemsize` is no whole number of bytes, or
            `nodes` does not have every rank.

    Cost:
        O(ranks) integers for each mesh, once, and O(blocks that it meets) for each rank that is
        asked about.

    Example:
        >>> mesh = Mesh("dp=2,tp=2")
        >>> plan = plan_redistribution(Layout(mesh, "S0,R"), Layout(mesh, "R,S1"), (4, 4), 8)
        >>> plan.received_bytes(0), plan.total_bytes
        (32, 128)
    """
    shape = as_shape(shape, LayoutError)
    if as_int(itemsize, "itemsize", LayoutError, least=0) == 0:
        raise LayoutError("itemsize must be the bytes of an element, at least 1, got 0")
    if not isinstance(links, LinkCosts):
        raise LayoutError(f"links must be LinkCosts, got {links!r}")
    largest = int(max(source.mesh.ids.max(), target.mesh.ids.max()))
    near = _node_numbers(nodes)
    if near and len(near) <= largest:
        raise LayoutError(f"nodes must have every rank, 0 to {largest}, but has {len(near)}")
    near = near if len(set(near)) > 1 else ()
    return _plan(source, target, shape, itemsize, near, links, collectives)


def _node_numbers(nodes: Any) -> tuple[int, ...]:
    try:
        numbers = np.asarray(nodes)
        if not numbers.size:
            return ()
        if numbers.ndim == 1 and numbers.dtype.kind in "iu":
            return tuple(numbers.tolist())
    except (TypeError, ValueError, OverflowError):
        pass
    raise LayoutError(f"nodes must be a row of whole numbers, one for each rank, got {nodes!r}")


@lru_cache(maxsize=256)
def _plan(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    nodes: tuple[int, ...],
    links: LinkCosts,
    collectives: bool,
) -> RedistributionPlan:
    same_mesh = same_ranks(source.mesh, target.mesh)
    pairs = list(zip(source.placement, target.placement, strict=True)) if same_mesh else []
    kept_partial = tuple(
        dim
        for dim, (before, after) in enumerate(pairs)
        if isinstance(before, Partial) and before == after
    )
    partial = tuple(
        dim
        for dim, spec in enumerate(source.placement)
        if isinstance(spec, Partial) and dim not in kept_partial
    )
    op = source.partial_op if partial else ""
    divisor = prod(source.mesh.dims[d].size for d in partial) if op == "mean" else 1
    last, fill = _contributed(source, target, shape, same_mesh=same_mesh, kept_partial=kept_partial)
    change = TilingChange(
        source.tiling(shape),
        last,
        "sum" if op == "mean" else op,
        partial,
        kept_partial,
        nodes,
        same_mesh,
        prod(shape) * itemsize <= _ONE_SHOT_BYTES,
        _collective(source, target, shape, nodes) if collectives and same_mesh else None,
    )
    ranked = strategies(change, itemsize, links)
    by_name: dict[str, float] = {}
    for strategy in ranked:
        by_name.setdefault(strategy.name, strategy.predicted_s)  # of several, the fastest
    return RedistributionPlan(
        source,
        target,
        shape,
        itemsize,
        ranked[0].phases,
        divisor,
        fill,
        links,
        tuple(by_name.items()) if len(ranked) > 1 else (),
        ranked[0].collective,
    )


def _collective(
    source: Layout, target: Layout, shape: tuple[int, ...], nodes: tuple[int, ...]
) -> MeshCollective | None:
    """Return the collective that may do it: inside a node only an all-reduce is better."""
    collective = collective_of(source, target, shape)
    return (
        collective
        if collective is not None and (nodes or collective.kind == "all_reduce")
        else None
    )


@lru_cache(maxsize=256)
def _all_reduced(plan: RedistributionPlan) -> tuple[Integers, Integers] | None:
    """Return the traffic of an all-reduce that does it; None if something else does it.

    As the traffic of a mesh is counted: the bytes of a block fall into a part for each rank. A rank
    gets its own part of each other rank's summands, and of the result the parts of the others.
    """
    if plan.collective is None or plan.collective.kind != "all_reduce":
        return None
    mesh, dims, size = plan.target.mesh, plan.collective.dims, plan.collective.size
    places = places_of(mesh)
    one = mesh.dim_names.index(dims[0]) if len(dims) == 1 else None
    place = np.arange(mesh.size) if one is None else places.coords[:, one]
    blocks = [volume(plan.target.box(plan.shape, rank)) for rank in places.ranks.tolist()]
    nbytes = np.array(blocks, np.int64) * plan.itemsize
    own = nbytes // size + (place < nbytes % size)
    parts = np.minimum(nbytes, size) + (size - 2) * (own > 0)
    return nbytes + (size - 2) * own, parts


@lru_cache(maxsize=256)
def _totals(plan: RedistributionPlan) -> tuple[int, int]:
    if (table := _all_reduced(plan)) is not None:
        return int(table[0].sum()), int(table[1].sum())
    rows = [phase.received() for phase in plan.phases]
    elements, messages = (sum(int(column.sum()) for column in both) for both in zip(*rows))  # noqa: B905
    return elements * plan.itemsize, messages


@lru_cache(maxsize=256)
def _traffic(plan: RedistributionPlan) -> tuple[Integers, Integers]:
    if (table := _all_reduced(plan)) is not None:
        return table
    ranks = places_of(plan.target.mesh).ranks
    nbytes = np.zeros(len(ranks), np.int64)
    messages = nbytes.copy()
    for phase in plan.phases:
        offsets = places_of(phase.target.mesh).offsets_of(ranks)
        here = offsets >= 0
        elements, boxes = phase.received()
        nbytes[here] += elements[offsets[here]] * plan.itemsize
        messages[here] += boxes[offsets[here]]
    nbytes.flags.writeable = messages.flags.writeable = False
    return nbytes, messages


def _contributed(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    *,
    same_mesh: bool,
    kept_partial: tuple[int, ...],
) -> tuple[Tiling, str]:
    """Return what each rank puts into its block, and the reduction whose identity fills the rest.

    Along a `Partial` dim every element has to be counted once. A dim that split an axis goes on
    with the parts that it has; else coordinate 0 has all. For ``min`` and ``max`` copies do no
    harm, and for ``mean`` they are just right.
    """
    mesh = target.mesh
    splits: list[list[tuple[int, Cut]]] = [[] for _ in shape]
    for dim, spec in enumerate(target.placement):
        if isinstance(spec, Shard) and spec.axis < len(shape):
            splits[spec.axis].append((dim, Cut(mesh.dims[dim].size, spec.sizes)))
    Tiling.of(mesh, target.placement, shape)  # raises if it does not fit
    first_only: list[int] = []
    parts: list[tuple[int, int, Cut]] = []
    for dim, spec in enumerate(target.placement):
        if not isinstance(spec, Partial) or dim in kept_partial or spec.op == "mean":
            continue
        before = source.placement[dim] if same_mesh else Replicate()
        if isinstance(before, Shard):
            alone = not splits[before.axis]
            # Sizes are those of the whole axis.
            sizes = before.sizes if alone and source.sharding_dims(before.axis)[1:] == () else None
            parts.append((before.axis, dim, Cut(mesh.dims[dim].size, sizes)))
        elif spec.op in ("sum", "prod"):
            first_only.append(dim)
    for axis, dim, cut in parts:
        splits[axis].append((dim, cut))
    fill = target.partial_op if parts or first_only else ""
    return Tiling.of_cuts(mesh, shape, splits, tuple(first_only)), fill


def _received(phase: Exchange, rank: int) -> tuple[int, int]:
    """Return how many elements, in how many boxes, `rank` gets from others in an exchange."""
    elements = boxes = 0
    for need in phase.takes(rank):
        others = sum(holder != rank for holder in need.ranks)
        elements += others * volume(need.box)
        boxes += others
    return elements, boxes


def _box_of(layout: Layout, shape: tuple[int, ...], rank: int) -> Box | None:
    return layout.box(shape, rank) if layout.mesh.contains_rank(rank) else None


# -- as a person reads it ------------------------------------------------------------------


def _plan_text(plan: RedistributionPlan) -> str:
    """Return a few lines: from where to where, what moves, what it costs."""
    shape = " x ".join(map(str, plan.shape)) or "a scalar"
    nbytes, messages = plan.traffic()
    lines = [
        f"{shape}, {plan.itemsize} bytes each: {plan.source} -> {plan.target}",
        *(
            f"  {number}. {_phase_line(phase, plan.itemsize)}"
            for number, phase in enumerate(plan.phases, 1)
        ),
    ]
    if nbytes.any():
        most = int(nbytes.argmax())
        rank = plan.target.mesh.rank_of(most)
        most_bytes, most_messages = int(nbytes[most]), int(messages[most])
        lines.append(
            f"  all ranks receive {size_text(int(nbytes.sum()))} in {int(messages.sum())} "
            f"messages; rank {rank} the most: {size_text(most_bytes)} in {most_messages}"
        )
        lines.append(
            f"  peak memory of rank {rank}: {size_text(plan.peak_bytes(rank))}; "
            f"about {_seconds(plan.predicted_s())} at {_speeds(plan.links)}"
        )
        lines += _over_nodes(plan)
    else:
        lines.append("  nothing moves between ranks")
    return "\n".join(lines)


def _phase_line(phase: Exchange, itemsize: int) -> str:
    elements, messages = phase.received()
    if not elements.any():
        return "each rank keeps or cuts what it has"
    what = f"{size_text(int(elements.sum()) * itemsize)} in {int(messages.sum())} messages"
    if phase.nodes and (far := int(crossing(phase)[0].sum())):
        what += f", {size_text(far * itemsize)} of it between nodes"
    if phase.op:
        dims = ", ".join(phase.source.mesh.dim_names[dim] for dim in phase.partial)
        return f"reduce ({phase.op}) over {dims} on the way: {what}"
    if isinstance(phase, InterNode):
        return f"each rank takes what is near, and a part of what its node lacks: {what}"
    if isinstance(phase, IntraNode):
        return f"ranks of a node read these parts of each other: {what}"
    return f"each rank takes what it lacks: {what}"


def _over_nodes(plan: RedistributionPlan) -> list[str]:
    """Say which strategy was taken over nodes, if there was a choice."""
    if len(plan.strategies) < 2:
        return []
    (name, name_s), (other, other_s), *_ = plan.strategies
    why = ", whose own way is measured" if other_s < name_s else ""
    return [f"  done {name}{why}; {other} it would take about {_seconds(other_s)}"]


def _speeds(links: LinkCosts) -> str:
    near, far = links.intra_node, links.inter_node
    if near == far:
        return f"{_speed(near)}, {_source(near)}"
    between = f"{_speed(far)} between nodes, {_source(far)}"
    if near.measured == far.measured:
        return f"{_speed(near)} in a node, {between}"
    return f"{_speed(near)} in a node, {_source(near)}, and {between}"


def _source(link: LinkCost) -> str:
    return "as measured" if link.measured else "as assumed"


def _speed(link: LinkCost) -> str:
    return f"{link.latency_s * 1e6:.3g} us a message and {link.bytes_per_s / 1e9:.3g} GB/s"


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.1f} {unit}"
    return f"{value * 1e6:.1f} us"
