"""A pipeline schedule as a value: for each rank, the list of its actions, in order.

An action is one thing that a rank does: compute a part of a stage, or move a message. Its text form
is PyTorch's: ``2F0`` is the forward of stage 2 on microbatch 0, ``2SEND_F0`` sends what that
forward made, and ``2REDUCE_GRAD``, which is for no microbatch, sums the gradients of stage 2 over
its replicas. Where a skip takes an output further than to the next stage, its messages name the
stage at the other end: ``1SEND_F0>3`` and ``3RECV_F0<1``, and for the gradient that comes back
``3SEND_B0>1`` and ``1RECV_B0<3``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mpimesh.arguments import as_int, as_items, check_kind, shown
from mpimesh.errors import ScheduleError
from mpimesh.trace import html

__all__ = [
    "MOST_FORWARDS",
    "Action",
    "ActionKind",
    "Schedule",
    "check_schedule",
    "check_sizes",
    "peak_of_activations",
    "schedule_table",
]


class ActionKind(StrEnum):
    """The kind of an :class:`Action`.

    A stage sends and receives under its own number: ``2SEND_F0`` goes from stage 2
    to stage 3, where it is ``3RECV_F0``; ``2SEND_B0`` goes from stage 2 to stage 1,
    where it is ``1RECV_B0``. The messages of a skip are of these kinds, too.

    Attributes:
        F: Forward.
        B: Backward, both halves.
        I: Backward of the input: the gradient that the stage before waits for.
        W: Backward of the weights: the gradients of the stage's own parameters.
        SEND_F: Give the output to the next stage.
        RECV_F: Take the input from the stage before.
        SEND_B: Give the gradient of the input to the stage before.
        RECV_B: Take the gradient of the output from the next stage.
        REDUCE_GRAD: Start to sum the gradients of the stage's parameters over the replicas.
        STEP: Change the stage's parameters by their gradients, when those are summed.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the letter that the literature uses
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    # That of Enum is a function in Python; kinds are looked up a million times in a schedule.
    __hash__ = str.__hash__

    @property
    def is_send(self) -> bool:
        """True if this kind gives a message to another stage."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_recv(self) -> bool:
        """True if this kind takes a message from another stage."""
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)

    @property
    def is_message(self) -> bool:
        """True if this kind moves a message."""
        return self in _PARTNER

    @property
    def computes(self) -> bool:
        """True if this kind is a part of a stage's forward or backward."""
        return self in _COMPUTING

    @property
    def is_whole(self) -> bool:
        """True if this kind is done once for a stage, and not for each microbatch."""
        return self in _WHOLE


# The kind at the other end of a message, and the distance to the stage there.
_PARTNER = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}

_COMPUTING = frozenset((ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W))
_WHOLE = frozenset((ActionKind.REDUCE_GRAD, ActionKind.STEP))

_KINDS = f"an ActionKind: {', '.join(ActionKind)}"

_NUMBER = "(0|[1-9][0-9]*)"
_TEXT = re.compile(
    f"{_NUMBER}(?:({'|'.join(kind for kind in ActionKind if not kind.is_whole)}){_NUMBER}"
    f"(?:([<>]){_NUMBER})?|({'|'.join(sorted(_WHOLE))}))"
)


