"""Pieces of parameters that the ranks of a group divide, and layouts of the optimizer's state.

An optimizer that changes each element by itself does not care where parameters begin and end. So
a rank gives its optimizers *pieces*: of each bucket its own part, cut only where the optimizer,
the count of steps or the decay changes from one parameter to the next. A piece is a flat
parameter, whose values are part of the bucket's, and whose gradient is where the sums of the part
come.

The state of a parameter is split as its values are: flat, as ``S0`` on the ranks that divide its
bucket, or as ``R`` where it is in no divided bucket. All that moves it is a redistribution from one
such layout to another, planned as that of any array: a state of whole parameters is taken over
(R to S0, of what each rank has itself), the whole one is put together (S0 to R), or it moves when
buckets are cut anew (S0 to another S0, or to R if the parameter was frozen). Layouts follow from
sizes that every rank knows, so each knows what it sends to whom and what it gets, without asking.

A piece of no elements counts steps all the same, so that every rank knows the count of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from mpimesh.arrays import Array, moved, namespace
from mpimesh.layout import Layout, Phase, Shard
from mpimesh.layout.boxes import Box, local_box, slices, volume
from mpimesh.mesh import Mesh
from mpimesh.nn import Constant, Parameter
from mpimesh.optim import Optimizer
from mpimesh.parallel.bucket import Bucket, BucketShard, flat_places, inside
from mpimesh.runtime import CollectiveTensor, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "Layouts",
    "LentOptimizer",
    "OptimizerShards",
    "State",
    "layouts_of",
    "places_of",
    "redistributed",
    "runs_of",
]

State = Mapping[str, Any]
"""The state of an optimizer, as its `state_dict`. Of a parameter with a layout it has flat arrays,
of this rank's part."""

Layouts = Mapping[int, tuple[ProcessGroup, Layout]]
"""By its id for each divided parameter the ranks that divide it, and its flat layout on them. A
parameter that is not here is whole on every rank."""


@dataclass(frozen=True, slots=True)
class LentOptimizer:
    """An optimizer that steps pieces, and what it was made for.

    Attributes:
        optimizer: The optimizer.
        parameters: Its parameters, whole.
        decays: For each whether weight decay is for it.
    """

    optimizer: Optimizer
    parameters: tuple[Parameter, ...]
    decays: tuple[bool, ...]


def places_of(lent: Sequence[LentOptimizer]) -> dict[int, tuple[int, int]]:
    """Return by its id the number of each parameter's optimizer, and its place there."""
    return {
        id(parameter): (number, place)
        for number, each in enumerate(lent)
        for place, parameter in enumerate(each.parameters)
    }


# -- layouts of states ----------------------------------------------------------------------------


def layouts_of(buckets: Sequence[Bucket]) -> Layouts:
    """Return how the parameters of divided buckets lie on their ranks. Local.

    Those of one group stand in the same order on all its ranks.
    """
    layouts: dict[int, tuple[ProcessGroup, Layout]] = {}
    for bucket in buckets:
        if bucket.shard is None:
            continue
        mesh = _whole(bucket.group.size).mesh
        parts = [slice(*edges) for edges in pairwise([0, *accumulate(bucket.shard.sizes)])]
        for parameter, place in flat_places(bucket.parameters):
            mine = [inside(place, part) for part in parts]
            sizes = [one.stop - one.start for one in mine]
            layouts[id(parameter)] = bucket.group, Layout(mesh, [Shard.of_sizes(0, sizes)])
    return layouts


@cache
def _whole(ranks: int) -> Layout:
    """Return the layout of an array that each of so many ranks has."""
    return Layout.replicated(Mesh([("dp", ranks)]))


