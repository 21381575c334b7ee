"""Pieces of parameters that the ranks of a group divide, and the state of a rank's pieces.

An optimizer that changes each element by itself does not care where parameters begin and end. So
a rank gives its optimizers *pieces*: of each bucket its own part, cut only where the optimizer,
the count of steps or the decay changes from one parameter to the next. A piece is a flat
parameter, whose values are part of the bucket's, and whose gradient is where the sums of the part
come.

A state is divided in the same way. Put together it is that of an optimizer of whole parameters, on
any number of ranks. A piece of no elements counts steps all the same, so that every rank knows the
count of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpimesh.arrays import Array, namespace
from mpimesh.nn import Parameter
from mpimesh.optim.optimizer import state_dtype
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.held import Held, HeldState, Owned, own_state, parts_of
from mpimesh.parallel.gradients.runs import Run, piece_of, runs_of
from mpimesh.parallel.gradients.shard import Shard
from mpimesh.runtime import CollectiveTensor

__all__ = ["Pieces", "sums_of"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A bucket with its runs, and for each the place of this rank's piece in its optimizer."""

    bucket: Bucket
    shard: Shard
    runs: list[Run]
    places: list[int]

    def gather(self) -> CollectiveTensor:
        return self.shard.gather(f"values of {self.bucket.name}")


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
        moving = 0  # the first that is not known to be done
        try:
            for cut in self._cuts:
                for run, place in zip(cut.runs, cut.places, strict=True):
                    optimizer = self._owned[run.optimizer].optimizer
                    optimizer.step_at(place, grad_factor=grad_factor)
                handles.append(cut.gather())
                moving += handles[moving].done()  # asking is what moves it
            for one, whole in zip(self._owned, self._whole, strict=True):
                for place in whole.values():
                    one.optimizer.step_at(place, grad_factor=grad_factor)
        finally:
            handles.extend(cut.gather() for cut in self._cuts[len(handles) :])
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
        shard, flat = cut.shard, cut.bucket.flat
        runs = [
            (run, mine[place])
            for run, place in zip(cut.runs, cut.places, strict=True)
            if run.optimizer == number
        ]
        joined = {place: {"steps": state["steps"]} for run, state in runs for place in run.places}
        names = sorted({name for _, state in runs for name in state} - {"steps"})
        for name in names:
            xp = namespace(flat)
            own = xp.zeros(shard.sizes[cut.bucket.group.rank or 0], state_dtype(shard.values.dtype))
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
