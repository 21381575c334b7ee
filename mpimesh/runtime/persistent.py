"""Operations planned once and started many times: what is alike in all, and exchanges of regions.

Collectives with a plan are in `plan.py`, messages in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from mpimesh.arrays import Array
from mpimesh.errors import UnresolvedError
from mpimesh.runtime.call import Call
from mpimesh.runtime.received import Amount, Rule
from mpimesh.runtime.traffic import Tally
from mpimesh.runtime.work import CollectiveTensor, Operation
from mpimesh.transport import Request, Steps
from mpimesh.transport.signatures import Refused

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["Persistent", "PersistentExchange", "start_again"]


class Persistent:
    """An operation with its arrays, checked and planned once, to be started many times.

    MPI has the word of it. Each :meth:`start` reads what the arrays hold then.
    """

    __slots__ = ("_last",)

    _last: Operation | None

    def start(self) -> CollectiveTensor:
        """Start it once more; the handle's ``resolve()`` gives the result.

        Collective, as the call that it stands for.

        Raises:
            UnresolvedError: If the last start is not resolved: its arrays are in use.
            ClosedError: If the mesh is closed.
        """
        raise NotImplementedError

    def _under_way(self) -> UnresolvedError:
        return UnresolvedError(
            f"{self!r} is started again while its last start is under way; resolve that first"
        )


class PersistentExchange(Persistent):
    """An exchange of regions between the same arrays, or several one after the other.

    Args:
        group: The ranks.
        name: What it is called in messages and counts.
        prepare: Gives what starts it, as often as wanted; called again after a failure.
        rule: What must agree over ranks.
        nbytes: The bytes that this rank puts in.
        value: The result.
        finish: Makes the result; None if it is `value` as it is.
        lock: The caller's input, which must not change meanwhile.
        receives: How what this rank receives is counted; None if it receives nothing.
    """

    __slots__ = (
        "_begin",
        "_call",
        "_digest",
        "_finish",
        "_group",
        "_lock",
        "_name",
        "_nbytes",
        "_prepare",
        "_receives",
        "_rule",
        "_tally",
        "_value",
    )

    def __init__(
        self,
        group: GroupCore,
        name: str,
        prepare: Callable[[], Callable[[], Request | Steps]],
        *,
        rule: str,
        nbytes: int = 0,
        value: Any = None,
        finish: Callable[[], Any] | None = None,
        lock: Array | None = None,
        receives: tuple[Rule, Amount] | None = None,
    ) -> None:
        self._group = group
        self._name = name
        self._prepare = prepare
        self._rule = rule
        self._nbytes = nbytes
        self._value = value
        self._finish = finish
        self._lock = lock
        self._receives = receives
        self._begin = prepare()
        self._last = None
        self._call: Call | None = None
        self._digest = 0
        self._tally: Tally | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may be started, for the last start is over."""
        last = self._last
        return last is None or last.resolved

    def start(self) -> CollectiveTensor:
        """Start it once more. Collective; see :meth:`Persistent.start`."""
        last, group = self._last, self._group
        if last is not None:
            if not last.resolved:
                error = self._under_way()
                group.poison(Call(self._name, group.name), error)
                raise error
            if last.error is not None:
                self._begin = self._prepare()  # what failed here may go on elsewhere
        handle = None
        if self._tally is not None and self._call is not None:
            handle = start_again(
                group,
                self._call,
                self._begin,
                self._digest,
                self._tally,
                self._nbytes,
                self._value,
                self._finish,
            )
        if handle is None:
            handle = self._start_anew()
        self._last = handle._operation  # not the handle, which warns when it is dropped
        return handle

    def _start_anew(self) -> CollectiveTensor:
        """Start it as a call that is made for the first time."""
        group, value = self._group, self._value
        handle = group.compose(
            self._name,
            self._begin,
            rule=self._rule,
            nbytes=self._nbytes,
            finish=self._finish or (lambda: value),
            lock=self._lock,
            receives=self._receives,
        )
        if self._tally is None:
            self._call = call = handle._operation.call
            self._digest, self._tally = _counted(group, call, self._nbytes, self._receives)
        return handle

    def __repr__(self) -> str:
        """Show what it starts. Local."""
        return f"<PersistentExchange {self._name}({self._rule}) on {self._group.name!r}>"


def start_again(
    group: GroupCore,
    call: Call,
    begin: Callable[[], Request | Steps],
    digest: int,
    tally: Tally,
    nbytes: int,
    value: Any,
    finish: Callable[[], Any] | None,
) -> CollectiveTensor | None:
    """Start what was started before, in the short way; None if it has to go the long one.

    That is :meth:`GroupCore.submit`: with checks on, in a budget, after a mesh is closed, and after
    what has not ended.

    Args:
        group: The ranks.
        call: What is called.
        begin: Starts it.
        digest: Of what the ranks compare.
        tally: Counts it.
        nbytes: The bytes that this rank puts in.
        value: The result, valid when it is done.
        finish: Makes the result, if `value` is not enough.
    """
    context, communicator, progress = group._context, group._communicator, group._progress
    if (
        communicator is None
        or group._checks
        or context.closed
        or context.traffic.budgets
        or progress.busy(communicator)
    ):
        return None
    communicator.started = call.number = number = communicator.started + 1
    word, signatures = 0, communicator.signatures
    if signatures is not None:
        word = signatures.post(number, digest)
        call.word, call.signatures = word, signatures if word > 0 else None
    request: Any
    if word < 0 and signatures is not None:
        request = Refused(signatures, group.name)
    else:
        request = begin()
        if type(request) is GeneratorType:
            request = progress.stage(communicator, request)
    call.ended = False
    tally.starts += 1
    operation = Operation(group, call, request, finish, None, value)
    if progress.recorder is not None:
        return group.own(operation, nbytes)
    # The same, without the cost of a call.
    context.open_operations[id(operation)] = operation
    progress.calls.append(call)
    return CollectiveTensor(operation)


def _counted(
    group: GroupCore, call: Call, nbytes: int, receives: tuple[Rule, Amount] | None
) -> tuple[int, Tally]:
    """Return what :func:`start_again` posts and counts for a call."""
    tally = group._context.traffic.tally(call.name, nbytes, receives, group._members)
    signatures = group.communicator.signatures
    if signatures is None or group._checks:
        return 0, tally
    return signatures.digest((call.name, call.rule, call.compared, call.dtype)), tally