def redistributed(
    lent: Sequence[LentOptimizer], states: Sequence[State], before: Layouts, after: Layouts
) -> list[dict[str, Any]]:
    """Return states whose parameters lie in other layouts. Collective over the groups of `before`.

    Args:
        lent: The optimizers.
        states: Their states, as they lie now.
        before: The layouts that they have.
        after: Those that they are to have. A parameter that is in neither keeps its state.

    Cost:
        One all-to-all for each group, array of the state and dtype, or an all-gather where all
        ranks are to have all: each receives what it is to have and has not. Whole arrays are cut
        where they are, and where no layout changes nothing is exchanged.
    """
    places = places_of(lent)
    params = [list(state["params"]) for state in states]
    batches: dict[ProcessGroup, list[int]] = {}
    for key, (group, _) in {**before, **after}.items():
        if key in places:
            batches.setdefault(group, []).append(key)
    for group, keys in batches.items():
        whole = group, _whole(group.size)
        kinds: dict[tuple[str, str], list[_Move]] = {}
        for key in keys:
            number, place = places[key]
            parameter, old = lent[number].parameters[place], params[number][place]
            new = params[number][place] = {"steps": int(old["steps"])}
            source, target = before.get(key, whole)[1], after.get(key, whole)[1]
            way = _way(source, target, parameter.size, group.rank or 0)
            shape = (-1,) if key in after else parameter.shape
            for name in old.keys() - {"steps"}:
                move = _Move(way, old[name].reshape(-1), new, shape)
                kinds.setdefault((name, old[name].dtype.str), []).append(move)
        for (name, _), moves in sorted(kinds.items(), key=itemgetter(0)):
            _exchange(group, name, moves)
    return [{**state, "params": own} for state, own in zip(states, params, strict=True)]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One rank's part in bringing a flat array from one layout to another.

    Attributes:
        sizes: The elements that each rank has of it.
        source: The box that this rank has.
        target: The box that it is to have.
        takes: What of that it gets, and from whom, which may be itself.
        gives: Which other ranks take what of this one.
        changes: Whether any rank may have to get something from another.
        joins: Whether every rank is to have all.
    """

    sizes: tuple[int, ...]
    source: Box
    target: Box
    takes: list[tuple[Box, int]]
    gives: list[tuple[int, Box]]
    changes: bool
    joins: bool


@lru_cache(maxsize=4096)
def _way(source: Layout, target: Layout, size: int, rank: int) -> _Exchange:
    """Return how an array of `size` elements gets from one layout to another. Local."""
    first, last = source.tiling((size,)), target.tiling((size,))
    phase = Phase(first, last)
    return _Exchange(
        tuple(volume(first.box(each)) for each in source.mesh.ids),
        first.box(rank),
        last.box(rank),
        [(need.box, need.ranks[0]) for need in phase.takes(rank)],
        phase.gives(rank),
        not source.is_replicated and source != target,
        target.is_replicated,
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """An array of one parameter's state on its way.

    Attributes:
        way: The way.
        array: This rank's part of it, flat.
        into: The state that gets the new part.
        shape: The shape of that.
    """

    way: _Exchange
    array: Array
    into: dict[str, Any]
    shape: tuple[int, ...]

    def part(self, box: Box) -> Array:
        """Return a box of the whole array that this rank has."""
        return self.array[slices(local_box(box, self.way.source))]


def _exchange(group: ProcessGroup, name: str, moves: Sequence[_Move]) -> None:
    """Bring arrays of one name and dtype to their new layouts. Collective if any rank lacks one."""
    rank, label = group.rank or 0, f"{name} of optimizer states"
    comes: Array = None
    sizes = [0] * group.size
    if any(move.way.changes for move in moves):
        xp, dtype = namespace(moves[0].array), moves[0].array.dtype
        if all(move.way.joins for move in moves):
            sizes = [sum(each) for each in zip(*(move.way.sizes for move in moves), strict=True)]
            mine = xp.concatenate([move.array for move in moves])
            comes = group.all_gather(mine, sizes=sizes, label=label).resolve()
        else:
            goes: list[list[Array]] = [[] for _ in sizes]
            for move in moves:
                for other, box in move.way.gives:
                    goes[other].append(move.part(box))
                for box, holder in move.way.takes:
                    sizes[holder] += volume(box) if holder != rank else 0
            comes = group.all_to_all(
                xp.concatenate([xp.empty(0, dtype), *chain(*goes)]),
                sizes=[sum(part.size for part in parts) for parts in goes],
                recv_sizes=sizes,
                label=label,
            ).resolve()
    starts = [0, *accumulate(sizes)]  # of what is left of each rank's
    for move in moves:
        if move.way.takes == [(move.way.target, rank)] and not move.way.joins:
            move.into[name] = move.part(move.way.target)  # nothing to be put together
            continue
        block = namespace(move.array).empty(volume(move.way.target), move.array.dtype)
        for box, holder in move.way.takes:
            if holder == rank:
                part = move.part(box)
            else:
                part = comes[starts[holder] : starts[holder] + volume(box)]
                starts[holder] += volume(box)
            block[slices(local_box(box, move.way.target))] = part
        move.into[name] = block.reshape(move.shape)


# -- pieces ---------------------------------------------------------------------------------------


_NONE = Constant(0.0)  # a piece is never materialised


class _Piece(Parameter):
    """A flat parameter to whose gradient nothing is added: sums come into its memory by themselves.

    So zeros written at a read would wipe out sums that came after them.
    """

    __slots__ = ()

    def zero_grad(self) -> None:
        super().zero_grad()
        self.write_zeros()


def runs_of(kinds: Sequence[Hashable]) -> list[range]:
    """Return the runs of neighbours of one kind, as their places; None is no kind."""
    runs: list[range] = []
    stop = 0
    for kind, members in groupby(kinds):
        start, stop = stop, stop + len(list(members))
        if kind is not None:
            runs.append(range(start, stop))
    return runs


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a piece by those of the parts that lie in it, one after the other."""
    # A state that was made without master values has none for any parameter of a dtype.
    names = set.intersection(*map(set, states)) - {"steps"}
    arrays = {name: np.concatenate([moved(one[name], np) for one in states]) for name in names}
    return {"steps": states[0]["steps"], **arrays}


