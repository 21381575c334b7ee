"""One thing a pipeline rank does: compute a part of a stage, or move a message.

The text form is PyTorch's: ``2F0`` is the forward of stage 2 on microbatch 0,
``2SEND_F0`` sends what that forward made, and ``2REDUCE_GRAD``, which is for no microbatch, sums
the gradients of stage 2 over its replicas. Where a skip takes an output further than to the next
stage, its messages name the stage at the other end: ``1SEND_F0>3`` and ``3RECV_F0<1``, and for the
gradient that comes back ``3SEND_B0>1`` and ``1RECV_B0<3``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mpimesh.arguments import as_int, check_kind
from mpimesh.errors import ScheduleError

__all__ = ["Action", "ActionKind"]


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
        """Whether this kind gives a message to another stage."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_recv(self) -> bool:
        """Whether this kind takes a message from another stage."""
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)

    @property
    def is_message(self) -> bool:
        """Whether this kind moves a message."""
        return self in _PARTNER

    @property
    def computes(self) -> bool:
        """Whether this kind is a part of a stage's forward or backward."""
        return self in _COMPUTING

    @property
    def is_whole(self) -> bool:
        """Whether this kind is done once for a stage, and not for each microbatch."""
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
        >>> Action.from_string("2SEND_F0").partner
        Action(stage=3, kind=<ActionKind.RECV_F: 'RECV_F'>, microbatch=0)
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