@dataclass(frozen=True, slots=True)
class Action:
    """A step of a rank's list: `kind` on one stage and one microbatch.

    Attributes:
        stage: Number of the stage that acts, from 0.
        kind: What it does.
        microbatch: Number of the microbatch, from 0. It is 0 for REDUCE_GRAD and STEP, which are
            for all of them; their text has none.
        other: In a message of a skip the stage at the other end; None in all other actions.

    Raises:
        ScheduleError: If a number is negative, one of a kind without microbatches is not 0, or
            `other` is no stage to which or from which this kind of message can skip.

    Example:
        >>> print(Action.from_string("2SEND_F0").partner)
        3RECV_F0
    """

    stage: int
    kind: ActionKind
    microbatch: int
    other: int | None = None

    def __post_init__(self) -> None:
        # Schedules make a million of them.
        if type(self.stage) is not int or self.stage < 0:
            as_int(self.stage, "stage of an action", ScheduleError, least=0)
        if type(self.microbatch) is not int or self.microbatch < 0:
            as_int(self.microbatch, "microbatch of an action", ScheduleError, least=0)
        if type(self.kind) is not ActionKind:
            check_kind(self.kind, ActionKind, "kind of an action", ScheduleError, wanted=_KINDS)
        if self.microbatch and self.kind in _WHOLE:
            raise ScheduleError(
                f"{self.kind} is for all microbatches of a stage, so its microbatch is 0, "
                f"got {self.microbatch}"
            )
        if self.other is not None:
            self._check_other(self.other)

    @property
    def partner(self) -> Action:
        """The action at the other end of this message.

        Raises:
            ScheduleError: If this action computes, or would send before stage 0.
        """
        stage = self.far_stage
        if stage < 0:
            raise ScheduleError(f"{self} has no partner: there is no stage before stage 0")
        back = None if self.other is None else self.stage
        return Action(stage, _PARTNER[self.kind][0], self.microbatch, back)

    @property
    def far_stage(self) -> int:
        """The stage at the other end of this message; -1 if it would be before stage 0.

        Raises:
            ScheduleError: If this action moves no message.
        """
        if self.other is not None:
            return self.other
        if self.kind not in _PARTNER:
            does = "computes" if self.kind.computes else "moves no message"
            raise ScheduleError(f"{self} {does}: only a send or a receive has a partner")
        return self.stage + _PARTNER[self.kind][1]

    @classmethod
    def from_string(cls, text: str) -> Action:
        """Read the text form, exactly as :meth:`to_string` writes it.

        Raises:
            ScheduleError: If `text` is anything else: spaces, leading zeros, small letters.
        """
        match = _TEXT.fullmatch(check_kind(text, str, "text", ScheduleError, wanted="a text"))
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write stage, kind and microbatch, such as 2F0; "
                f"kinds: {', '.join(ActionKind)}"
            )
        stage, kind, microbatch, sign, other, whole = match.groups()
        action = cls(
            int(stage),
            ActionKind(whole or kind),
            int(microbatch or 0),
            None if other is None else int(other),
        )
        if sign is not None and sign != (">" if action.kind.is_send else "<"):
            raise ScheduleError(
                f"{text!r} is not an action: the other end of a skip stands after > where it is "
                f"sent and after < where it is received; write {action}"
            )
        return action

    def to_string(self) -> str:
        """Return the text form, such as ``2F0`` or ``2STEP``."""
        text = f"{self.stage}{self.kind}{'' if self.kind.is_whole else self.microbatch}"
        if self.other is None:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.other}"

    def __str__(self) -> str:
        return self.to_string()

    def _check_other(self, other: int) -> None:
        as_int(other, "other, the stage at the other end,", ScheduleError)
        what = f"{self.stage}{self.kind}{self.microbatch} with other={other}"
        if self.kind not in _PARTNER:
            raise ScheduleError(f"{what}: only a send or a receive has another end")
        distance = _PARTNER[self.kind][1]
        if other < 0 or (other - self.stage) * distance < 2:
            where = "after the next" if distance > 0 else "before the one before"
            raise ScheduleError(
                f"{what}: a skip of this kind has its other end at a stage {where}; a message "
                "between neighbours names none"
            )


_RANKS = "for each rank its Actions"

_NAME = "[A-Za-z0-9][A-Za-z0-9_.+-]*"
_HEADER = re.compile(
    f"# (?P<name>{_NAME}) stages=(?P<stages>[0-9]+) microbatches=(?P<microbatches>[0-9]+) "
    "placement=(?P<placement>[0-9]+(,[0-9]+)*)"
)


