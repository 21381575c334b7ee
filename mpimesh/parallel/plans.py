"""One rank's plan of a step, worked out once for each number of microbatches.

Tags of messages. MPI guarantees tags up to 32767. Those up to `MAX_USER_TAG` (16383) are the
users', a few above it the groups' own (roll calls, shifts, pairwise exchange, up to 16383 + 16).
Here

| tags | what |
|---|---|
| 20480 + 2 e | along edge e to the later stage: announcements and activations |
| 20480 + 2 e + 1 | along edge e to the earlier stage: gradients |
| 28672 | the signal by which a failed rank ends the step of the others |

:class:`~mpimesh.schedule.Edges` numbers the edges: e = s goes from stage s to s + 1, and those of
skips come after these. No tag holds the number of a microbatch, so none grows: messages of one tag
between two ranks arrive in order, and a valid schedule receives the messages of each pair of stages
in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, cast

from mpimesh.arguments import as_flag, as_int, as_real, shown
from mpimesh.errors import ModuleError, ScheduleError
from mpimesh.nn.parameter import float_dtype
from mpimesh.parallel.buckets import GRAD_DTYPE
from mpimesh.schedule import (
    Action,
    ActionKind,
    Edges,
    Proof,
    Schedule,
    ScheduleName,
    lower,
    make_schedule,
    most_waiting,
    validate,
)
from mpimesh.schedule.generators import forward_schedule
from mpimesh.trace import Tracer

__all__ = [
    "ABORT_TAG",
    "MAX_EDGES",
    "Options",
    "Plans",
    "ScheduleLike",
    "StepPlan",
    "message_tags",
]

_FIRST_TAG = 20480

MAX_EDGES = 4096
"""Most edges of a pipeline: one less than stages, and the skips."""

ABORT_TAG = _FIRST_TAG + 2 * MAX_EDGES

ScheduleLike = ScheduleName | Schedule | Callable[[int, int], Schedule]
"""A name, a schedule for one number of microbatches, or ``f(num_stages, num_microbatches)``."""

_FEWEST_UNFINISHED_SENDS = 4
"""Sends that a rank may leave behind, even where a schedule needs none: they overlap."""

# What stages with nothing to train at or before them do not do.
_AFTER_THE_LOSS = (
    ActionKind.B,
    ActionKind.I,
    ActionKind.W,
    ActionKind.RECV_B,
    ActionKind.REDUCE_GRAD,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One rank's part of a step.

    Attributes:
        actions: What it does, with its messages, and when training with a REDUCE_GRAD of each
            stage that trains. STEP is left out: parameters are changed when all ranks have
            agreed that the whole step went well, which is after the last action of any.
        send_window: Most of its sends that may be unfinished while it goes on.
        most_waiting: By the stage that sends and the one here, the most messages that can have
            been sent and not yet received: more receives than these posted at a time never find
            a message sooner.
        received: The microbatches of which messages come, in order, by the stage that they come
            to and the one that they come from.
    """

    actions: tuple[Action, ...]
    send_window: int
    most_waiting: Mapping[tuple[int, int], int] = field(default_factory=dict)
    received: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)


