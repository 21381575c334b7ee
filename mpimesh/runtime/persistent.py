"""Operations with their arrays, planned once and started many times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import numpy as np

from mpimesh.arguments import size_text
from mpimesh.arrays import Array, is_cupy, namespace
from mpimesh.comm import Request, Steps
from mpimesh.core.call import PlanRecord, Prepared
from mpimesh.errors import DTypeError, ShapeError, UnresolvedError, tell_elsewhere
from mpimesh.runtime.call import Call
from mpimesh.runtime.operands import check_output
from mpimesh.runtime.plan import Plan
from mpimesh.runtime.traffic import Amount, Rule
from mpimesh.runtime.work import CollectiveTensor, T_co

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["Persistent", "PersistentCollective", "PersistentMessage", "plan_exchange", "planning"]

P = ParamSpec("P")
T = TypeVar("T")


class Persistent(Generic[T_co]):
    """An operation with its arrays, checked and planned once, to be started many times.

    MPI has the word of it. Each :meth:`start` reads what the arrays hold then.
    """

    __slots__ = ("_call",)

    _call: Call | None
    """That of the last start; not its handle, which warns when it is dropped."""

    @property
    def is_ready(self) -> bool:
        """True if it may be started, for the last start is over."""
        return self._call is None or self._call.ended

    def start(self) -> CollectiveTensor[T_co]:
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


_NOT_STARTED = "it is planned and not under way; start() it first, as in planned.start().resolve()"
tell_elsewhere(
    Persistent, dict.fromkeys(("resolve", "done", "wait", "assume_resolved"), _NOT_STARTED)
)


class PersistentCollective(Persistent[T_co]):
    """A collective with its arrays, checked and bound once, to be started many times.

    Made by :meth:`ProcessGroup.all_reduce_init` and the like; MPI's word for it is a persistent
    operation. Each :meth:`start` reads what the input holds then. Where no `out` was given, results
    may come into one array: use one before the next start. Printed, it says by which algorithm it
    goes, what this rank receives, and about how long that takes.

    Args:
        group: The ranks.
        call: What each start calls.
        plan: The plan.
        bind: Gives the operation of a start; with ``starts=False`` one to look at.
        prepared: The operation to be started again and again; None if each start needs its own.
        x: The caller's input, which must not change meanwhile.
        out: The caller's array for the result; None if there is none.
    """

    __slots__ = ("_bind", "_finish", "_group", "_out", "_plan", "_prepared", "_x")

    def __init__(
        self,
        group: GroupCore,
        call: Call,
        plan: PlanRecord,
        bind: Callable[..., Prepared],
        prepared: Prepared | None,
        x: Array | None,
        out: Array | None,
    ) -> None:
        self._group = group
        self._call: Call = call
        self._plan = plan
        self._bind = bind
        self._prepared = prepared
        self._x = x
        self._out = out
        self._finish: Callable[[Any], Any] | None = None
        call.ended = call.planned = True

    def start(self) -> CollectiveTensor[T_co]:
        """Start it once more; the handle's ``resolve()`` gives the result.

        Collective, as the call that it stands for.

        Raises:
            UnresolvedError: If the last start is not resolved: its buffers are in use.
            ShapeError: If the array for the result is read-only by now.
            ClosedError: If the mesh is closed.
        """
        group, call = self._group, self._call
        handle: CollectiveTensor[T_co] | None
        if self._prepared is not None:
            handle = group.again(call, self._prepared)
            if handle is not None:
                return handle if self._finish is None else handle.map(self._finish)
        try:
            prepared = self._ready()
            call.ended, prepared.busy = False, True
            handle = group.submit(call, prepared, self._x)
        except BaseException as error:
            if not isinstance(error, UnresolvedError):
                call.ended = True
            if isinstance(error, Exception):
                group.poison(Call(call.name, group.name), error)
            raise
        return handle if self._finish is None else handle.map(self._finish)

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Let each start give what `function` makes of its result; return this plan. Local."""
        self._finish = function
        return self

    def _ready(self) -> Prepared:
        """Return the operation of the next start."""
        prepared, out = self._prepared, self._out
        if not self._call.ended:
            self._group.open_work.complete(self._call)
        if not self._call.ended:
            raise self._under_way()
        if prepared is None:
            return self._bind()
        if prepared.busy:  # what has failed may still write into its buffers
            self._prepared = prepared = self._bind()
        elif isinstance(out, np.ndarray) and not out.flags.writeable:
            check_output(out)  # another operation uses it by now
        return prepared

    def __str__(self) -> str:
        """Describe a start of it, in a few lines. Local."""
        core, plan, x = self._group, self._plan, self._x
        nbytes, messages = core.received(plan)
        links = core.context.links
        link = links.inter_node if core.communicator.nodes else links.intra_node
        took_s = messages * link.latency_s + nbytes / link.bytes_per_s
        lines = [f"{self._call.text()} on group {core.name!r} of {core.size} ranks"]
        if isinstance(plan, Plan):
            is_shared = isinstance(x, np.ndarray) and core.context.world.is_shared(x)
            lines.append(f"  by {plan.way(core.algorithms(), is_shared)}")
        lines.append(
            f"  this rank puts in {size_text(plan.nbytes)}, and receives {size_text(nbytes)} in "
            f"{messages} {'message' if messages == 1 else 'messages'}"
        )
        lines.append(
            f"  memory beside the arrays given: {size_text(self._own_bytes())}; "
            f"about {took_s * 1e6:.1f} us, with {'measured' if link.measured else 'assumed'} links"
        )
        return "\n".join(lines)

    def _own_bytes(self) -> int:
        """Return the bytes of its arrays that are none of the caller's."""
        prepared = self._prepared or self._bind(starts=False)
        given = [one for one in (self._x, self._out) if _has_memory(one)]
        own: list[Any] = []
        for array in (*prepared.arguments[:2], prepared.value):
            if _has_memory(array) and not any(_share(array, one) for one in given + own):
                own.append(array)
        return sum(array.nbytes for array in own)

    def __repr__(self) -> str:
        """Show what it starts. Local."""
        return f"<PersistentCollective {self._call.text()} on {self._group.name!r}>"