MOST_FORWARDS = 1 << 20
"""Most forwards of a schedule, which lists every action of every microbatch."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, as data.

    Construction checks that the numbers of ranks and stages fit each other. That the
    actions make a correct step is what :func:`~mpimesh.schedule.validate` proves.

    Attributes:
        name: Letters, digits and ``_ . + -``.
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of microbatches, at least 1.
        ranks: For each rank of the pipeline its actions, in the order it does them.
        placement: For each stage its rank. Left out, the ranks take stages
            in turn: stage s to rank ``s % num_ranks``.

    Raises:
        ScheduleError: If the numbers do not fit each other.

    Example:
        >>> print(make_schedule("1f1b", 2, 3))
        # 1f1b stages=2 microbatches=3 placement=0,1
        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or re.fullmatch(_NAME, self.name) is None:
            raise ScheduleError(
                f"a schedule's name is made of letters, digits and _ . + -, got {shown(self.name)}"
            )
        what = f"schedule {self.name}:"
        as_int(self.num_stages, f"{what} num_stages", ScheduleError, least=1)
        as_int(self.num_microbatches, f"{what} num_microbatches", ScheduleError, least=1)
        for actions in as_items(self.ranks, f"{what} ranks", ScheduleError, wanted=_RANKS):
            for action in as_items(actions, f"{what} ranks", ScheduleError, wanted=_RANKS):
                if type(action) is not Action:
                    check_kind(action, Action, f"{what} ranks", ScheduleError, wanted=_RANKS)
        if not 1 <= len(self.ranks) <= self.num_stages:
            raise ScheduleError(
                f"schedule {self.name} needs between 1 rank and one for each of its "
                f"{self.num_stages} stages, got {len(self.ranks)} ranks"
            )
        wanted = "a rank for each stage, in a tuple"
        check_kind(self.placement, Sequence, f"{what} placement", ScheduleError, wanted=wanted)
        if not self.placement:
            looped = tuple(stage % len(self.ranks) for stage in range(self.num_stages))
            object.__setattr__(self, "placement", looped)
        ranks = [rank for rank in self.placement if isinstance(rank, int)]
        if len(ranks) != self.num_stages or {*ranks} != {*range(len(self.ranks))}:
            raise ScheduleError(
                f"the placement of schedule {self.name} must name a rank for each of "
                f"{self.num_stages} stages, and each of {len(self.ranks)} ranks at least once, "
                f"got {self.placement}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.ranks)

    @property
    def is_lowered(self) -> bool:
        """Whether the lists have messages, as :func:`~mpimesh.schedule.lower` adds them."""
        kinds = ({action.kind for action in actions} for actions in self.ranks)
        return any(kind.is_message for some in kinds for kind in some)

    @property
    def trains(self) -> bool:
        """Whether the lists have any backward; if not, the schedule is forward-only."""
        backward = (ActionKind.B, ActionKind.I, ActionKind.W)
        return any(action.kind in backward for action in self.actions())

    def actions(self) -> Iterator[Action]:
        """Go through the actions of all ranks, rank after rank."""
        for actions in self.ranks:
            yield from actions

    def stage_rank(self, stage: int) -> int:
        """Return the rank of `stage`.

        Raises:
            ScheduleError: If there is no such stage.
        """
        if not 0 <= as_int(stage, "stage", ScheduleError, least=0) < self.num_stages:
            raise ScheduleError(
                f"schedule {self.name} has the stages 0 to {self.num_stages - 1}, got stage {stage}"
            )
        return self.placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in rising order.

        Raises:
            ScheduleError: If there is no such rank.
        """
        self._check_rank(rank)
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def peak_in_flight(self, rank: int) -> int:
        """Return the most activations that `rank` stores at one time.

        It stores one for every stage and microbatch whose forward is done and whose
        backward (B, or the last of I and W) is not. It is the number of buffers that
        `rank` needs for activations. A forward-only schedule stores none.

        Raises:
            ScheduleError: If there is no such rank.
        """
        self._check_rank(rank)
        return int(peak_of_activations(self, rank, (1,) * self.num_stages))

    def to_string(self) -> str:
        """Return the text form: one comment line, then one line of actions for each rank."""
        placement = ",".join(map(str, self.placement))
        header = (
            f"# {self.name} stages={self.num_stages} "
            f"microbatches={self.num_microbatches} placement={placement}"
        )
        lines = [header, *(",".join(map(str, actions)) for actions in self.ranks)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_string(cls, text: str) -> Schedule:
        """Read the text form, as :meth:`to_string` writes it.

        Also reads CSV without the comment line, as PyTorch writes it: empty cells are
        bubbles and are left out, stages and microbatches are counted, a stage is on the
        rank that acts for it, and the name is ``csv``.

        Raises:
            ScheduleError: If a line is wrong; the message names it.
        """
        lines = check_kind(text, str, "text", ScheduleError, wanted="a text").splitlines()
        if not lines:
            raise ScheduleError("the text of a schedule is empty: write one line for each rank")
        if not lines[0].startswith("#"):
            return _from_plain_csv(lines)
        header = _HEADER.fullmatch(lines[0])
        if header is None:
            raise ScheduleError(
                "line 1 must read '# NAME stages=S microbatches=M placement=R,R,...', "
                f"got {lines[0]!r}"
            )
        placement = tuple(map(int, header["placement"].split(",")))
        if len(lines) - 1 != max(placement) + 1:
            raise ScheduleError(
                f"line 1 places stages on {max(placement) + 1} ranks, "
                f"but {len(lines) - 1} lines of actions follow"
            )
        ranks = tuple(_read_line(line, number) for number, line in enumerate(lines[1:], start=2))
        stages, microbatches = int(header["stages"]), int(header["microbatches"])
        return cls(header["name"], stages, microbatches, ranks, placement)

    def __str__(self) -> str:
        return self.to_string().rstrip("\n")

    def _repr_html_(self) -> str:
        """Show the ranks' lists as a table, in notebooks; a timetable shows the picture."""
        return html.preformatted(schedule_table(self))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= as_int(rank, "rank", ScheduleError, least=0) < len(self.ranks):
            raise ScheduleError(
                f"schedule {self.name} has the ranks 0 to {len(self.ranks) - 1}, got rank {rank}"
            )


def peak_of_activations(schedule: Schedule, rank: int, sizes: Sequence[float]) -> float:
    """Return the most that activations on `rank` add up to, with a size for each stage."""
    if not schedule.trains:
        return 0.0
    stored = peak = 0.0
    for action in schedule.ranks[rank]:
        kind = action.kind
        if kind is ActionKind.F:
            stored += sizes[action.stage]
            peak = max(peak, stored)
        elif kind is ActionKind.B or kind is ActionKind.W:
            stored -= sizes[action.stage]
    return peak


def check_schedule(schedule: object) -> Schedule:
    """Return `schedule`, if it is one.

    Raises:
        ScheduleError: If it is not.
    """
    wanted = "a Schedule, as make_schedule(name, stages, microbatches) gives"
    return check_kind(schedule, Schedule, "schedule", ScheduleError, wanted=wanted)


def check_sizes(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> None:
    """Refuse a pipeline of no stages, microbatches or ranks, or one too large to be listed.

    Raises:
        ScheduleError: If a number is no whole number of at least 1, or there are more than 2^20
            forwards.
    """
    schedule = f"schedule {name}: "
    stages = as_int(num_stages, f"{schedule}num_stages", ScheduleError, least=1)
    microbatches = as_int(num_microbatches, f"{schedule}num_microbatches", ScheduleError, least=1)
    if num_ranks is not None:
        as_int(num_ranks, f"{schedule}num_ranks", ScheduleError, least=1)
    if stages * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"schedule {name} lists every action, at most {MOST_FORWARDS} forwards: num_stages * "
            f"num_microbatches is {stages} * {microbatches}"
        )


def _from_plain_csv(lines: list[str]) -> Schedule:
    ranks = tuple(_read_line(line, number) for number, line in enumerate(lines, start=1))
    holder: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if holder.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} acts on rank {holder[action.stage]} (line "
                    f"{holder[action.stage] + 1}) and on rank {rank} (line {rank + 1}): "
                    "a stage lies on one rank"
                )
    if sorted(holder) != list(range(len(holder))) or not holder:
        raise ScheduleError(
            f"the stages must be numbered 0, 1, 2, ... without a gap, got {sorted(holder)}"
        )
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    placement = tuple(holder[stage] for stage in range(len(holder)))
    return Schedule("csv", len(holder), microbatches, ranks, placement)


