"""The base of every operation of a group: its ranks, and the start of an operation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import (
    Array,
    DType,
    StreamScope,
    check_current,
    device_ready,
    is_cupy,
    namespace,
    refuse_objects,
)
from mpimesh.errors import ClosedError, MpimeshError, RankError
from mpimesh.mesh import GroupBackend
from mpimesh.runtime.arrival import Arrival
from mpimesh.runtime.call import Call, call_stack
from mpimesh.runtime.checks import checked, compare
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.device_operation import DeviceOperation, begin_in
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.operands import host_array
from mpimesh.runtime.operation import Operation
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.solo_side import SoloSide
from mpimesh.runtime.traffic import Amount, Members, Rule
from mpimesh.transport import Communicator, Request, StagedRequest, Steps, run_steps
from mpimesh.transport.signatures import Refused

__all__ = ["GroupCore", "collective"]

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound="GroupCore")

_POISON_WAIT_S = 2.0


class GroupCore:
    """A named, ordered set of ranks of one mesh.

    Attributes:
        name: The group's name.
        ranks: Its ranks, as numbered in the mesh, in group order.
        size: How many they are.
        rank: This rank's place in `ranks`; None if it is not a member.
        backend: Who moves the bytes.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        context: MeshContext,
        backend: GroupBackend,
        *,
        prefer: str = "",
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.backend = backend
        self._prefer = prefer
        self.rank = None if communicator is None else communicator.rank
        self._communicator = communicator
        self._context = context
        self._members = Members(ranks, self.rank or 0)  # no operation starts where it has none

    @property
    def world_rank(self) -> int:
        """This rank, as numbered in the mesh."""
        return self._context.rank

    @property
    def progress(self) -> Progress:
        """The unfinished operations of this rank."""
        return self._context.world.progress

    @property
    def communicator(self) -> Communicator:
        """The transport of the group, for code that moves flat buffers itself.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the mesh is closed.
        """
        if self._communicator is None or self._context.closed:
            self._refuse("use the communicator")
        return self._communicator

    @property
    def started(self) -> int:
        """Number of collectives that this rank has started among the ranks of the group."""
        return 0 if self._communicator is None else self._communicator.started

    def _launch(
        self,
        name: str,
        begin: Callable[[], Request | Steps],
        *,
        rule: str = "",
        data: Array | None = None,
        out: Array | None = None,
        scope: StreamScope | None = None,
        label: str | None = None,
        peers: tuple[int, ...] | None = None,
        compared: object = None,
        also: Callable[[Call], Steps] | None = None,
        value: Any = None,
        finish: Callable[[], Any] | None = None,
        lock: Array | None = None,
        nbytes: int | None = None,
        receives: tuple[Rule, Amount] | None = None,
        arrival: Arrival | None = None,
    ) -> CollectiveTensor:
        """Start one collective of the group and return its handle.

        Args:
            name: What is called.
            begin: Starts it: gives one request, or several steps.
            rule: What must agree over ranks beside name, shape and dtype.
            data: This rank's array, whose dtype must agree, and on which memory it lies; None if
                they need not.
            out: The caller's array for the result.
            scope: Where an operation works that may turn out to be one on device memory; if None,
                it is one if `data` or `out` lies there.
            label: The caller's name for the call.
            peers: The ranks without which it cannot be done; None for all.
            compared: The part of the shape that must agree over ranks.
            also: Compares more, with checks on.
            value: The result, valid when the request is done.
            finish: Makes the result from the buffers, if `value` is not enough.
            lock: The caller's input, which must not change meanwhile: with checks on, a NumPy
                array is read-only until then.
            nbytes: Bytes that this rank puts in; those of `data` if None.
            receives: How what it receives is counted; None if it receives nothing, or `arrival`
                counts it.
            arrival: Counts what it receives when it comes.

        Raises:
            BudgetError: If it receives more than a budget has left.
        """
        context = self._context
        communicator = self._communicator
        if communicator is None or context.closed:
            self._refuse(name)
        scope = scope or StreamScope.of(data) or StreamScope.of(out)
        shape, dtype = (None, "") if data is None else (data.shape, _dtype_text(data))
        call = Call(name, self.name, rule, shape, dtype, label, peers)
        if receives is not None and context.traffic.budgets:
            context.traffic.admit_by(call, receives[0], self._members, receives[1])
        if arrival is not None:
            arrival.call = call
        if scope is not None:
            begin = begin_in(scope, begin)
        checks = context.settings.checks
        unlock = self.lock(lock, call)
        communicator.started = call.number = communicator.started + 1
        call.compared = compared
        word, signatures = 0, communicator.signatures
        if not checks and signatures is not None:
            word = signatures.post(call.number, (name, rule, compared, call.dtype))
            if word > 0:
                call.word, call.signatures = word, signatures
        if word < 0 and signatures is not None:
            request: Request = Refused(signatures, self.name)
        elif checks:
            stack = call_stack() if checks > 1 else ()
            steps = checked(communicator, call, compared, begin, also, stack=stack)
            request = self.progress.stage(communicator, steps)
        elif self.progress.busy(communicator):
            request = self.progress.stage(communicator, run_steps(begin))
        else:
            started = begin()
            if isinstance(started, Generator):
                request = self.stage(communicator, started)
            else:
                request = started
        if nbytes is None:
            nbytes = 0 if data is None else data.nbytes
        if scope is None:
            operation = Operation(self, call, request, finish, unlock, value)
            return self.own(operation, nbytes, receives)
        on_device = DeviceOperation(scope, self, call, request, finish, unlock, value)
        return self.own(on_device, nbytes, receives)

    # -- where bytes lie, and who moves them from there --------------------------------------

    def operand(self, x: Array) -> Array:
        """Return `x` as an array that this group moves: of NumPy, or of CuPy on its device.

        Raises:
            DTypeError: If `x` holds Python objects, or lies on a device that is not current or
                not CuPy's.
            ShapeError: If `x` is a list that is no array.
        """
        if type(x) is np.ndarray or not is_cupy(x) or not self.moves_device_memory:
            return host_array(x)
        check_current(x)
        refuse_objects(np.dtype(x.dtype))
        return x

    @property
    def moves_device_memory(self) -> bool:
        """Whether CuPy arrays of this rank stay on their device; if not, the host has a copy."""
        return device_ready()

    def scope_if_any(self) -> StreamScope | None:
        """Return where an operation works that may turn out to be one on device memory."""
        return StreamScope() if self.moves_device_memory else None

    def side(self, library: ModuleType) -> Any:
        """Return who moves flat arrays of `library`, `numpy` or `cupy`."""
        if library is np:
            return self.communicator
        if self.size == 1:
            return SoloSide()
        # Imported late: most programs have no device.
        from mpimesh.transport.device_side import device_side

        # Shared memory is a way for the host; for a device it says nothing.
        prefer = self._prefer if self._prefer in ("mpi", "nccl") else ""
        return device_side(self.communicator, prefer=prefer)

    def empty(self, shape: Sequence[int], dtype: DType, library: ModuleType = np) -> Array:
        """Return memory for a result, warm from earlier ones where it can be."""
        if library is np:
            return self._context.world.pool.empty(shape, dtype)
        return library.empty(shape, dtype)  # CuPy has a pool of its own

    def lock(self, x: Array | None, call: Call) -> Callable[[], None] | None:
        """With checks on, make the input of a call read-only; return what makes it writable."""
        if not self._context.settings.checks or not isinstance(x, np.ndarray):
            return None
        return self._context.world.locks.lock(x, call)

    def stage(self, chain: object, steps: Steps) -> StagedRequest:
        """Start an operation of several steps on `chain`."""
        return self.progress.stage(chain, steps)

    def own(
        self,
        operation: Operation,
        nbytes: int,
        receives: tuple[Rule, Amount] | None = None,
    ) -> CollectiveTensor:
        """Keep a started operation until it is resolved, and give its handle out."""
        context = self._context
        context.open_operations[id(operation)] = operation
        call, progress = operation.call, context.world.progress
        progress.calls.append(call)
        if progress.recorder is not None:
            progress.recorder.start(self, call, nbytes)
        name, traffic = call.name, context.traffic
        traffic.count(name, nbytes)
        if receives is not None:
            traffic.counter.add(name, receives[0], self._members, receives[1])
        return CollectiveTensor(operation)

    def forget(self, operation: Operation) -> None:
        """Let go of a resolved operation."""
        context = self._context
        context.open_operations.pop(id(operation), None)
        recorder = context.world.progress.recorder
        if recorder is not None:
            recorder.end(operation.call, failed=operation.error is not None)

    def abandon(self, *buffers: object) -> None:
        """Keep the buffers of what has failed here and may go on elsewhere, for ever.

        The mesh keeps its MPI communicators, too: MPI gives the number of one that is freed to
        another, whose receives would take the messages that are still on their way.
        """
        if buffers:
            self._context.world.abandoned.append(buffers)
        self._context.unended = True

    def wait(self, operation: Operation, timeout_s: float | None) -> bool:
        """Wait for an operation of this group; False after `timeout_s`."""
        context = self._context
        with context.tracer.span(operation.call.name, "wait"):
            return self.progress.wait(
                self.communicator,
                operation.request,
                what=operation.call,
                timeout_s=timeout_s,
                peers=operation.call.peers,
                look=operation.look,
            )

    def wait_for(
        self, request: Request, *, what: object, peers: Sequence[int] | None = None
    ) -> None:
        """Wait for a request that is no operation of its own, such as a message of a pipeline.

        Args:
            request: Anything with a `test`; what it raises ends the wait.
            what: Whose `str` says in reports what is waited for.
            peers: The ranks of the group without which it cannot be done; None for all. If one
                of them leaves, the wait ends.

        Raises:
            PeerLostError: If a rank that it takes has left.
        """
        self.progress.wait(self.communicator, request, what=what, peers=peers)

    def complete(self, operation: Operation) -> None:
        """Wait for an operation and take its result; its handle keeps an error to raise."""
        try:
            self.wait(operation, None)
            operation.settle()
        except MpimeshError as error:
            operation.fail(operation.explained(error))

    def poison(self, call: Call, error: Exception) -> None:
        """With checks on, make the other ranks raise, too: this one cannot take part in `call`.

        Waits a little for them to come; if they do not, they will find the note later.
        """
        context = self._context
        if not context.settings.checks or self._communicator is None or context.closed:
            return
        note = f"raised {type(error).__name__}: {error}"
        self._communicator.started += 1
        steps = compare(self._communicator, call, None, note=note)
        request = self.progress.stage(self._communicator, steps)
        has_ended = self.progress.wait(
            self._communicator,
            _Ended(request),
            what=call,
            timeout_s=_POISON_WAIT_S,
        )
        if not has_ended:
            self.abandon(request)

    def check_rank(self, rank: int, what: str) -> int:
        """Return `rank` if the group has it.

        Raises:
            RankError: If not.
        """
        whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not whole or not 0 <= rank < self.size:
            raise RankError(
                f"{what} must be a rank of group {self.name!r}, 0 to {self.size - 1}, "
                f"got {shown(rank)}"
            )
        return int(rank)

    def _member(self, action: str) -> int:
        """Return this rank's place in the group, or refuse `action`."""
        if self.rank is None or self._context.closed:
            self._refuse(action)
        return self.rank

    def _refuse(self, action: str) -> NoReturn:
        if self._context.closed:
            raise ClosedError(
                f"rank {self.world_rank} cannot {action} on group {self.name!r}: "
                f"{self._context.why_closed}"
            )
        raise RankError(
            f"rank {self.world_rank} cannot {action} on group {self.name!r}: it is not one of its "
            f"ranks {list(self.ranks[:16])}"
        )


def _dtype_text(data: Array) -> object:
    """Return what must be alike on all ranks of an array's dtype and place."""
    return data.dtype if namespace(data) is np else f"{data.dtype} on a device"


class _Ended:
    """A request that is done when a staged one has settled, be it by failing."""

    def __init__(self, request: StagedRequest) -> None:
        self._request = request

    def test(self) -> bool:
        return self._request.settled


def collective(
    method: Callable[Concatenate[G, P], R],
) -> Callable[Concatenate[G, P], R]:
    """Mark a method as collective: with checks on, its errors reach the other ranks, too."""

    @wraps(method)
    def guarded(self: G, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.poison(Call(method.__name__.lstrip("_"), self.name), error)
            raise

    return cast(Callable[Concatenate[G, P], R], guarded)
