"""The messages of a schedule: its edges, and the sends, receives and reductions added to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from mpimesh.arguments import as_flag, as_int, as_items, shown
from mpimesh.errors import ScheduleError
from mpimesh.schedule.schedule import Action, ActionKind, Schedule, check_schedule

__all__ = ["Edges", "lower", "pairs"]


def pairs(skips: object) -> tuple[tuple[int, int], ...]:
    """Return skips in a tuple.

    Raises:
        ScheduleError: If they are no pairs of whole numbers.
    """
    checked: list[tuple[int, int]] = []
    wanted = "pairs of stages, the source of each skip and its destination"
    for pair in as_items(skips, "skips", ScheduleError, wanted=wanted):
        ends = as_items(pair, "each of skips", ScheduleError, wanted="a pair of stages")
        if len(ends) != 2:
            raise ScheduleError(f"each of skips must be a pair of stages, got {shown(pair)}")
        source, destination = (
            as_int(end, "a stage in skips", ScheduleError, least=0) for end in ends
        )
        checked.append((source, destination))
    return tuple(checked)


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of a pipeline. Along each goes an output, and its gradient comes back.

    Edge s goes from stage s to stage s + 1. Skips, which take the output of a stage to one further
    on than the next, have the numbers after these, in rising order of source and destination.

    Attributes:
        num_stages: Number of stages.
        skips: For each skip its source and its destination, in rising order.

    Raises:
        ScheduleError: If a skip stands twice, or does not go from a stage to one beyond the next.

    Example:
        >>> edges = Edges(4, ((1, 3), (0, 2)))
        >>> edges.skips
        ((0, 2), (1, 3))
        >>> edges.number(Action.from_string("3SEND_B0>1"))
        4
    """

    num_stages: int
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        as_int(self.num_stages, "num_stages", ScheduleError, least=0)
        skips = sorted(pairs(self.skips))
        for source, destination in skips:
            if not 0 <= source < destination - 1 < self.num_stages - 1:
                raise ScheduleError(
                    "a skip goes from a stage to one beyond the next, and the stages are 0 to "
                    f"{self.num_stages - 1}; got a skip from {source} to {destination}"
                )
        twice = [skip for skip, following in pairwise(skips) if skip == following]
        if twice:
            raise ScheduleError(f"skip {twice[0]} is given twice; give each skip once")
        object.__setattr__(self, "skips", tuple(skips))

    @classmethod
    def of(cls, schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Self:
        """Return the edges of a schedule: with `skips`, and those that have messages in it."""
        check_schedule(schedule)
        with_messages = {
            (min(action.stage, action.other), max(action.stage, action.other))
            for action in schedule.actions()
            if action.other is not None and max(action.stage, action.other) < schedule.num_stages
        }
        return cls(
            schedule.num_stages,
            tuple({*cls(schedule.num_stages, pairs(skips)).skips, *with_messages}),
        )

    def __len__(self) -> int:
        return max(self.num_stages - 1, 0) + len(self.skips)

    def number(self, message: Action) -> int:
        """Return the number of the edge along which a SEND or RECV goes, either way.

        Raises:
            ScheduleError: If the action moves no message, or along none of these edges.
        """
        try:
            return self.between(message.stage, message.far_stage)
        except LookupError:
            raise ScheduleError(
                f"{message} goes along no edge of this pipeline of {self.num_stages} stages and "
                f"the skips {list(self.skips)}"
            ) from None

    def between(self, stage: int, other: int) -> int:
        """Return the number of the edge between `stage` and `other`.

        Raises:
            LookupError: If there is none.
        """
        ends = min(stage, other), max(stage, other)
        if ends[1] - ends[0] == 1 and 0 <= ends[0] < self.num_stages - 1:
            return ends[0]
        index = bisect_left(self.skips, ends)
        if self.skips[index : index + 1] != (ends,):
            raise LookupError(f"there is no edge between stages {stage} and {other}")
        return self.num_stages - 1 + index

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages from which skips come to `stage`, in rising order."""
        return tuple(source for source, destination in self.skips if destination == stage)

    def destinations(self, stage: int) -> tuple[int, ...]:
        """Return the stages to which skips go from `stage`, in rising order."""
        return tuple(destination for source, destination in self.skips if source == stage)


def lower(
    schedule: Schedule,
    *,
    skips: Iterable[tuple[int, int]] = (),
    reduce_grad: bool = False,
    step: bool = False,
) -> Schedule:
    """Return `schedule` with a SEND after each action whose result another rank needs.

    The RECV stands directly before the action that uses the message: as late as can be, for
    a rank waits there. Posting it early is the executor's business, which may post any
    number of receives ahead of this place. A schedule that has messages already gets no others.

    Stages on one rank hand over without a message.

    A skip takes the output of a stage to one beyond the next, too, and brings back a gradient. The
    message of the neighbour goes first, then those of skips: of an F in rising order of their
    destinations, and of a backward in rising order of their sources. In these orders they are
    received before an F (sources rising) and a backward (destinations rising), and in the same
    order an executor adds up the gradients of one output: first that from the next stage.

    Args:
        schedule: What to lower.
        skips: For each skip the stage whose output it takes, and a stage beyond the next.
        reduce_grad: Also add a REDUCE_GRAD to each stage, after its last backward and the message
            of that: from there on nothing comes to the stage's gradients. A stage that has one,
            and a schedule without any backward, is left as it is.
        step: Also add these and a STEP of each stage, at the end of each rank's list in the
            order of their REDUCE_GRAD, so that the sums have time while the rank computes.

    Example:
        >>> print(lower(make_schedule("1f1b", 2, 1), step=True))
        # 1f1b stages=2 microbatches=1 placement=0,1
        0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP
        >>> print(lower(make_schedule("forward", 3, 1), skips=[(0, 2)]))
        # forward stages=3 microbatches=1 placement=0,1,2
        0F0,0SEND_F0,0SEND_F0>2
        1RECV_F0,1F0,1SEND_F0
        2RECV_F0,2RECV_F0<0,2F0

    Raises:
        ScheduleError: If a skip stands twice, or does not go from a stage to one beyond the next.
    """
    reduce_grad = as_flag(reduce_grad, "reduce_grad", ScheduleError)
    step = as_flag(step, "step", ScheduleError)
    edges = Edges(check_schedule(schedule).num_stages, pairs(skips))
    ranks = schedule.ranks
    if not schedule.is_lowered:
        before, after = _far_ends(schedule.placement, edges)
        ranks = tuple(tuple(_with_messages(actions, before, after)) for actions in ranks)
    if (reduce_grad or step) and schedule.trains:
        ranks = tuple(tuple(_with_reductions(actions)) for actions in ranks)
    if step:
        ranks = tuple((*actions, *_steps(actions)) for actions in ranks)
    return schedule if ranks is schedule.ranks else replace(schedule, ranks=ranks)


_Ends = list[list[int | None]]
"""For each stage the stages on other ranks with which it has messages; None is the neighbour."""


def _far_ends(placement: Sequence[int], edges: Edges) -> tuple[_Ends, _Ends]:
    """Return the ends before each stage and those after it, in the order of their messages."""
    before: _Ends = [[] for _ in placement]
    after: _Ends = [[] for _ in placement]
    for stage, (rank, other) in enumerate(pairwise(placement)):
        if rank != other:
            after[stage].append(None)
            before[stage + 1].append(None)
    for source, destination in edges.skips:  # in rising order
        if placement[source] != placement[destination]:
            after[source].append(destination)
            before[destination].append(source)
    return before, after


def _with_messages(actions: Sequence[Action], before: _Ends, after: _Ends) -> list[Action]:
    """Put around each action the receives that it waits for and the sends of its result."""
    send_f, recv_f = ActionKind.SEND_F, ActionKind.RECV_F
    send_b, recv_b = ActionKind.SEND_B, ActionKind.RECV_B
    lowered: list[Action] = []
    for action in actions:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if stage >= len(before):
            lowered.append(action)
        elif kind is ActionKind.F:
            lowered += [Action(stage, recv_f, microbatch, end) for end in before[stage]]
            lowered.append(action)
            lowered += [Action(stage, send_f, microbatch, end) for end in after[stage]]
        elif kind is ActionKind.B or kind is ActionKind.I:
            lowered += [Action(stage, recv_b, microbatch, end) for end in after[stage]]
            lowered.append(action)
            lowered += [Action(stage, send_b, microbatch, end) for end in before[stage]]
        else:
            lowered.append(action)
    return lowered


_WITH_GRADIENTS = (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.SEND_B)


def _with_reductions(actions: Sequence[Action]) -> Iterator[Action]:
    """Put a REDUCE_GRAD after the last backward of each stage that has none."""
    last = {
        action.stage: step for step, action in enumerate(actions) if action.kind in _WITH_GRADIENTS
    }
    have = {action.stage for action in actions if action.kind is ActionKind.REDUCE_GRAD}
    for step, action in enumerate(actions):
        yield action
        if last.get(action.stage) == step and action.stage not in have:
            yield Action(action.stage, ActionKind.REDUCE_GRAD, 0)


def _steps(actions: Sequence[Action]) -> Iterator[Action]:
    """Give a STEP for each REDUCE_GRAD whose stage has none."""
    have = {action.stage for action in actions if action.kind is ActionKind.STEP}
    for action in actions:
        if action.kind is ActionKind.REDUCE_GRAD and action.stage not in have:
            yield Action(action.stage, ActionKind.STEP, 0)
