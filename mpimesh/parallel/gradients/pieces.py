"""What a rank steps of parameters that the ranks of a group divide, and the state of that.

An optimizer that changes each element by itself does not care where parameters begin and end. So
a rank gives its optimizers *pieces*: of each bucket its own part, cut only where the optimizer or
the count of steps changes from one parameter to the next. A piece is a flat parameter, whose
values are part of the bucket's, and whose gradient is where the sums of the part come.

A state is divided in the same way. Put together it is that of an optimizer of whole parameters, on
any number of ranks. A piece of no elements counts steps all the same, so that every rank knows the
count of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpimesh.arrays import namespace
from mpimesh.nn import Parameter
from mpimesh.optim import Optimizer
from mpimesh.optim.optimizer import state_dtype
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.runs import (
    Run,
    check_shapes,
    own_state,
    piece_of,
    runs_of,
    steps_at,
)
from mpimesh.parallel.gradients.shard import Shard
from mpimesh.runtime import CollectiveTensor

__all__ = ["Pieces"]


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
        optimizers: The optimizers; they go on with pieces in place of their parameters.
        owned: The parameters of each, whole.
        buckets: The buckets; parameters of those that are not divided stay whole.
        states: For each optimizer a state of its whole parameters.

    Raises:
        ModuleError: If a state does not fit, with the optimizers as before; so with all errors.
        ShapeError: If an array of a state has another shape than its parameter.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        owned: Sequence[Sequence[Parameter]],
        buckets: Sequence[Bucket],
        states: Sequence[Mapping[str, Any]],
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._owned = tuple(tuple(parameters) for parameters in owned)
        owners = {
            id(parameter): (number, place)
            for number, parameters in enumerate(self._owned)
            for place, parameter in enumerate(parameters)
        }
        for optimizer, parameters, state in zip(optimizers, self._owned, states, strict=True):
            optimizer.check_kind(state, len(parameters))
            check_shapes(parameters, state["params"])
        pieces: list[list[Parameter]] = [[] for _ in optimizers]
        own_states: list[list[dict[str, Any]]] = [[] for _ in optimizers]
        self._cuts: list[_Cut] = []
        divided: set[int] = set()
        for bucket in buckets:
            shard = bucket.shard
            if shard is None:
                continue
            divided.update(map(id, bucket.parameters))
            mine = [owners.get(id(parameter)) for parameter in bucket.parameters]
            steps = [0 if at is None else steps_at(states[at[0]], at[1]) for at in mine]
            runs = runs_of(mine, [parameter.size for parameter in bucket.parameters], steps)
            self._cuts.append(_Cut(bucket, shard, runs, []))
            for run in runs:
                self._cuts[-1].places.append(len(pieces[run.optimizer]))
                pieces[run.optimizer].append(piece_of(run, bucket, shard))
                state = states[run.optimizer]["params"]
                own_states[run.optimizer].append(own_state(run, shard, state))
        # What is in no bucket, such as frozen parameters, stays whole.
        self._whole: list[dict[int, int]] = [{} for _ in optimizers]
        for number, parameters in enumerate(self._owned):
            for place, parameter in enumerate(parameters):
                if id(parameter) not in divided:
                    self._whole[number][place] = len(pieces[number])
                    pieces[number].append(parameter)
                    own_states[number].append(states[number]["params"][place])
        before = [(one, one.params, one.state_dict()) for one in optimizers]
        try:
            for one, given, parts, own in zip(optimizers, states, pieces, own_states, strict=True):
                one.exchange_params(parts, {**given, "params": own})
        except BaseException:
            for one, parts_before, state_before in before:
                one.exchange_params(parts_before, state_before)
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
                    self._optimizers[run.optimizer].step_at(place, grad_factor=grad_factor)
                handles.append(cut.gather())
                moving += handles[moving].done()  # asking is what moves it
            for optimizer, whole in zip(self._optimizers, self._whole, strict=True):
                for place in whole.values():
                    optimizer.step_at(place, grad_factor=grad_factor)
        finally:
            handles.extend(cut.gather() for cut in self._cuts[len(handles) :])
            for handle in handles:
                handle.resolve()

    def states(self) -> list[dict[str, Any]]:
        """Return for each optimizer its state, of whole parameters. Collective.

        Cost:
            One all-gather for each bucket, optimizer and array of its state.
        """
        mine = [one.state_dict() for one in self._optimizers]
        found: list[dict[int, dict[str, Any]]] = [
            {place: own["params"][piece] for place, piece in whole.items()}
            for own, whole in zip(mine, self._whole, strict=True)
        ]
        for cut in self._cuts:
            for number in sorted({run.optimizer for run in cut.runs}):
                found[number].update(self._joined(cut, number, mine[number]["params"]))
        return [
            {**own, "params": [params[place] for place in range(len(parameters))]}
            for own, params, parameters in zip(mine, found, self._owned, strict=True)
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
            own = xp.zeros(shard.sizes[cut.bucket.group.rank or 0], state_dtype(flat.dtype))
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
                    shape = self._owned[number][place].shape
                    joined[place][name] = values.reshape(shape).copy()
        return joined
