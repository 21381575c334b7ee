"""Costs of each layer of a model in a pipeline, measured, and layers dealt to stages by them."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpimesh.arguments import as_int, as_items, as_real, shown
from mpimesh.arrays import Array, StreamScope, moved, namespace
from mpimesh.errors import ModuleError, ScheduleError, StageError
from mpimesh.nn import Context, Module, Sequential, SupportsLayer
from mpimesh.nn.parameter import float_dtype
from mpimesh.nn.protocol import (
    backward_input,
    backward_weight,
    has_gradient,
    materialize,
    named_parameters,
    num_layers,
)
from mpimesh.parallel.batch import kind_of, parts_of, rows_of
from mpimesh.parallel.header import fingerprint
from mpimesh.parallel.microbatch import Microbatches, Tree, flatten, tree_map
from mpimesh.parallel.replicas import group_along
from mpimesh.parallel.split_layers import TensorModel
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.step import AbortedError, AbortSignal, Failure, agreed_error
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.schedule import Costs, Partition, partition
from mpimesh.schedule.costs import check_num_stages

__all__ = [
    "REPEATS",
    "LayerTime",
    "Link",
    "describe_layers",
    "flat_layers",
    "measure_layers",
    "measure_link",
    "partition_layers",
    "time_layers",
]

_MOST_REPEATS = 1_000_000

REPEATS = 5
"""Number of timings of a layer or a message, of which the median counts."""


def measure_layers(
    layers: Sequential | Sequence[SupportsLayer],
    x: Tree,
    *,
    mesh: DeviceMesh,
    dim: str = "pp",
    dtype: Any = np.float32,
    xp: ModuleType = np,
    bytes_per_s: float | None = None,
    latency_s: float | None = None,
    repeats: int = REPEATS,
) -> Costs:
    """Measure what each layer takes in a step of training, and messages between layers.

    Collective over the mesh. Every rank runs every layer, one after the other, forward and both
    halves of backward; the medians over the ranks count. All at once, because so it is in
    training: ranks of a node share its memory and maybe its cores, and a rank that is slow for a
    while does not count. The layers themselves are not
    touched: copies are run, of which one at a time has memory.

    A layer without halves has all of its backward in ``backward_input_s``. Backward costs nothing
    before the first layer with a parameter to train, as in a pipeline whose first stages have none.

    A message takes ``latency_s + output_bytes / bytes_per_s``. What is not given of it is measured:
    messages of one byte and of the largest output between the ranks along `dim`. One rank alone
    has messages that cost nothing.

    Args:
        layers: All layers of the model in order, on every rank.
        x: A microbatch, of as many rows as in training; of equal shape on every rank. Where it
            is a tuple or a dict, the first layer gets it as it is.
        mesh: The mesh.
        dim: The dim of the stages.
        dtype: Dtype of parameters that have no memory yet.
        xp: `numpy` or `cupy`: what to compute with.
        bytes_per_s: How fast messages pass.
        latency_s: What a message takes beside that.
        repeats: How often each layer is run, after once to get warm; the median counts.

    Returns:
        The costs of the layers, the same on every rank. ``costs.joined(map(len, stages))`` gives
        those of stages, and its ``as_arguments()`` what :func:`mpimesh.schedule.auto` and
        :func:`mpimesh.schedule.simulate` take.

    Raises:
        ModuleError: On every rank, if there is something that is no layer.
        ScheduleError: On every rank, if an option is out of its range.
        MismatchError: On every rank, if the ranks give different layers, shapes or options.
        MpimeshError: On every rank, if a layer fails on any, with the rank and the layer: of the
            class that was raised, or a :class:`StageError` with the traceback.

    Cost:
        ``1 + repeats`` forwards and backwards of each layer, memory for one layer with its
        gradients and activations, and ``2 * (1 + repeats)`` messages of at most 16 MiB.

    Example:
        >>> costs = measure_layers(layers, batch[:8], mesh=mesh)
        >>> stages = PipelineParallel.partition(layers, 4, mesh=mesh, times=costs)
        >>> of_stages = costs.joined(map(len, stages)).as_arguments()
        >>> schedule = mm.schedule.auto(4, 16, **of_stages)
        >>> mm.schedule.simulate(schedule, **of_stages).bubble_fraction
    """
    pipe = group_along(mesh, dim, "pp")
    scope = mesh.group()

    def checked() -> tuple[Sequence[SupportsLayer], Tree, TensorModel]:
        _check_options(repeats, bytes_per_s, latency_s)
        float_dtype(dtype, what="dtype: parameters are kept")
        if not hasattr(xp, "ndarray"):
            raise ModuleError(f"xp must be numpy or cupy, got {shown(xp)}")
        parts = () if x is None else parts_of(x, "x")
        if x is None or isinstance(x, Microbatches):
            raise ScheduleError(
                "to measure, x must be one microbatch on every rank: an array, or a tuple or dict "
                f"of arrays, got {x!r}"
            )
        flat = flat_layers(layers)
        stage = PipelineStage(0)
        for layer in flat:
            stage.add_layer(layer)
        return flat, parts[0], TensorModel([stage])

    def rule(value: tuple[Sequence[SupportsLayer], Tree, TensorModel]) -> str:
        flat, part, _ = value
        options = f"{dtype}, {bytes_per_s} bytes/s, latency {latency_s} s, {repeats} repeats"
        return f"{describe_layers(flat)}; x {rows_of(part)} rows of {kind_of(part)}; {options}"

    flat, part, tensor = agree_alike(scope, "measure_layers", checked, rule)
    tensor.make_groups(mesh, scope, scope.alone(), (), ())
    run = partial(time_layers, flat, part, dtype=dtype, xp=xp, repeats=repeats)
    times = _measured_everywhere(flat, run, scope, tensor)
    sizes = [one.output_bytes for one in times[:-1]]
    measured = Link(0.0, math.inf)
    if pipe.size > 1 and (latency_s is None or bytes_per_s is None):
        measured = measure_link(mesh, pipe, max(sizes, default=0), xp=xp, repeats=repeats)
    link = Link(
        measured.latency_s if latency_s is None else latency_s,
        measured.bytes_per_s if bytes_per_s is None else bytes_per_s,
    )
    return Costs(
        tuple(one.forward_s for one in times),
        tuple(one.backward_input_s for one in times),
        tuple(one.backward_weight_s for one in times),
        tuple(map(link.message_s, sizes)),
    )


def flat_layers(layers: Sequential | Sequence[SupportsLayer]) -> Sequence[SupportsLayer]:
    """Return the layers of a model, if it has any.

    Raises:
        ModuleError: If one is no layer.
        ScheduleError: If there are none.
    """
    model = layers if isinstance(layers, Sequential) else Sequential(layers)
    if not model.layers:
        raise ScheduleError("there is nothing to cut into stages: got no layers")
    return model.layers


def describe_layers(layers: Sequence[SupportsLayer]) -> str:
    """Return the text by which two ranks compare their layers."""
    kinds = [
        (type(layer).__name__, [(name, one.global_shape) for name, one in named_parameters(layer)])
        for layer in layers
    ]
    return f"{len(layers)} layers, digest {fingerprint(str(kinds)):x}"


def _check_options(repeats: int, bytes_per_s: float | None, latency_s: float | None) -> None:
    as_int(repeats, "repeats", ScheduleError, least=1, most=_MOST_REPEATS)
    if bytes_per_s is not None:
        as_real(bytes_per_s, "bytes_per_s", ScheduleError, above=0, finite=False)
    if latency_s is not None:
        as_real(latency_s, "latency_s", ScheduleError, least=0)


def _measured_everywhere(
    layers: Sequence[SupportsLayer],
    run: Callable[[], Iterable[LayerTime]],
    scope: ProcessGroup,
    tensor: TensorModel,
) -> list[LayerTime]:
    """Collective: return the median times over the ranks, or raise the same error on all."""
    mine: list[LayerTime] = []
    problem, failure = None, None
    # In a split layer the other ranks would wait for one that has failed.
    abort = AbortSignal(scope)
    tensor.begin(abort.check)
    try:
        try:
            for one in run():
                mine.append(one)  # noqa: PERF402 - as many as there were before an error
        except AbortedError:
            pass
        except Exception as error:
            abort.set()
            problem, failed = error, Failure.of(error, scope.world_rank, None)
            layer = f"layer {len(mine)}, {type(layers[len(mine)]).__name__}"
            failure = asdict(replace(failed, message=f"{layer}: {failed.message}"))
        note = {
            "times": mine,
            "failure": failure,
            "aborts": abort.is_set,
            "tensor": tensor.notes(),
        }
        with scope._core.progress.keeping(problem):
            everyone = agree(scope, "measure_layers", note)
        failures = [Failure(**one["failure"]) for one in everyone if one["failure"]]
        if failures:
            notes = zip(scope.ranks, (one["tensor"] for one in everyone), strict=True)
            tensor.finish(dict(notes))
            aborted = [place for place, one in enumerate(everyone) if one["aborts"]]
            for request in abort.drain(aborted):
                scope._core.wait_for(request, what="measure_layers")
    finally:
        tensor.end()
    if failures:
        raised = agreed_error(failures)
        raised.__context__ = problem
        # The text of a StageError has the traceback already.
        raise raised from (None if isinstance(raised, StageError) else problem)
    medians = []
    for times in zip(*(one["times"] for one in everyone), strict=True):
        *seconds, output_bytes = zip(*times, strict=True)
        forward_s, input_s, weight_s = map(median, seconds)
        medians.append(LayerTime(forward_s, input_s, weight_s, output_bytes[0]))
    return medians


# -- times: each layer in a copy of its own, one after the other ----------------------------------


R = TypeVar("R")


class LayerTime(NamedTuple):
    """The times of a layer for one microbatch.

    Attributes:
        forward_s: Seconds of its forward.
        backward_input_s: Seconds of the input's half of its backward.
        backward_weight_s: Seconds of the weights' half.
        output_bytes: Bytes of its output.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    output_bytes: int


