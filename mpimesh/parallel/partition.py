"""A model's layers dealt to the stages of a pipeline, by what they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpimesh.arguments import as_items
from mpimesh.errors import ScheduleError
from mpimesh.nn import Sequential, SupportsLayer
from mpimesh.parallel.layer_costs import describe_layers, flat_layers
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.tree import Tree
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agreed
from mpimesh.schedule import Costs, Partition, partition
from mpimesh.schedule.partition import check_num_stages

__all__ = ["partition_layers"]


def partition_layers(
    layers: Sequential | Sequence[SupportsLayer],
    num_stages: int,
    *,
    times: Costs | Sequence[float] | None,
    x: Tree | None,
    scope: ProcessGroup,
    measure: Callable[[], Costs],
) -> list[PipelineStage]:
    """Do what :meth:`PipelineParallel.partition` says. Collective over `scope`.

    Args:
        layers: All layers.
        num_stages: Number of stages.
        times: What each layer takes, if it is known.
        x: What is measured with, if it is not.
        scope: The ranks that must get the same cut.
        measure: Collective: returns what each layer takes, the same on all ranks.
    """

    def given() -> tuple[Sequence[SupportsLayer], Partition | None]:
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

    flat, cut = agreed(scope._core.progress, scope.communicator, "partition", given, rule)
    if cut is None:
        cut = _cut(measure(), len(flat), num_stages)
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
