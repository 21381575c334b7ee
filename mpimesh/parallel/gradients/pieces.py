"""Pieces of parameters that the ranks of a group divide, and the state of a rank's pieces.

An optimizer that changes each element by itself does not care where parameters begin and end. So
a rank gives its optimizers *pieces*: of each bucket its own part, cut only where the optimizer,
the count of steps or the decay changes from one parameter to the next. A piece is a flat
parameter, whose values are part of the bucket's, and whose gradient is where the sums of the part
come.

A state is divided in the same way. Put together it is that of an optimizer of whole parameters, on
any number of ranks. A piece of no elements counts steps all the same, so that every rank knows the
count of each.

When buckets are cut anew, state moves, and each rank receives what its new parts need and no more.
Before and after, every element of a parameter has one rank that holds its state, or all of them
where the parameter is in no divided bucket any more. Both cuts follow from sizes that every rank
knows, so each knows what it sends to whom and what it gets, without asking.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arrays import Array, moved, namespace
from mpimesh.nn import Constant, Parameter
from mpimesh.optim import Optimizer
from mpimesh.optim.optimizer import state_dtype
from mpimesh.parallel.gradients.bucket import Bucket, Shard
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = [
    "Held",
    "HeldState",
    "Owned",
    "Pieces",
    "Run",
    "Span",
    "Spread",
    "moved_states",
    "overlap",
    "own_state",
    "parts_of",
    "piece_of",
    "runs_of",
    "spread_of",
    "sums_of",
    "whole_states",
]

Span = tuple[int, int]
"""Elements: the first, and the one after the last."""


def overlap(one: Span, other: Span) -> Span:
    """Return the elements of `one` that are in `other`, too; an empty span in `one` if none is."""
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


# -- runs: neighbours that are stepped alike ------------------------------------------------------


_NONE = Constant(0.0)  # a piece is never materialised


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a bucket that one optimizer changes alike, and has stepped equally often.

    Attributes:
        optimizer: Its number.
        places: Their places in it.
        starts: Where each begins in the bucket, and where the last ends.
    """

    optimizer: int
    places: tuple[int, ...]
    starts: tuple[int, ...]

    def span_of(self, at: int) -> Span:
        """Return where its parameter number `at` lies in the bucket."""
        return self.starts[at], self.starts[at + 1]

    def within(self, part: slice) -> slice:
        """Return which of its elements lie in `part`, counted in the bucket; may be none."""
        start = min(max(self.starts[0], part.start), part.stop)
        return slice(start, max(start, min(self.starts[-1], part.stop)))


def runs_of(
    owners: Sequence[tuple[int, int] | None], sizes: Sequence[int], kinds: Sequence[Hashable]
) -> list[Run]:
    """Cut a bucket into runs.

    Args:
        owners: For each parameter the number of its optimizer and its place there; None for one
            that no optimizer has.
        sizes: The elements of each.
        kinds: What only equals may share a run: how often each was stepped, and whether it decays.
    """
    runs: list[Run] = []
    before: tuple[int, Hashable] | None = None
    at = 0
    for owner, size, kind in zip(owners, sizes, kinds, strict=True):
        key = None if owner is None else (owner[0], kind)
        if owner is not None and key == before:
            last = runs.pop()
            runs.append(Run(owner[0], (*last.places, owner[1]), (*last.starts, at + size)))
        elif owner is not None:
            runs.append(Run(owner[0], (owner[1],), (at, at + size)))
        before = key
        at += size
    return runs


class _Piece(Parameter):
    """A flat parameter to whose gradient nothing is added: sums come into its memory by themselves.

    So zeros that were written when somebody looks would wipe sums out that came after them.
    """

    __slots__ = ()

    def zero_grad(self) -> None:
        super().zero_grad()
        self.write_zeros()


def piece_of(run: Run, bucket: Bucket, shard: Shard) -> Parameter:
    """Return this rank's part of a run as a flat parameter; it may have no elements."""
    inside = run.within(shard.part)
    size = inside.stop - inside.start
    piece = _Piece(f"{run.starts[0]} to {run.starts[-1]} of {bucket.name}", (size,), _NONE)
    start = inside.start - shard.part.start
    piece.data = shard.own[start : start + size]
    piece.grad = shard.memory[start : start + size]
    piece.attach_grad(piece.grad)  # for good: zeros are written into it
    return piece


