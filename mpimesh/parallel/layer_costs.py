"""Costs of each layer of a model in a pipeline, measured by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_real, shown
from mpimesh.errors import ModuleError, ScheduleError, StageError
from mpimesh.nn import Sequential, SupportsLayer
from mpimesh.nn.parameter import float_dtype
from mpimesh.nn.protocol import named_parameters
from mpimesh.parallel.batch import Value, as_value
from mpimesh.parallel.failure import AbortedError, AbortSignal, Failure, agreed_error
from mpimesh.parallel.groups import group_along
from mpimesh.parallel.header import fingerprint
from mpimesh.parallel.layer_times import LayerTime, time_layers
from mpimesh.parallel.link import Link, measure_link
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.tensor.model import TensorModel
from mpimesh.parallel.tensor.parameter import whole_shape
from mpimesh.parallel.tree import Tree
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agreed, exchange
from mpimesh.schedule import Costs

__all__ = ["REPEATS", "describe_layers", "flat_layers", "measure_layers"]

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

    def given() -> tuple[Sequence[SupportsLayer], Value, TensorModel]:
        _check_options(repeats, bytes_per_s, latency_s)
        float_dtype(dtype, what="dtype: parameters are kept")
        if not hasattr(xp, "ndarray"):
            raise ModuleError(f"xp must be numpy or cupy, got {shown(xp)}")
        value = as_value(x, "x")
        if value is None or value.is_cut:
            raise ScheduleError(
                "to measure, x must be one microbatch on every rank: an array, or a tuple or dict "
                f"of arrays, got {x!r}"
            )
        flat = flat_layers(layers)
        stage = PipelineStage(0)
        for layer in flat:
            stage.add_layer(layer)
        return flat, value, TensorModel([stage])

    def rule(value: tuple[Sequence[SupportsLayer], Value, TensorModel]) -> str:
        flat, x, _ = value
        options = f"{dtype}, {bytes_per_s} bytes/s, latency {latency_s} s, {repeats} repeats"
        return f"{describe_layers(flat)}; x {x.rows} rows of {x.kind()}; {options}"

    flat, value, tensor = agreed(
        scope._core.progress, scope.communicator, "measure_layers", given, rule
    )
    tensor.make_groups(mesh, scope, scope.alone(), (), ())
    run = partial(time_layers, flat, value.parts[0], dtype=dtype, xp=xp, repeats=repeats)
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
        (type(layer).__name__, [(name, whole_shape(one)) for name, one in named_parameters(layer)])
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
            "times": list(map(astuple, mine)),
            "failure": failure,
            "aborts": abort.is_set,
            "tensor": tensor.notes(),
        }
        everyone = exchange(scope._core.progress, scope.communicator, note, what="measure_layers")
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
        told = agreed_error(failures)
        told.__context__ = problem
        # The text of a StageError has the traceback already.
        raise told from (None if isinstance(told, StageError) else problem)
    of_layers = zip(*(one["times"] for one in everyone), strict=True)
    return [_middle([LayerTime(*one) for one in times]) for times in of_layers]


def _middle(times: Sequence[LayerTime]) -> LayerTime:
    return LayerTime(
        median(one.forward_s for one in times),
        median(one.backward_input_s for one in times),
        median(one.backward_weight_s for one in times),
        times[0].output_bytes,
    )
