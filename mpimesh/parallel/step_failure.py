"""Failures of a rank: the signal that ends the waits of the others, and a value that all raise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mpimesh import errors
from mpimesh.arguments import rank_names
from mpimesh.comm import RecvRequest, Request
from mpimesh.errors import (
    MpimeshError,
    ShapeError,
    StageError,
    StageShapeError,
    on_all_ranks,
)
from mpimesh.parallel.plans import ABORT_TAG
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.call import readable
from mpimesh.schedule import Action, ActionKind

__all__ = ["AbortSignal", "AbortedError", "Failure", "agreed_error"]

_LONGEST_TRACEBACK = 8000
_LONGEST_MESSAGE = 2000
_DOING = {
    ActionKind.F: "the forward",
    ActionKind.B: "the backward",
    ActionKind.I: "the backward of the input",
    ActionKind.W: "the backward of the weights",
    ActionKind.REDUCE_GRAD: "the sum of its gradients",
    ActionKind.STEP: "the step of the optimizer",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one rank.

    Attributes:
        rank: The rank in the mesh.
        action: What the pipeline did, such as ``1F2``; empty before and after the actions.
        kind: The exception's class.
        message: Its text.
        traceback: Where it was raised, from the layer or loss on that mpimesh has called.
        is_shape: Whether it is a ShapeError.
    """

    rank: int
    action: str
    kind: str
    message: str
    traceback: str
    is_shape: bool

    @classmethod
    def of(cls, error: Exception, rank: int, action: Action | None) -> Self:
        """Describe `error`, raised on `rank` during `action`."""
        text = readable(error).rstrip()
        return cls(
            rank=rank,
            action="" if action is None else str(action),
            kind=type(error).__name__,
            message=_text(error),
            traceback=text[-_LONGEST_TRACEBACK:],
            is_shape=isinstance(error, ShapeError),
        )

    def headline(self, raised: str = "") -> str:
        """Return what and where in one line; its class only if that is not the one `raised`."""
        if not self.action:
            # Many a message begins with its rank.
            who = f"rank {self.rank}"
            main = self.message.removeprefix(f"{who}: ")
            if self.kind != raised:
                main = f"{self.kind}: {main}"
            return main if self.message.startswith(f"{who} ") else f"{who}: {main}"
        action = Action.from_string(self.action)
        part = "" if action.kind.is_whole else f" of microbatch {action.microbatch}"
        doing = _DOING.get(action.kind, f"its {action.kind}")
        return (
            f"stage {action.stage} failed on rank {self.rank} in {doing}{part} ({self.action}): "
            f"{self.kind}: {self.message}"
        )

    def is_like(self, other: Failure) -> bool:
        """Tell whether another rank found the same of itself."""
        return (self.kind, self._without_rank()) == (other.kind, other._without_rank())

    def _without_rank(self) -> str:
        return re.sub(rf"\brank {self.rank}\b", "rank", self.message)


def _text(error: Exception) -> str:
    """Return the text of any exception, also of one whose text cannot be made."""
    try:
        return str(error)[:_LONGEST_MESSAGE]
    except Exception as another:
        return f"its text could not be made: {type(another).__name__}"


def agreed_error(failures: Sequence[Failure]) -> MpimeshError:
    """Return the error that every rank raises for the `failures` of a step, in rank order.

    If no stage had begun its work, it is of the class of the first failure. Else it is a
    StageError, and a ShapeError too if the failure was one. What several ranks found is said once.
    """
    staged = [failure for failure in failures if failure.action]
    first = (staged or list(failures))[0]
    own = getattr(errors, first.kind, None)
    kind: type[MpimeshError] = StageShapeError if first.is_shape else StageError
    is_own = False
    if not staged and isinstance(own, type) and issubclass(own, MpimeshError):
        kind, is_own = own, True
    raised = kind.__name__
    lines: list[str] = []
    left = [first, *(other for other in failures if other is not first)]
    while left:
        main = left[0]
        same = [one.rank for one in left[1:] if one.is_like(main)]
        left = [one for one in left[1:] if not one.is_like(main)]
        lines.append(f"also {main.headline(raised)}" if lines else main.headline(raised))
        if same:
            lines.append(f"the same on {rank_names(same)}")
    if not is_own:
        lines.append(f"--- traceback of rank {first.rank} ---\n{first.traceback}")
    error: MpimeshError = kind("\n".join(lines))
    return on_all_ranks(error)


class AbortedError(Exception):
    """Another rank has failed: leave the step."""


class AbortSignal:
    """The signal by which a failed rank ends the waits of the others in one step.

    A rank that fails sets it, once. It only wakes: what happened, and on which
    ranks, is exchanged afterwards, when all have come out of their waits.
    """

    def __init__(self, scope: ProcessGroup) -> None:
        self._scope = scope
        self._probe = scope.communicator.probe
        self._sends: list[Request] = []
        self.is_set = False

    def set(self) -> None:
        """Tell all other ranks. Never waits."""
        if self.is_set:
            return
        self.is_set = True
        communicator = self._scope.communicator
        note = np.ones(1, np.uint8)
        self._sends = [
            communicator.isend(note, peer, ABORT_TAG)
            for peer in range(self._scope.size)
            if peer != self._scope.rank
        ]

    def check(self) -> None:
        """Raise AbortedError if another rank has set it."""
        if self._scope.size > 1 and self._probe(ABORT_TAG) is not None:
            raise AbortedError

    def drain(self, setters: Iterable[int]) -> list[Request]:
        """Take in the notes of all `setters`, so that none is left for a later step.

        Returns:
            What must be waited for, with this rank's own notes.
        """
        receives: list[RecvRequest] = [
            self._scope.communicator.irecv(np.empty(1, np.uint8), peer, ABORT_TAG)
            for peer in setters
            if peer != self._scope.rank
        ]
        return [*receives, *self._sends]


# -- a refusal of one rank, raised on all ranks that do something together ------------------------
