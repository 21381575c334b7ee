"""The schedules by name, and a search for the fastest under measured times and a memory cap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, Protocol

from mpimesh.arguments import as_int, shown
from mpimesh.errors import ScheduleError, UnknownNameError
from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.costs import Costs, Seconds
from mpimesh.schedule.generators import (
    dualpipev,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    vee_placement,
    zb1p,
    zb2p,
    zbv,
)
from mpimesh.schedule.list_schedule import Rule, list_schedule, vhalf, vmin
from mpimesh.schedule.schedule import Schedule, check_sizes
from mpimesh.schedule.simulate import simulate

__all__ = ["auto", "make_schedule", "schedule_names", "stages_per_rank"]


class _Generator(Protocol):
    """A function that makes a schedule."""

    def __call__(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
    ) -> Schedule:
        """Make the schedule; raise ScheduleError if there is none."""


ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb1p", "zb2p", "zbv", "vhalf", "vmin",
    "dualpipev", "forward", "auto",
]  # fmt: skip
"""Schedules by name, so that a type checker finds a misspelt one."""

_FAMILY: Mapping[ScheduleName, _Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "looped_bfs": looped_bfs,
        "zb1p": zb1p,
        "zb2p": zb2p,
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
        "dualpipev": dualpipev,
        "forward": forward_only,
    }
)


def auto(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    forward_s: Seconds | Sequence[Seconds] = 1,
    backward_input_s: Seconds | Sequence[Seconds] = 1,
    backward_weight_s: Seconds | Sequence[Seconds] = 1,
    message_s: Seconds | Sequence[Seconds] = 0,
    max_in_flight: int | Sequence[int] | None = None,
) -> Schedule:
    """Find the fastest schedule for the times of stages, within a cap on activations.

    It tries every schedule of the family; each of them with its weight gradients put anew where
    ranks would wait under these times; and list scheduling by several rules, for stages in
    turn and, where each rank gets two, for a V. The one whose simulated step is shortest is
    returned, under the name ``auto-`` and that of its origin; among equals the one that stores
    least, then the first. So in simulation it is never slower than any of the family that fits.

    It is a heuristic, not an exhaustive search, and takes about twenty times as long as making and
    simulating one schedule.

    Args:
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks; as many as stages by default.
        forward_s: Seconds of F: one number, or one for each stage.
        backward_input_s: Seconds of I, likewise.
        backward_weight_s: Seconds of W, likewise. B takes as long as both.
        message_s: Seconds of a message: one number, or one for each pair of neighbour stages.
        max_in_flight: Most activations of a stage that a rank may store, as
            :meth:`Schedule.peak_in_flight` counts them: one number, or one for each rank.
            No limit by default.

    Raises:
        ScheduleError: If a number is less than 1, a time is negative or missing, or a cap is less
            than the stages of its rank, each of which needs one.

    Example:
        >>> schedule = auto(4, 8, forward_s=[1, 1, 2, 1], message_s=0.1, max_in_flight=4)
        >>> PipelineParallel(stages, 8, mesh=mesh, schedule=functools.partial(auto, num_ranks=2))
    """
    check_sizes("auto", num_stages, num_microbatches, num_ranks)
    num_ranks = num_stages if num_ranks is None else num_ranks
    if num_ranks > num_stages:
        raise ScheduleError(
            f"schedule auto puts at least one stage on each rank, got num_stages {num_stages} and "
            f"num_ranks {num_ranks}"
        )
    costs = Costs.of(
        num_stages,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        message_s=message_s,
    )
    caps = _caps(max_in_flight, num_stages, num_microbatches, num_ranks)
    # Some come out alike: with one stage on each rank interleaved is 1F1B.
    different: dict[tuple[tuple[Action, ...], ...], Schedule] = {}
    for schedule in _candidates(num_stages, num_microbatches, num_ranks, costs, caps):
        if all(schedule.peak_in_flight(rank) <= cap for rank, cap in enumerate(caps)):
            different.setdefault(schedule.ranks, schedule)
    best = min(different.values(), key=lambda schedule: (_step_s(schedule, costs), _peak(schedule)))
    return replace(best, name=f"auto-{best.name}")


def _caps(
    max_in_flight: int | Sequence[int] | None,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
) -> list[int]:
    stages = [len(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]
    if max_in_flight is None:
        return [count * num_microbatches for count in stages]
    listed = isinstance(max_in_flight, Sequence) and not isinstance(max_in_flight, str | bytes)
    caps = [
        as_int(cap, "max_in_flight", ScheduleError, least=1)
        for cap in (max_in_flight if listed else [max_in_flight] * num_ranks)  # type: ignore[union-attr]
    ]
    if len(caps) != num_ranks:
        raise ScheduleError(
            f"max_in_flight must be one number or one for each of {num_ranks} ranks, "
            f"got {len(caps)}"
        )
    for rank, (cap, count) in enumerate(zip(caps, stages, strict=True)):
        if cap < count:
            raise ScheduleError(
                "max_in_flight must be at least the number of a rank's stages, each of which "
                f"keeps an activation; rank {rank} has {count} stages, got {cap}"
            )
    return caps


def _candidates(
    num_stages: int, num_microbatches: int, num_ranks: int, costs: Costs, caps: Sequence[int]
) -> Iterator[Schedule]:
    for name, generator in _FAMILY.items():
        try:
            made = generator(num_stages, num_microbatches, num_ranks=num_ranks)
        except ScheduleError:
            continue
        if made.trains:
            yield made
            refilled = list_schedule(
                name, made.placement, num_microbatches, costs, caps=caps, orders=_orders(made)
            )
            if refilled is not None:
                yield refilled
    placements = {"dealt": tuple(stage % num_ranks for stage in range(num_stages))}
    if num_stages == 2 * num_ranks:
        placements["vee"] = vee_placement(num_ranks)
    for shape, placement in placements.items():
        for word, rule in _rules(costs).items():
            listed = list_schedule(
                f"{word}-{shape}", placement, num_microbatches, costs, caps=caps, rule=rule
            )
            if listed is not None:
                yield listed


def _orders(schedule: Schedule) -> list[list[Action]]:
    """Return the F and I of each rank, in the order of `schedule`."""
    return [
        [
            Action(action.stage, ActionKind.I, action.microbatch)
            if action.kind is ActionKind.B
            else action
            for action in actions
            if action.kind is not ActionKind.W
        ]
        for actions in schedule.ranks
    ]


def _rules(costs: Costs) -> dict[str, Rule]:
    """Return rules for what goes first; W goes last under all of them.

    ``depth`` lets gradients go before anything, and activations that have come far before others,
    as 1F1B does. ``longest`` takes what is farthest from the end of its microbatch's way.
    ``oldest`` takes the oldest microbatch.
    """
    to_end = _seconds_to_end(costs)

    def depth(action: Action) -> tuple[Seconds, ...]:
        if action.kind is ActionKind.I:
            return (0, action.microbatch, -action.stage)
        if action.kind is ActionKind.F:
            return (1, -action.stage)
        return (2,)

    def longest(action: Action) -> tuple[Seconds, ...]:
        if action.kind is ActionKind.W:
            return (1,)
        return (0, -to_end[action.kind][action.stage], action.microbatch)

    def oldest(action: Action) -> tuple[Seconds, ...]:
        if action.kind is ActionKind.W:
            return (1,)
        return (0, action.microbatch, to_end[action.kind][action.stage])

    def finish(action: Action) -> tuple[Seconds, ...]:
        if action.kind is ActionKind.W:
            return (1,)
        return (0, to_end[action.kind][action.stage])

    return {"depth": depth, "longest": longest, "oldest": oldest, "finish": finish}


def _seconds_to_end(costs: Costs) -> dict[ActionKind, list[Seconds]]:
    """Return how long a microbatch needs from each F and I to the end of the first stage's I."""
    num_stages = len(costs.forward_s)
    inputs: list[Seconds] = []
    so_far: Seconds = 0
    for stage in range(num_stages):
        so_far += costs.backward_input_s[stage] + (costs.message_s[stage - 1] if stage else 0)
        inputs.append(so_far)
    forwards: list[Seconds] = [0] * num_stages
    for stage in reversed(range(num_stages)):
        so_far += costs.forward_s[stage]
        so_far += costs.message_s[stage] if stage < num_stages - 1 else 0
        forwards[stage] = so_far
    return {ActionKind.F: forwards, ActionKind.I: inputs}