class Plans:
    """The plans of one rank.

    Args:
        schedule: How training is to run.
        num_stages: Number of stages.
        num_microbatches: Most microbatches of a batch.
        num_ranks: Ranks of the pipeline.
        rank: This rank's place among them.
        skips: For each skip the stage whose output it takes and a stage beyond the next, see
            :func:`~mpimesh.schedule.lower`.

    Attributes:
        edges: The edges between the stages; their numbers are in the tags of messages.

    Raises:
        UnknownNameError: If there is no schedule of that name.
        ScheduleError: If the schedule is wrong, is not for as many stages and ranks, or does
            not train.
    """

    def __init__(
        self,
        schedule: ScheduleLike,
        num_stages: int,
        num_microbatches: int,
        *,
        num_ranks: int,
        rank: int,
        skips: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.edges = Edges(num_stages, tuple(skips))
        self._schedule = schedule
        self._num_stages = num_stages
        self._num_ranks = num_ranks
        self._rank = rank
        self._plans: dict[tuple[bool, int, int], StepPlan] = {}
        self._proved: dict[tuple[bool, int], tuple[Schedule, Proof]] = {}
        self._full: Schedule | None = None
        self._full = full = self.schedule(num_microbatches, training=True)
        self.name = full.name
        self.placement = full.placement
        self.stages = full.stages_of(rank)

    def plan(self, num_microbatches: int, *, training: bool, first_trained: int = 0) -> StepPlan:
        """Return the plan for a number of microbatches.

        Args:
            num_microbatches: How many; none at all is a plan, too.
            training: With backward, or forward only.
            first_trained: The first stage with anything to train. Stages before it have no
                backward, and no gradient is sent to them.
        """
        key = (training, num_microbatches, first_trained)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(*key)
        return plan

    def schedule(self, num_microbatches: int, *, training: bool) -> Schedule:
        """Return the schedule of all ranks, without messages.

        Raises:
            ScheduleError: If there is none for this number, or it is wrong.
        """
        return self._proof(training, num_microbatches)[0]

    def _make(self, training: bool, num_microbatches: int, first_trained: int) -> StepPlan:
        if not num_microbatches:
            return StepPlan((), 0)
        schedule, proof = self._proof(training, num_microbatches)
        lowered = lower(schedule, skips=self.edges.skips, reduce_grad=training)
        ranks = tuple(tuple(_pruned(actions, first_trained)) for actions in lowered.ranks)
        received: dict[tuple[int, int], list[int]] = {}
        for action in ranks[self._rank]:
            if action.kind.is_recv:
                ends = action.stage, action.far_stage
                received.setdefault(ends, []).append(action.microbatch)
        # Without the gradients of stages that do not train, more outputs may be on their way.
        pruned = replace(lowered, ranks=ranks)
        return StepPlan(
            ranks[self._rank],
            max(proof.send_window, _FEWEST_UNFINISHED_SENDS),
            most_waiting(pruned, self._rank) if pruned.is_lowered else {},
            received,
        )

    def _proof(self, training: bool, num_microbatches: int) -> tuple[Schedule, Proof]:
        """Return a schedule that is proved correct, and the proof."""
        key = (training, num_microbatches)
        if key not in self._proved:
            if training:
                schedule = self._training(num_microbatches)
            else:
                schedule = forward_schedule(self.placement, num_microbatches)
            self._proved[key] = schedule, validate(schedule, skips=self.edges.skips)
        return self._proved[key]

    def _training(self, num_microbatches: int) -> Schedule:
        source: Any = self._schedule  # of whatever kind
        made: Any = source
        if isinstance(source, str):
            made = make_schedule(
                cast(ScheduleName, source),
                self._num_stages,
                num_microbatches,
                num_ranks=self._num_ranks,
            )
        elif callable(source) and not isinstance(source, type):
            made = source(self._num_stages, num_microbatches)
        if not isinstance(made, Schedule):
            gave = "" if made is source else f" that gives {shown(made)}"
            raise ScheduleError(
                "schedule must be the name of one, such as '1f1b', a Schedule, or a function of "
                f"the numbers of stages and microbatches that gives one, got {shown(source)}{gave}"
            )
        if made.num_stages != self._num_stages:
            raise ScheduleError(
                f"schedule {made.name} is for {made.num_stages} stages, but there are "
                f"{self._num_stages}; cut the model into as many as the schedule has"
            )
        if made.num_ranks != self._num_ranks:
            raise ScheduleError(
                f"schedule {made.name} puts {made.num_stages} stages on {made.num_ranks} ranks, "
                f"but the mesh has {self._num_ranks} along the dim of the stages; make that dim of "
                f"size {made.num_ranks}, as in 'pp={made.num_ranks}', or cut the model otherwise"
            )
        if made.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"schedule {made.name} is for {made.num_microbatches} microbatches, but this batch "
                f"gives {num_microbatches}; pass a function that makes it for any number"
            )
        if not made.trains:
            raise ScheduleError(
                f"schedule {made.name} has no backward; forward() needs no schedule to be named"
            )
        if self._full is not None and made.placement != self._full.placement:
            # The stages lie where they lie.
            return _first_microbatches(self._full, num_microbatches)
        return made