def _kind(
    lent: Sequence[LentOptimizer], states: Sequence[State], owner: tuple[int, int] | None
) -> tuple[int, int, bool] | None:
    """Return what only neighbours may share that are stepped as one; None without an optimizer."""
    if owner is None:
        return None
    number, place = owner
    return number, states[number]["params"][place]["steps"], lent[number].decays[place]


_Lot = tuple[Parameter, bool, Mapping[str, Any]]
"""A piece or a whole parameter for an optimizer, whether it decays, and its state."""


@dataclass(frozen=True, slots=True)
class _StateRun:
    """Neighbours in a divided bucket that one optimizer steps alike.

    Attributes:
        members: Their places in the bucket.
        optimizer: The number of the optimizer.
        places: Their places in it, when it has them whole.
        piece: The place of the piece that it has instead.
    """

    members: range
    optimizer: int
    places: tuple[int, ...]
    piece: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """A divided bucket, cut into pieces.

    Attributes:
        bucket: The bucket.
        shard: This rank's part of it.
        edges: Where each parameter begins in that part, and where the last one ends.
        runs: The contents of each piece.
    """

    bucket: Bucket
    shard: BucketShard
    edges: list[int]
    runs: list[_StateRun]

    def piece(self, members: range) -> Parameter:
        """Return this rank's part of neighbours as a flat parameter; it may have no elements."""
        start, stop = self.edges[members.start], self.edges[members.stop]
        name = f"parameters {members.start} to {members.stop - 1} of {self.bucket.name}"
        piece = _Piece(name, (stop - start,), _NONE)
        piece.data = self.shard.own[start:stop]
        piece.grad = self.shard.memory[start:stop]
        piece.attach_grad(piece.grad)  # for good: zeros are written into it
        return piece