def _read_line(line: str, number: int) -> tuple[Action, ...]:
    try:
        cells = (cell.strip() for cell in line.split(","))
        return tuple(Action.from_string(cell) for cell in cells if cell)
    except ScheduleError as error:
        raise ScheduleError(f"line {number}: {error}") from None


# What is shown around a mark: enough to see why, and still one screen.
_RANKS_AROUND = 4
_STEPS_AROUND = 4


def schedule_table(schedule: Schedule, *, mark: tuple[int, int] | None = None) -> str:
    """Return `schedule` as text: a line for each rank, a column for each step of its list.

    A column is a position in the lists, not a moment: ranks reach it at different times.

    Args:
        schedule: What to print.
        mark: Rank and step of an action to point at. Only what stands around it is
            shown. The step after a rank's last one marks the end of its list.

    Raises:
        ScheduleError: If there is no such rank or step, or it is no schedule.

    Example:
        >>> print(schedule_table(make_schedule("1f1b", 2, 2), mark=(1, 1)))
        step    0    1      2    3
        rank 0  0F0  0F1    0B0  0B1
        rank 1  1F0  >1B0<  1F1  1B1  <-- here
    """
    check_schedule(schedule)
    if mark is not None:
        pair = as_items(mark, "mark", ScheduleError, wanted="a rank and a step")
        if len(pair) != 2:
            raise ScheduleError(f"mark must be a rank and a step, got {shown(mark)}")
        mark = (
            as_int(pair[0], "rank of mark", ScheduleError, least=0, most=schedule.num_ranks - 1),
            as_int(pair[1], "step of mark", ScheduleError, least=0, most=MOST_FORWARDS),
        )
    num_steps = max(len(actions) for actions in schedule.ranks)
    ranks, steps = range(schedule.num_ranks), range(num_steps)
    if mark is not None:
        ranks = _around(mark[0], _RANKS_AROUND, schedule.num_ranks)
        steps = _around(mark[1], _STEPS_AROUND, max(num_steps, mark[1] + 1))
        num_steps = max(num_steps, mark[1] + 1)
    left = ["..."] if steps.start > 0 else []
    right = ["..."] if steps.stop < num_steps else []
    rows = [["step", *left, *map(str, steps), *right]]
    for rank in ranks:
        cells = [_cell(schedule, rank, step, marked=(rank, step) == mark) for step in steps]
        end = ["<-- here"] if mark is not None and rank == mark[0] else []
        rows.append([f"rank {rank}", *[""] * len(left), *cells, *[""] * len(right), *end])
    lines = _align(rows)
    if ranks.start > 0:
        lines.insert(1, "...")
    if ranks.stop < schedule.num_ranks:
        lines.append("...")
    return "\n".join(lines)


def _around(center: int, distance: int, count: int) -> range:
    return range(max(0, center - distance), min(count, center + distance + 1))


def _cell(schedule: Schedule, rank: int, step: int, *, marked: bool) -> str:
    actions = schedule.ranks[rank]
    text = str(actions[step]) if step < len(actions) else ""
    return f">{text or '(end)'}<" if marked else text


def _align(rows: list[list[str]]) -> list[str]:
    widths = [0] * max(map(len, rows))
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
