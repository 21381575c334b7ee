"""What a model has to do about those of its layers that are split over a group.

Such a model is trained by :class:`~mpimesh.DataParallel` or :class:`~mpimesh.PipelineParallel`
like any other: the ranks along the group's dim of the mesh do the same actions in the same order,
each on its part of the layers. What differs stands here: some gradients are summed over the group
once a step, parameters are counted once in norms, states are put together and cut, and a rank
that fails in a layer does not leave the others waiting in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray, namespace, to_numpy
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Parameter
from mpimesh.parallel.first_values import leaves
from mpimesh.parallel.replicas import agree_values
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.tensor_group import TensorGroup, TensorWatch
from mpimesh.parallel.tensor_parameter import TensorParameter
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = ["TensorModel", "local_part", "sum_shared_gradients", "tensor_groups"]


def tensor_groups(*layers: object) -> list[TensorGroup]:
    """Return the groups over which `layers`, and those under them, are split. Local."""
    found: dict[int, TensorGroup] = {}
    for top in layers:
        for layer in leaves(top):
            for value in getattr(layer, "__dict__", {}).values():
                one = value if isinstance(value, TensorGroup) else getattr(value, "tensor", None)
                if isinstance(one, TensorGroup):
                    found[id(one)] = one
    return list(found.values())


class TensorModel:
    """The layers of a model that are split over a group of ranks, as one of these sees them.

    Args:
        stages: All stages of the model.

    Attributes:
        group: The ranks; None if no layer is split.

    Raises:
        ModuleError: If layers are split over different groups.
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._groups = tensor_groups(*stages)
        groups = {id(one.group): one.group for one in self._groups}
        if len(groups) > 1:
            names = sorted(group.name for group in groups.values())
            raise ModuleError(f"the layers of one model are split over one group, got {names}")
        self.group: ProcessGroup | None = next(iter(groups.values()), None)
        self._apart = self.group
        self._watched: list[TensorGroup] = []
        self._watch: TensorWatch | None = None

    @property
    def is_split(self) -> bool:
        """Whether layers are split over several ranks."""
        return self.group is not None and self.group.size > 1

    def keep_apart(self, mesh: DeviceMesh, scope: ProcessGroup) -> None:
        """Let the layers' collectives have an order of their own. Collective over the mesh.

        After a failure some are under way when all ranks meet; where the layers are split over
        all ranks of `scope`, and these were one order, what they meet in would never begin.
        """
        group = self.group
        if group is None or not self.is_split or group.communicator is not scope.communicator:
            return
        name = f"layers of {group.name}"
        # Another model on this mesh may have made it: on all ranks alike.
        found = mesh.get_group(name)
        if found is None:
            found = mesh.add_group(name, list(group.ranks), apart=True)
        self._apart = found

    # -- in a step ------------------------------------------------------------------------

    def begin(self, look: Callable[[], None], loss: object) -> None:
        """Let the waits of the layers, and of the loss, look for news. Local."""
        if self._apart is None:
            return
        self._watch = TensorWatch(self._apart, look)
        self._watched = self._groups + tensor_groups(loss)
        for one in self._watched:
            one.watch = self._watch

    def end(self) -> None:
        """Let go of the step. Local."""
        for one in self._watched:
            one.watch = None
        self._watched = []
        self._watch = None

    def notes(self) -> list[Any]:
        """Return what the other ranks are to know after a failure. Local."""
        return [] if self._watch is None else self._watch.notes()

    def finish(self, notes: Mapping[int, list[Any]]) -> None:
        """Leave nothing of a failed step on the group. Collective over it.

        Args:
            notes: The `notes` of all ranks, by their numbers in the mesh.
        """
        if self.group is not None and self._watch is not None:
            self._watch.finish([notes[rank] for rank in self.group.ranks])

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Sum over the group what several of its ranks have computed parts of. Collective."""
        if self.group is not None:
            sum_shared_gradients(parameters, self.group)

    # -- norms ----------------------------------------------------------------------------

    def copies(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Return those that other ranks of the group count in norms, or `inner_sum` does."""
        if self.group is None or not self.is_split:
            return []
        return [
            one
            for one in parameters
            if (one.shared() if isinstance(one, TensorParameter) else self.group.rank != 0)
        ]

    def inner_sum(
        self, parameters: Sequence[Parameter], tied: Iterable[Parameter]
    ) -> Callable[[float], float] | None:
        """Return what adds a sum of squares up over the group, with that of shared parameters.

        Args:
            parameters: This rank's.
            tied: Of these, what another stage counts.
        """
        group = self.group
        if group is None or not self.is_split:
            return None
        elsewhere = {id(one) for one in tied}
        mine = [one for one in parameters if id(one) not in elsewhere]

        def inner_sum(squares: float) -> float:
            return float(group.all_reduce(np.array(squares + _shared_squares(mine))).resolve())

        return inner_sum

    # -- values ---------------------------------------------------------------------------

    def agree_values(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Return if all ranks of the group hold the same values of what is not split. Collective.

        Raises:
            MismatchError: On every rank, naming the first parameter that differs.
        """
        if self.group is not None:
            whole = [(name, one) for name, one in named if not _is_split(one)]
            agree_values(whole, self.group)

    def whole(self, parameter: Parameter) -> HostArray:
        """Return the values of a parameter, put together if it is split. Collective if so."""
        values = np.array(to_numpy(parameter.value()))
        if self.group is None or not isinstance(parameter, TensorParameter):
            return values
        sizes = [sum(stop - start for start, stop in part) for part in parameter.parts]
        joined = self.group.all_gather(values, axis=parameter.axis, sizes=sizes).resolve()
        return parameter.joined(np.split(joined, np.cumsum(sizes)[:-1], axis=parameter.axis))


def local_part(name: str, parameter: Parameter, whole: Array) -> Array:
    """Return what this rank holds of the values `whole` of a parameter.

    Raises:
        ShapeError: If they have another shape.
    """
    if not isinstance(parameter, TensorParameter):
        return whole
    try:
        return parameter.part_of(to_numpy(whole))
    except ShapeError as error:
        raise ShapeError(f"state of parameter {name!r}: {error}") from None


def sum_shared_gradients(parameters: Iterable[Parameter], group: ProcessGroup) -> None:
    """Sum the gradients of which several ranks of a group have parts: norms', biases', and such.

    Collective over `group`. Training by :class:`~mpimesh.DataParallel` or
    :class:`~mpimesh.PipelineParallel` does this once a step; a loop of one's own calls it
    after backward, once, on all parameters of the model.

    Args:
        parameters: Those of the model, in the same order on every rank.
        group: The ranks over which its layers are split.

    Cost:
        One all-reduce for each dtype, if anything is shared.
    """
    pieces: dict[Any, list[tuple[Array, int, int]]] = {}
    ends: dict[Any, int] = {}
    for one, start, stop in _shared_runs(parameters):
        place = one.place_of(start, stop)
        if place is not None and one.grad is None:
            one.grad = namespace(one.value()).zeros_like(one.data)
        # What other ranks hold has its place, too, and gets zeros from here.
        first = ends.get(one.dtype, 0)
        end = ends[one.dtype] = first + (stop - start) * _inner(one)
        if place is not None:
            pieces.setdefault(one.dtype, []).append((one.grad[place], first, end))
    for dtype, size in ends.items():
        mine = pieces.get(dtype, [])
        xp = namespace(mine[0][0]) if mine else np
        flat = xp.zeros(size, dtype)
        for grad, first, end in mine:
            flat[first:end] = grad.reshape(-1)
        summed = group.all_reduce(flat, out=flat, label="shared gradients").resolve()
        for grad, first, end in mine:
            grad[...] = summed[first:end].reshape(grad.shape)


def _shared_squares(parameters: Iterable[Parameter]) -> float:
    """Return the sum of squares of shared parameters' gradients; the first holder counts each."""
    total = 0.0
    for one in parameters:
        if not isinstance(one, TensorParameter) or not one.requires_grad or one.grad is None:
            continue
        runs = one.shared()
        if not runs:
            continue
        counts = np.ones(one.shape[one.axis], bool)
        for start, stop, first in runs:
            place = one.place_of(start, stop)
            if place is not None and first != one.rank:
                counts[place[one.axis]] = False
        counted = to_numpy(one.grad).compress(counts, axis=one.axis).astype(np.float64)
        total += float((counted**2).sum())
    return total


def _shared_runs(parameters: Iterable[Parameter]) -> Iterator[tuple[TensorParameter, int, int]]:
    for one in parameters:
        if isinstance(one, TensorParameter) and one.requires_grad:
            for start, stop, _ in one.shared():
                yield one, start, stop


def _inner(parameter: TensorParameter) -> int:
    """Return how many elements stand at each place of the split axis."""
    return int(np.prod([n for i, n in enumerate(parameter.whole_shape) if i != parameter.axis]))


def _is_split(parameter: Parameter) -> bool:
    return isinstance(parameter, TensorParameter) and len(set(parameter.parts)) > 1