class OptimizerShards:
    """The pieces of one rank, given to its optimizers. Collective over the groups of `before`.

    Args:
        lent: The optimizers; they go on with pieces in place of their parameters.
        buckets: The buckets; parameters of those that are not divided stay whole.
        states: The states of the optimizers, of all their parameters.
        before: How these lie; empty if they are of whole parameters.

    Attributes:
        layouts: How the parameters lie now.

    Raises:
        ModuleError: If a state does not fit, with the optimizers as before; so with all errors.
    """

    def __init__(
        self,
        lent: Sequence[LentOptimizer],
        buckets: Sequence[Bucket],
        states: Sequence[State],
        before: Layouts,
    ) -> None:
        self._lent = tuple(lent)
        self.layouts = layouts_of(buckets)
        self._cuts: list[_Cut] = []
        self._whole: list[dict[int, int]] = [{} for _ in lent]
        states = redistributed(lent, states, before, self.layouts)
        lots: list[list[_Lot]] = [[] for _ in lent]
        places = places_of(lent)
        for bucket in buckets:
            if bucket.shard is None:
                continue
            rank = bucket.group.rank or 0
            boxes = [self.layouts[id(one)][1].box((one.size,), rank) for one in bucket.parameters]
            cut = _Cut(bucket, bucket.shard, [0, *accumulate(map(volume, boxes))], [])
            self._cuts.append(cut)
            owners = [places.get(id(parameter)) for parameter in bucket.parameters]
            for members in runs_of([_kind(lent, states, owner) for owner in owners]):
                run = [owner for owner in owners[members.start : members.stop] if owner]
                number, at = run[0][0], tuple(place for _, place in run)
                cut.runs.append(_StateRun(members, number, at, len(lots[number])))
                state = _joined([states[number]["params"][place] for place in at])
                lots[number].append((cut.piece(members), lent[number].decays[at[0]], state))
        for number, each in enumerate(lent):  # what is in no bucket, such as frozen, stays whole
            for place, parameter in enumerate(each.parameters):
                if id(parameter) not in self.layouts:
                    self._whole[number][place] = len(lots[number])
                    state = states[number]["params"][place]
                    lots[number].append((parameter, each.decays[place], state))
        optimizers = [each.optimizer for each in lent]
        earlier = [(one, one.params, one.decays, one.live_state()) for one in optimizers]
        try:
            for optimizer, state, lot in zip(optimizers, states, lots, strict=True):
                optimizer.exchange_params(
                    [parameter for parameter, _, _ in lot],
                    [decays for _, decays, _ in lot],
                    {**state, "params": [own for _, _, own in lot]},
                )
        except BaseException:
            for optimizer, whole, decays, own in earlier:
                optimizer.exchange_params(whole, decays, own)
            raise

    def agree(self) -> None:
        """Return if the ranks that divide a bucket have the same pieces in it. Collective.

        Raises:
            MismatchError: On every rank of the bucket, if they differ.
        """
        rules: dict[ProcessGroup, list[str]] = {}
        for cut in self._cuts:
            runs = [(run.optimizer, run.members) for run in cut.runs]
            rules.setdefault(cut.bucket.group, []).append(str(runs))
        for group, texts in rules.items():
            agree(group, Call("divided buckets", group.name, rule="; ".join(texts)))

    def sums(self, without: set[int]) -> list[Array]:
        """Return this rank's parts of the sums of divided buckets, but for some parameters."""
        sums: list[Array] = []
        for cut in self._cuts:
            memory, keys = cut.shard.memory, [id(one) for one in cut.bucket.parameters]
            if without.isdisjoint(keys):
                sums.append(memory)
                continue
            spans = zip(keys, pairwise(cut.edges), strict=True)
            sums += [memory[start:stop] for key, (start, stop) in spans if key not in without]
        return sums

    def step(self, grad_factor: float) -> tuple[BaseException | None, list[CollectiveTensor]]:
        """Step all pieces, and give the values of each bucket to all ranks. Collective.

        The values of one bucket are on their way while the next one is stepped. Where all ranks
        read values in place, all are there when every rank has come back.

        Returns:
            What an update raised, None if none did, and what is on its way. The rest is not stepped
            then, but its values still go out: no other rank waits, and the replicas stay equal.
        """
        problem: BaseException | None = None
        handles: list[CollectiveTensor] = []
        moving = 0  # the first that is not known to be there

        def update(number: int, piece: int) -> None:
            nonlocal problem
            if problem is None:
                try:
                    self._lent[number].optimizer.step_at(piece, grad_factor=grad_factor)
                except BaseException as error:
                    problem = error

        for cut in self._cuts:
            for run in cut.runs:
                update(run.optimizer, run.piece)
            handle = cut.shard.gather()
            if handle is not None:
                handles.append(handle)
            if moving < len(handles):
                moving += handles[moving].done()  # asking is what moves it
        for number, whole in enumerate(self._whole):
            for piece in whole.values():
                update(number, piece)
        return problem, handles

    def states(self) -> list[dict[str, Any]]:
        """Return the states of this rank's parts of the parameters: views. Local."""
        states = [each.optimizer.live_state() for each in self._lent]
        params: list[dict[int, Mapping[str, Any]]] = [
            {place: state["params"][piece] for place, piece in whole.items()}
            for state, whole in zip(states, self._whole, strict=True)
        ]
        for cut in self._cuts:
            for run in cut.runs:
                own = states[run.optimizer]["params"][run.piece]
                edges = cut.edges[run.members.start : run.members.stop + 1]
                for place, (start, stop) in zip(run.places, pairwise(edges), strict=True):
                    inside = slice(start - edges[0], stop - edges[0])
                    params[run.optimizer][place] = {
                        name: value if name == "steps" else value[inside]
                        for name, value in own.items()
                    }
        return [
            {**state, "params": [each[place] for place in range(len(each))]}
            for state, each in zip(states, params, strict=True)
        ]

    def whole_states(self) -> list[dict[str, Any]]:
        """Return for each optimizer its state, of whole parameters. Collective.

        Cost:
            One all-gather for each bucket and array of its state.
        """
        states = self.states()
        for cut in self._cuts:  # one after the other, for what is on its way needs memory, too
            own = {id(one): self.layouts[id(one)] for one in cut.bucket.parameters}
            states = redistributed(self._lent, states, own, {})
        return states