def _first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Return what `schedule` does with its first `count` microbatches.

    No action needs one of another microbatch, so it is as correct as the whole.
    """
    ranks = tuple(
        tuple(action for action in actions if action.microbatch < count)
        for actions in schedule.ranks
    )
    return replace(schedule, num_microbatches=count, ranks=ranks)


def _pruned(actions: Sequence[Action], first_trained: int) -> Iterator[Action]:
    """Leave out the backward of stages that have nothing to train at or before them, and STEP.

    Sends and receives go in pairs, so what is left is still free of deadlock.
    """
    for action in actions:
        if action.kind is ActionKind.STEP:
            continue
        if action.kind in _AFTER_THE_LOSS:
            if action.stage >= first_trained:
                yield action
        elif action.kind is not ActionKind.SEND_B or action.far_stage >= first_trained:
            yield action


def message_tags(number: int, what: object) -> tuple[int, int]:
    """Return the tags of messages along an edge: to the later stage, and to the earlier one.

    Args:
        number: The number of the edge.
        what: Whose `str` says what is to go along it.

    Raises:
        ScheduleError: If there are too many edges.
    """
    if number >= MAX_EDGES:
        raise ScheduleError(
            f"a pipeline has at most {MAX_EDGES} edges between stages, got edge {number} for "
            f"{what}; make fewer stages or skips"
        )
    return _FIRST_TAG + 2 * number, _FIRST_TAG + 2 * number + 1


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the cut and the training of a model.

    Attributes:
        num_microbatches: Most microbatches of a replica's batch.
        schedule: Order of the work.
        seed: Seed of the first values and of dropout.
        dtype: Of the parameters.
        grad_dtype: Of gradients, where it is wider; None is that of the parameters.
        xp: The array library.
        bucket_bytes: Most bytes of a gradient bucket.
        overlap: Whether buckets are reduced during the backward.
        broadcast: Whether all replicas start with the values of the first one.
        tracer: Records what the rank does.
        advice: What to say beside that the stages do not fit the ranks.
        stage: How much of gradients and values each replica has of its own, see
            :mod:`mpimesh.parallel.bucket`; 0 is all.
    """

    num_microbatches: int
    schedule: ScheduleLike
    seed: int
    dtype: Any
    xp: ModuleType
    bucket_bytes: int
    overlap: bool = True
    broadcast: bool = False
    tracer: Tracer | None = None
    grad_dtype: Any = None
    advice: str = ""
    stage: int = 0

    def check(self) -> None:
        """Refuse what is of the wrong kind, or out of range. Local.

        Raises:
            MpimeshError: If anything is.
        """
        as_int(self.seed, "seed", ModuleError, least=0)
        as_flag(self.overlap, "overlap", ModuleError)
        as_flag(self.broadcast, "broadcast", ModuleError)
        as_real(self.bucket_bytes, "bucket_bytes", ModuleError, least=1, finite=False)
        float_dtype(self.dtype, what="dtype: parameters are kept")
        if self.grad_dtype is not None:
            float_dtype(self.grad_dtype, what=GRAD_DTYPE)
        if not hasattr(self.xp, "ndarray"):
            raise ModuleError(f"xp must be numpy or cupy, got {shown(self.xp)}")
        if not isinstance(self.tracer, Tracer | None):
            raise ModuleError(f"tracer must be a Tracer or None, got {shown(self.tracer)}")