def _step_s(schedule: Schedule, costs: Costs) -> Seconds:
    return simulate(schedule, **costs.as_arguments()).step_s


def _peak(schedule: Schedule) -> int:
    return max(map(schedule.peak_in_flight, range(schedule.num_ranks)))


def schedule_names() -> tuple[ScheduleName, ...]:
    """Return the names that :func:`make_schedule` knows."""
    return (*_FAMILY, "auto")


def stages_per_rank(name: ScheduleName) -> int:
    """Return into how many stages for each rank a model is cut for the schedule called `name`.

    It is 2 for those on a V. ``interleaved`` and ``looped_bfs`` can do with any number, of which 2
    is returned, and ``auto`` with any, of which 1 is.

    Raises:
        UnknownNameError: If there is no such schedule.
    """
    return 2 // make_schedule(name, 2, 1).num_ranks


def make_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the schedule called `name`, without messages.

    One stage on each rank: ``gpipe``, ``1f1b``, ``zb1p``, ``zb2p``; ``forward`` for inference.
    Several, in turn: ``interleaved``, ``looped_bfs``. Two, in the shape of a V: ``zbv``,
    ``vhalf``, ``vmin``, ``dualpipev``. Either: ``auto``, which takes all times as equal here; give
    :func:`~mpimesh.schedule.auto` the measured ones.

    Args:
        name: One of :func:`schedule_names`.
        num_stages: Number of stages over all ranks, at least 1.
        num_microbatches: Number of microbatches, at least 1; may be fewer than the stages.
        num_ranks: Number of ranks. By default as many as stages, or half as many where a
            schedule puts several stages on a rank.

    Raises:
        UnknownNameError: If there is no such schedule.
        ScheduleError: If a number is less than 1, or the schedule does not put so many stages
            on so many ranks.
    """
    if not isinstance(name, str) or name not in schedule_names():
        raise UnknownNameError(
            f"the name of a schedule is one of {', '.join(schedule_names())}, got {shown(name)}"
        )
    generator = auto if name == "auto" else _FAMILY[name]
    return generator(num_stages, num_microbatches, num_ranks=num_ranks)