def time_layers(
    layers: Sequence[SupportsLayer], x: Tree, *, dtype: Any, xp: ModuleType, repeats: int
) -> Iterator[LayerTime]:
    """Yield the time of each layer, of a training step as a pipeline does it. Local.

    One layer after the other is copied, given memory, and run. A copy reads the values of a layer
    that has any, and has gradients of its own.

    Args:
        layers: The layers of the whole model, in order.
        x: A microbatch.
        dtype: Dtype of parameters that have no memory yet.
        xp: The array library that they compute with.
        repeats: How often each is run, after once to get warm; the medians are taken.

    Raises:
        Exception: What a layer raises.
    """
    index = 0
    trained = False
    y = tree_map(lambda leaf, _: moved(leaf, xp), x)
    for place, layer in enumerate(layers):
        trained = trained or any(parameter.requires_grad for parameter in layer.parameters())
        twin = _twin(layer, dtype, xp, index)
        index += num_layers(layer)
        if place == 0 and isinstance(twin, Module):
            twin.input_grad = False  # as in a pipeline: it is not read
        y, times = _time_layer(twin, y, trained=trained, repeats=repeats)
        del twin  # before the next one gets memory
        yield times


def _twin(layer: SupportsLayer, dtype: Any, xp: ModuleType, index: int) -> SupportsLayer:
    """Return a copy that has memory: where all values are there already, theirs."""
    parameters = layer.parameters()
    whole = bool(parameters) and all(one.data is not None for one in parameters)
    shared: dict[int, Any] = {id(one.grad): None for one in parameters}
    if whole:
        shared.update((id(one.data), one.data) for one in parameters)
    twin = copy.deepcopy(layer, shared)
    if not whole:
        materialize(twin, seed=0, dtype=dtype, xp=xp, index=index)
    return twin