def _has_memory(array: Any) -> bool:
    return isinstance(array, np.ndarray) or is_cupy(array)


def _share(array: Any, other: Any) -> bool:
    """Tell whether two arrays have memory in common."""
    library = namespace(array)
    return library is namespace(other) and bool(library.may_share_memory(array, other))


def plan_exchange(
    group: GroupCore,
    name: str,
    prepare: Callable[[], Callable[[], Request | Steps]],
    *,
    rule: str,
    nbytes: int = 0,
    value: Any = None,
    finish: Callable[[], Any] | None = None,
    lock: Array | None = None,
    out: Array | None = None,
    receives: tuple[Rule, Amount] | None = None,
) -> PersistentCollective:
    """Plan an exchange of regions between the same arrays, or several one after the other. Local.

    Args:
        group: The ranks.
        name: What it is called in messages and counts.
        prepare: Gives what starts it, as often as wanted; called again after a failure.
        rule: What must agree over ranks.
        nbytes: The bytes that this rank puts in.
        value: The result.
        finish: Makes the result; None if it is `value` as it is.
        lock: The caller's input, which must not change meanwhile.
        out: The caller's array for the result; None if there is none.
        receives: How what this rank receives is counted; None if it receives nothing.
    """
    call = Call(name, group.name, rule)
    plan = PlanRecord(nbytes, receives, unequal=True)
    group.account(plan, name, (name, rule, None, ""))

    def bind(*, starts: bool = True) -> Prepared:
        return Prepared(plan, prepare(), value, finish)

    return PersistentCollective(group, call, plan, bind, bind(), lock, out)


