"""One thing a pipeline rank does: compute a part of a stage, or move a message.

The text form is PyTorch's: ``2F0`` is the forward of stage 2 on microbatch 0,
``2SEND_F0`` sends what that forward made, and ``2REDUCE_GRAD``, which is for no microbatch, sums
the gradients of stage 2 over its replicas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mpimesh.errors import ScheduleError

__all__ = ["Action", "ActionKind"]


class ActionKind(StrEnum):
    """What an :class:`Action` does.

    A stage sends and receives under its own number: ``2SEND_F0`` goes from stage 2
    to stage 3, where it is ``3RECV_F0``; ``2SEND_B0`` goes from stage 2 to stage 1,
    where it is ``1RECV_B0``.

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

_NUMBER = "(0|[1-9][0-9]*)"
_TEXT = re.compile(
    f"{_NUMBER}(?:({'|'.join(kind for kind in ActionKind if not kind.is_whole)}){_NUMBER}"
    f"|({'|'.join(sorted(_WHOLE))}))"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's list: `kind` on one stage and one microbatch.

    Attributes:
        stage: Number of the stage that acts, from 0.
        kind: What it does.
        microbatch: Number of the microbatch, from 0. It is 0 for REDUCE_GRAD and STEP, which are
            for all of them; their text has none.

    Raises:
        ScheduleError: If a number is negative, or one of a kind without microbatches is not 0.

    Example:
        >>> Action.from_string("2SEND_F0").partner
        Action(stage=3, kind=<ActionKind.RECV_F: 'RECV_F'>, microbatch=0)
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ScheduleError(
                "an action needs a stage and a microbatch of at least 0, "
                f"got stage {self.stage} and microbatch {self.microbatch}"
            )
        if self.microbatch and self.kind.is_whole:
            raise ScheduleError(
                f"{self.kind} is for all microbatches of a stage, so its microbatch is 0, "
                f"got {self.microbatch}"
            )

    @property
    def partner(self) -> Action:
        """The action at the other end of this message.

        Raises:
            ScheduleError: If this action computes, or would send before stage 0.
        """
        if self.kind not in _PARTNER:
            does = "computes" if self.kind.computes else "moves no message"
            raise ScheduleError(f"{self} {does}: only a send or a receive has a partner")
        kind, distance = _PARTNER[self.kind]
        if self.stage + distance < 0:
            raise ScheduleError(f"{self} has no partner: there is no stage before stage 0")
        return Action(self.stage + distance, kind, self.microbatch)

    @classmethod
    def from_string(cls, text: str) -> Action:
        """Read the text form, exactly as :meth:`to_string` writes it.

        Raises:
            ScheduleError: If `text` is anything else: spaces, leading zeros, small letters.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write stage, kind and microbatch, such as 2F0; "
                f"kinds: {', '.join(ActionKind)}"
            )
        stage, kind, microbatch, whole = match.groups()
        return cls(int(stage), ActionKind(whole or kind), int(microbatch or 0))

    def to_string(self) -> str:
        """Return the text form, such as ``2F0`` or ``2STEP``."""
        return f"{self.stage}{self.kind}{'' if self.kind.is_whole else self.microbatch}"

    def __str__(self) -> str:
        return self.to_string()