def _time_layer(
    layer: SupportsLayer, x: Tree, *, trained: bool, repeats: int
) -> tuple[Tree, LayerTime]:
    scope = StreamScope.of(flatten(x)[0][0])

    def timed(call: Callable[..., R], *arguments: Any) -> tuple[R, float]:
        """Return what `call` gives, and its seconds, on a device up to the end of its work."""
        if scope is not None:
            scope.stream.synchronize()
        start_s = time.perf_counter()
        result = call(*arguments)
        if scope is not None:
            scope.stream.synchronize()
        return result, time.perf_counter() - start_s

    runs = []
    for _ in range(1 + repeats):
        context = Context()
        y, forward_s = timed(layer.forward, x, context)
        input_s = weight_s = 0.0
        if trained:
            dy = tree_map(_gradient, y)
            _, input_s = timed(backward_input, layer, dy, context)
            _, weight_s = timed(backward_weight, layer, context)
        runs.append((forward_s, input_s, weight_s))
    forward_s, input_s, weight_s = map(median, zip(*runs[1:], strict=True))
    output_bytes = sum(int(leaf.nbytes) for leaf in flatten(y, name="the output")[0])
    return y, LayerTime(forward_s, input_s, weight_s, output_bytes)


def _gradient(leaf: Array, _path: str) -> Array | None:
    """Return a gradient for an array of an output; those of integers have none."""
    return namespace(leaf).ones(leaf.shape, leaf.dtype) if has_gradient(leaf.dtype) else None