class PersistentMessage(Persistent):
    """One end of a message between two ranks, to be started many times.

    Each start is one message more in the row of its sender, receiver and tag, and meets the next
    one there, be that persistent or plain.

    Args:
        group: The group.
        text: What it is, for messages of errors.
        begin: Starts it once more.
    """

    __slots__ = ("_begin", "_group", "_text")

    def __init__(self, group: GroupCore, text: str, begin: Callable[[], CollectiveTensor]) -> None:
        self._group = group
        self._text = text
        self._begin = begin
        self._call = None

    def start(self) -> CollectiveTensor:
        """Start the message once more; see :meth:`Persistent.start`. The other rank starts its end.

        Raises:
            UnresolvedError: If the last start is not resolved: its array is in use.
            ClosedError: If the mesh is closed.
        """
        if not self.is_ready:
            self._group.open_work.complete(self._call)
        if not self.is_ready:
            raise self._under_way()
        handle = self._begin()
        self._call = handle._call
        return handle

    def __repr__(self) -> str:
        """Show what it sends or receives. Local."""
        return f"<PersistentMessage {self._text} on {self._group.name!r}>"


# -- the collectives of a group --------------------------------------------------------------------


class _Planner:
    """In place of a group, what its methods plan with and do not start."""

    def __init__(self, core: GroupCore) -> None:
        self._core = core

    def _run(
        self,
        make: Callable[..., Plan],
        x: Array,
        out: Array | None,
        label: str | None,
        options: tuple[Any, ...],
    ) -> PersistentCollective:
        core = self._core
        data = core.operand(x)
        plan = core.plan(make, data, *options)
        call = Call(plan.name, core.name, plan.rule, plan.shape_in, plan.kind, label, plan.compared)
        prepared = plan.bind(core, x, data, out, starts=False)
        in_place = _reads_in_place(plan, prepared, x)
        return PersistentCollective(
            core,
            call,
            plan,
            partial(_bind, core, plan, x, out),
            prepared if in_place else None,
            x,
            out,
        )


def _bind(
    core: GroupCore, plan: Plan, x: Array, out: Array | None, *, starts: bool = True
) -> Prepared:
    """Return the operation of a start that cannot use the last one's buffers."""
    core.member(plan.name)
    data = core.operand(x)
    if data.shape != plan.shape_in:
        raise ShapeError(
            f"{plan.name} was planned with an input of shape {plan.shape_in}, which has shape "
            f"{data.shape} now"
        )
    if data.dtype != plan.dtype:
        raise DTypeError(
            f"{plan.name} was planned with an input of dtype {plan.dtype}, which has dtype "
            f"{data.dtype} now"
        )
    return plan.bind(core, x, data, out, starts=starts)


def _reads_in_place(plan: Plan, prepared: Prepared, x: Array) -> bool:
    """Tell whether a start needs no copy of the input made before it, nor a stream."""
    if type(x) is not np.ndarray or prepared.scope is not None:
        return False
    if plan.name == "broadcast":
        return not plan.reads or prepared.value is x
    send = prepared.arguments[0]
    return send is None or bool(namespace(send).may_share_memory(send, x))


def planning(
    method: Callable[Concatenate[Any, P], CollectiveTensor[T]],
) -> Callable[Concatenate[Any, P], PersistentCollective[T]]:
    """Return the method that plans what `method` starts, with the same arguments."""

    @wraps(method)
    def plan(group: Any, /, *args: P.args, **options: P.kwargs) -> PersistentCollective:
        return cast("PersistentCollective[T]", method(_Planner(group._core), *args, **options))

    name = method.__name__
    plan.__name__, plan.__qualname__ = f"{name}_init", f"ProcessGroup.{name}_init"
    of_method, returned = signature(method), PersistentCollective
    plan.__signature__ = of_method.replace(return_annotation=returned.__name__)  # type: ignore[attr-defined]
    plan.__annotations__ = {**method.__annotations__, "return": returned}
    plan.__doc__ = f"""Plan :meth:`{name}`, with its arguments, to be started many times. Local.

        For loops: arguments are checked and buffers worked out here. Each start reads what the
        array holds then; what the ranks start is compared as in a plain call.

        Returns:
            What is planned; its ``start()`` gives a handle.

        Raises:
            ShapeError: If the arrays do not fit; and what else :meth:`{name}` raises at once.

        Example:
            >>> planned = group.{name}_init(x)
            >>> for _ in range(100):
            ...     x[...] = step()
            ...     result = planned.start().resolve()
        """
    return plan