# -- state ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owned:
    """An optimizer that is lent, and what it was given.

    Attributes:
        optimizer: It steps pieces now.
        parameters: Its parameters, whole.
        decays: For each whether weight decay is for it.
    """

    optimizer: Optimizer
    parameters: tuple[Parameter, ...]
    decays: tuple[bool, ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Owned:
        """Return what an optimizer has before it is lent."""
        return cls(optimizer, tuple(optimizer.params), tuple(optimizer.decays))


@dataclass(frozen=True, slots=True)
class Held:
    """The state of neighbouring elements of one parameter; there may be none.

    Attributes:
        steps: How often the parameter was stepped.
        start: The first of them, counted in the flat parameter.
        arrays: Flat arrays of their state, by name.
    """

    steps: int
    start: int
    arrays: Mapping[str, Array]

    @classmethod
    def whole(cls, state: Mapping[str, Any]) -> Held:
        """Return the state of all elements."""
        arrays = {name: array.reshape(-1) for name, array in state.items() if name != "steps"}
        return cls(int(state["steps"]), 0, arrays)

    def shaped(self, parameter: Parameter) -> dict[str, Any]:
        """Return the state of all elements as optimizers have it."""
        arrays = {name: array.reshape(parameter.shape) for name, array in self.arrays.items()}
        return {"steps": self.steps, **arrays}


@dataclass(frozen=True, slots=True)
class HeldState:
    """This rank's part of the state of one optimizer.

    Attributes:
        numbers: What is of no parameter.
        params: For each parameter that it was given what is held of its state.
    """

    numbers: Mapping[str, Any]
    params: Sequence[Held]


def whole_states(
    owned: Sequence[Owned], states: Sequence[Mapping[str, Any]]
) -> tuple[HeldState, ...]:
    """Return states of whole parameters as what a rank holds.

    Raises:
        ModuleError: As :meth:`mpimesh.optim.Optimizer.check_state`; so with all errors.
    """
    found = []
    for one, state in zip(owned, states, strict=True):
        one.optimizer.check_state(state, one.parameters)
        numbers = {name: value for name, value in state.items() if name != "params"}
        found.append(HeldState(numbers, [Held.whole(given) for given in state["params"]]))
    return tuple(found)


def own_state(run: Run, shard: Shard, held: Sequence[Held]) -> dict[str, Any]:
    """Cut this rank's part out of what is held of a run's parameters."""
    inside = run.within(shard.part)
    first = held[run.places[0]]
    own: dict[str, Any] = {"steps": first.steps}
    for name in first.arrays:
        # A state that was made without master values has none for any parameter of a dtype.
        if any(name not in held[place].arrays for place in run.places):
            continue
        parts: list[Array] = []
        for at, place in enumerate(run.places):
            begin, end = overlap(run.span_of(at), (inside.start, inside.stop))
            if begin < end:
                offset = run.starts[at] + held[place].start
                values = moved(held[place].arrays[name], np)
                parts.append(values[begin - offset : end - offset])
        own[name] = np.concatenate(parts) if parts else np.empty(0)
    return own


def parts_of(run: Run, shard: Shard, own: Mapping[str, Any]) -> dict[int, Held]:
    """Return by place what this rank holds of a run's parameters: views of its part's state."""
    inside = run.within(shard.part)
    found: dict[int, Held] = {}
    for at, place in enumerate(run.places):
        begin, end = overlap(run.span_of(at), (inside.start, inside.stop))
        arrays = {
            name: array[begin - inside.start : end - inside.start]
            for name, array in own.items()
            if name != "steps"
        }
        found[place] = Held(int(own["steps"]), begin - run.starts[at], arrays)
    return found


# -- pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """A bucket with its runs, and for each the place of this rank's piece in its optimizer."""

    bucket: Bucket
    shard: Shard
    runs: list[Run]
    places: list[int]

    def gather(self) -> list[CollectiveTensor]:
        handle = self.shard.gather()
        return [] if handle is None else [handle]


class Pieces:
    """The pieces of one rank, given to its optimizers. Making it is local.

    Args:
        owned: The optimizers; they go on with pieces in place of their parameters.
        buckets: The buckets; parameters of those that are not divided stay whole.
        states: What this rank holds of the states: at least that of its pieces.

    Raises:
        ModuleError: If a state does not fit, with the optimizers as before; so with all errors.
    """

    def __init__(
        self,
        owned: Sequence[Owned],
        buckets: Sequence[Bucket],
        states: Sequence[HeldState],
    ) -> None:
        self._owned = tuple(owned)
        owners = {
            id(parameter): (number, place)
            for number, one in enumerate(owned)
            for place, parameter in enumerate(one.parameters)
        }
        pieces: list[list[Parameter]] = [[] for _ in owned]
        decays: list[list[bool]] = [[] for _ in owned]
        own_states: list[list[dict[str, Any]]] = [[] for _ in owned]
        self._cuts: list[_Cut] = []
        divided: set[int] = set()
        for bucket in buckets:
            shard = bucket.shard
            if shard is None:
                continue
            divided.update(map(id, bucket.parameters))
            mine = [owners.get(id(parameter)) for parameter in bucket.parameters]
            kinds = [None if at is None else _kind(owned, states, *at) for at in mine]
            runs = runs_of(mine, [parameter.size for parameter in bucket.parameters], kinds)
            self._cuts.append(_Cut(bucket, shard, runs, []))
            for run in runs:
                number = run.optimizer
                self._cuts[-1].places.append(len(pieces[number]))
                pieces[number].append(piece_of(run, bucket, shard))
                decays[number].append(owned[number].decays[run.places[0]])
                own_states[number].append(own_state(run, shard, states[number].params))
        self._readers = list(
            {
                id(cut.bucket.group): cut.bucket.group for cut in self._cuts if cut.shard.is_whole
            }.values()
        )
        # What is in no bucket, such as frozen parameters, stays whole.
        self._whole: list[dict[int, int]] = [{} for _ in owned]
        for number, one in enumerate(owned):
            for place, parameter in enumerate(one.parameters):
                if id(parameter) not in divided:
                    self._whole[number][place] = len(pieces[number])
                    pieces[number].append(parameter)
                    decays[number].append(one.decays[place])
                    own_states[number].append(states[number].params[place].shaped(parameter))
        optimizers = [one.optimizer for one in owned]
        before = [(one, one.params, one.decays, one.state_dict()) for one in optimizers]
        try:
            for number, optimizer in enumerate(optimizers):
                state = {**states[number].numbers, "params": own_states[number]}
                optimizer.exchange_params(pieces[number], decays[number], state)
        except BaseException:
            for optimizer, params, decayed, state in before:
                optimizer.exchange_params(params, decayed, state)
            raise

    def describe(self) -> dict[str, list[str]]:
        """Return by group the runs of its buckets, which must be alike on all its ranks."""
        texts: dict[str, list[str]] = {}
        for cut in self._cuts:
            runs = [(run.optimizer, run.starts) for run in cut.runs]
            texts.setdefault(cut.bucket.group.name, []).append(str(runs))
        return texts

    def step(self, grad_factor: float) -> None:
        """Step all pieces, and give the values of each bucket to all ranks. Collective.

        The values of one bucket are on their way while the next one is stepped. If an update
        raises, the values still go out: no other rank waits, and the replicas stay equal.
        """
        handles: list[CollectiveTensor] = []
        done = moving = 0  # how many are stepped; the first that is not known to be there
        try:
            for cut in self._cuts:
                for run, place in zip(cut.runs, cut.places, strict=True):
                    optimizer = self._owned[run.optimizer].optimizer
                    optimizer.step_at(place, grad_factor=grad_factor)
                done += 1
                handles += cut.gather()
                if moving < len(handles):
                    moving += handles[moving].done()  # asking is what moves it
            for one, whole in zip(self._owned, self._whole, strict=True):
                for place in whole.values():
                    one.optimizer.step_at(place, grad_factor=grad_factor)
        finally:
            for cut in self._cuts[done:]:
                handles += cut.gather()
            # Where all read the values where they are, they wait until all have changed theirs.
            handles += [
                group.start_barrier(label="new values of parameters") for group in self._readers
            ]
            for handle in handles:
                handle.resolve()

    def held(self) -> tuple[HeldState, ...]:
        """Return what this rank holds of the states: views. Local."""
        found: list[dict[int, Held]] = []
        states = [one.optimizer.state_dict() for one in self._owned]
        for own, whole in zip(states, self._whole, strict=True):
            found.append({at: Held.whole(own["params"][piece]) for at, piece in whole.items()})
        for cut in self._cuts:
            for run, place in zip(cut.runs, cut.places, strict=True):
                own = states[run.optimizer]["params"][place]
                found[run.optimizer].update(parts_of(run, cut.shard, own))
        return tuple(
            HeldState(
                {name: value for name, value in own.items() if name != "params"},
                [params[place] for place in range(len(one.parameters))],
            )
            for one, own, params in zip(self._owned, states, found, strict=True)
        )

    def states(self) -> list[dict[str, Any]]:
        """Return for each optimizer its state, of whole parameters. Collective.

        Cost:
            One all-gather for each bucket, optimizer and array of its state.
        """
        mine = [one.optimizer.state_dict() for one in self._owned]
        found: list[dict[int, dict[str, Any]]] = [
            {place: own["params"][piece] for place, piece in whole.items()}
            for own, whole in zip(mine, self._whole, strict=True)
        ]
        for cut in self._cuts:
            for number in sorted({run.optimizer for run in cut.runs}):
                found[number].update(self._joined(cut, number, mine[number]["params"]))
        return [
            {**own, "params": [params[place] for place in range(len(one.parameters))]}
            for own, params, one in zip(mine, found, self._owned, strict=True)
        ]

    def _joined(
        self, cut: _Cut, number: int, mine: Sequence[Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return by place the states of one optimizer's parameters in one bucket. Collective."""
        shard, xp = cut.shard, cut.shard.xp
        runs = [
            (run, mine[place])
            for run, place in zip(cut.runs, cut.places, strict=True)
            if run.optimizer == number
        ]
        joined = {place: {"steps": state["steps"]} for run, state in runs for place in run.places}
        names = sorted({name for _, state in runs for name in state} - {"steps"})
        for name in names:
            own = xp.zeros(shard.sizes[cut.bucket.group.rank or 0], state_dtype(shard.dtype))
            for run, state in runs:
                if name in state:
                    inside = run.within(shard.part)
                    own[inside.start - shard.part.start : inside.stop - shard.part.start] = state[
                        name
                    ]
            label = f"{name} of {cut.bucket.name}"
            whole = cut.bucket.group.all_gather(own, sizes=shard.sizes, label=label).resolve()
            for run, state in runs:
                if name not in state:
                    continue
                for at, place in enumerate(run.places):
                    values = whole[run.starts[at] : run.starts[at + 1]]
                    shape = self._owned[number].parameters[place].shape
                    joined[place][name] = values.reshape(shape).copy()
        return joined


def sums_of(bucket: Bucket, without: set[int]) -> list[Array]:
    """Return this rank's part of the sums of a divided bucket, but for some parameters."""
    shard = bucket.shard
    if shard is None:
        return []
    if not any(id(parameter) in without for parameter in bucket.parameters):
        return [shard.memory]
    parts, end = [], 0
    for parameter in bucket.parameters:
        begin, end = end, end + parameter.size
        if id(parameter) not in without:
            start = max(begin, shard.part.start) - shard.part.start
            stop = min(end, shard.part.stop) - shard.part.start
            parts.append(shard.memory[start : max(start, stop)])
    return parts


def _kind(
    owned: Sequence[Owned], states: Sequence[HeldState], number: int, place: int
) -> tuple[int, bool]:
    """Return what only neighbours may share that are stepped as one."""
    return states[number].params[place].steps, owned[number].decays[place]


# -- moves between cuts ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The layout of a parameter on the ranks that divide its bucket.

    Attributes:
        parameter: The parameter.
        group: The ranks.
        spans: What each of them holds, counted in the parameter.
    """

    parameter: Parameter
    group: ProcessGroup
    spans: tuple[Span, ...]


def spread_of(buckets: Sequence[Bucket]) -> dict[int, Spread]:
    """Return how the parameters of divided buckets lie on their ranks, by their ids. Local.

    Those of one group stand in the same order on all its ranks.
    """
    found: dict[int, Spread] = {}
    for bucket in buckets:
        if bucket.shard is None:
            continue
        end = 0
        for parameter in bucket.parameters:
            begin, end = end, end + parameter.size
            spans, stop = [], 0
            for size in bucket.shard.sizes:
                start, stop = stop, stop + size
                first, last = overlap((begin, end), (start, stop))
                spans.append((first - begin, last - begin))
            found[id(parameter)] = Spread(parameter, bucket.group, tuple(spans))
    return found


def moved_states(
    owned: Sequence[Owned],
    states: Sequence[HeldState],
    before: Mapping[int, Spread],
    after: Mapping[int, Spread],
) -> list[HeldState]:
    """Return what this rank is to hold of states after buckets were cut anew.

    Collective over the groups of the buckets before.

    Args:
        owned: The optimizers.
        states: What this rank holds of their states.
        before: How parameters lay on the ranks.
        after: How they lie now; one that is not here, such as one that was frozen, is wanted by
            all ranks of its group before.

    Cost:
        One all-to-all for each group, dtype and array of the state: what changes its rank moves.
    """
    places = {
        id(parameter): (number, place)
        for number, one in enumerate(owned)
        for place, parameter in enumerate(one.parameters)
    }
    params = [list(state.params) for state in states]
    groups = {id(one.group): one.group for one in before.values()}
    for key, group in groups.items():
        mine = [one for at, one in before.items() if id(one.group) == key and at in places]
        held = [params[number][place] for number, place in (places[id(s.parameter)] for s in mine)]
        wanted = [
            after[id(one.parameter)].spans
            if id(one.parameter) in after
            else ((0, one.parameter.size),) * group.size
            for one in mine
        ]
        for spread, new in zip(mine, _moved(group, mine, held, wanted), strict=True):
            number, place = places[id(spread.parameter)]
            params[number][place] = new
    return [HeldState(state.numbers, own) for state, own in zip(states, params, strict=True)]


def _moved(
    group: ProcessGroup,
    spreads: Sequence[Spread],
    held: Sequence[Held],
    wanted: Sequence[Sequence[Span]],
) -> list[Held]:
    """Return what is wanted here of each parameter. Collective over `group`."""
    rank = group.rank or 0
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(held):
        for name in one.arrays:
            dtype = str(state_dtype(np.dtype(spreads[number].parameter.dtype)))
            kinds.setdefault((name, dtype), []).append(number)
    arrays: list[dict[str, Array]] = [{} for _ in held]
    for (name, dtype), numbers in sorted(kinds.items()):
        xp = namespace(held[numbers[0]].arrays[name])
        sends: list[Array] = []
        sizes = [0] * group.size
        for to in range(group.size):
            for number in numbers:
                start, stop = overlap(spreads[number].spans[rank], wanted[number][to])
                first = held[number].start
                sends.append(held[number].arrays[name][start - first : stop - first])
                sizes[to] += stop - start
        comes = [
            [overlap(spreads[number].spans[source], wanted[number][rank]) for number in numbers]
            for source in range(group.size)
        ]
        got = group.all_to_all(
            xp.concatenate([xp.empty(0, dtype), *sends]),
            sizes=sizes,
            recv_sizes=[sum(stop - start for start, stop in spans) for spans in comes],
            label=f"{name} of buckets cut anew",
        ).resolve()
        for number in numbers:
            start, stop = wanted[number][rank]
            arrays[number][name] = xp.empty(stop - start, dtype)
        at = 0
        for spans in comes:
            for number, (start, stop) in zip(numbers, spans, strict=True):
                first = wanted[number][rank][0]
                arrays[number][name][start - first : stop - first] = got[at : at + stop - start]
                at += stop - start
    return [
        Held(one.steps, spans[rank][0], own)
        for one, spans, own in zip(held, wanted, arrays, strict=True)
    ]