# -- speed of messages ----------------------------------------------------------------------------


_LEAST_BYTES = 1 << 16  # of a message that tells the rate: less is all latency
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of messages between two ranks.

    Attributes:
        latency_s: Seconds of the smallest message.
        bytes_per_s: Bytes that pass in a second.
    """

    latency_s: float
    bytes_per_s: float

    def message_s(self, nbytes: int) -> float:
        """Return the seconds of a message."""
        return self.latency_s + nbytes / self.bytes_per_s


def measure_link(
    mesh: DeviceMesh, pipe: ProcessGroup, nbytes: int, *, xp: ModuleType, repeats: int
) -> Link:
    """Time messages around a ring of `pipe`, all pipelines of the mesh at once. Collective.

    Returns:
        The median of `repeats` over all ranks of the mesh, the same on each.

    Cost:
        ``2 * (1 + repeats)`` messages of each rank, half of them of `nbytes`, but of between 64 KiB
        and 16 MiB.
    """
    sizes = (1, min(max(nbytes, _LEAST_BYTES), _MOST_BYTES))
    mine = [_shift_s(_message(mesh, xp, size), pipe, repeats) for size in sizes]
    scope = mesh.group()
    everyone = agree(scope, "the times of messages", mine)
    small_s, large_s = map(median, zip(*everyone, strict=True))
    longer_s = large_s - small_s
    return Link(small_s, (sizes[1] - sizes[0]) / longer_s if longer_s > 0 else math.inf)


def _message(mesh: DeviceMesh, xp: ModuleType, nbytes: int) -> Array:
    if xp is not np:
        return xp.zeros(nbytes, np.uint8)
    message = mesh.shared_empty(nbytes, np.uint8)
    message[...] = 0  # so that its pages are there
    return message


def _shift_s(message: Array, pipe: ProcessGroup, repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        pipe.barrier(label="measure messages")
        start_s = time.perf_counter()
        pipe.shift(message, wrap=True, label="measure messages").resolve()
        times.append(time.perf_counter() - start_s)
    return median(times[1:])


# -- layers dealt to stages -----------------------------------------------------------------------


def partition_layers(
    layers: Sequential | Sequence[SupportsLayer],
    num_stages: int,
    *,
    times: Costs | Sequence[float] | None,
    x: Tree | None,
    mesh: DeviceMesh,
    **options: Any,
) -> list[PipelineStage]:
    """Do what :meth:`PipelineParallel.partition` says. Collective over `mesh`.

    Args:
        layers: All layers.
        num_stages: Number of stages.
        times: What each layer takes, if it is known.
        x: What is measured with, if it is not.
        mesh: The mesh.
        options: Those of :func:`measure_layers`.
    """

    def checked() -> tuple[Sequence[SupportsLayer], Partition | None]:
        flat = flat_layers(layers)
        if (times is None) == (x is None):
            raise ScheduleError(
                "partition needs either times= or a microbatch x= to measure them with, got "
                f"{'neither' if x is None else 'both'}"
            )
        check_num_stages(num_stages, len(flat))
        return flat, None if times is None else _cut(times, len(flat), num_stages)

    def rule(value: tuple[Sequence[SupportsLayer], Partition | None]) -> str:
        flat, cut = value
        where = "still to measure" if cut is None else f"with bounds {cut.bounds}"
        return f"{describe_layers(flat)}; {num_stages} stages, {where}"

    flat, cut = agree_alike(mesh.group(), "partition", checked, rule)
    if cut is None:
        cut = _cut(measure_layers(layers, x, mesh=mesh, **options), len(flat), num_stages)
    stages = [PipelineStage(number) for number in range(num_stages)]
    for stage, part in zip(stages, cut.split(flat), strict=True):
        for layer in part:
            stage.add_layer(layer)
    return stages


def _cut(times: Any, num_layers: int, num_stages: int) -> Partition:
    message_s: Any = 0
    if isinstance(times, Costs):
        times, message_s = times.total_s, times.message_s
    layer_s = as_items(times, "times", ScheduleError, wanted="one number for each layer")
    if len(layer_s) != num_layers:
        raise ScheduleError(
            f"times must be one number for each of {num_layers} layers, got {len(layer_s)}"
        )
    return partition(layer_s, num_stages, message_s=message_s)
