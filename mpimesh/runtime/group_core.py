"""The base of every operation of a group: its ranks, and the start of an operation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, Concatenate, NoReturn, ParamSpec, SupportsIndex, TypeVar

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    StreamScope,
    aligned_empty,
    array_shape,
    check_current,
    device_ready,
    is_cupy,
    refuse_objects,
)
from mpimesh.comm import Communicator, Request, Steps, run_steps
from mpimesh.comm.algorithms import ALGORITHM_NAMES, Algorithms, Row
from mpimesh.comm.signatures import Signature, digest_of
from mpimesh.core.call import Counter, Courier, Ledger, PlanRecord, Prepared, Starter
from mpimesh.core.mail import Mail
from mpimesh.core.node import Operation
from mpimesh.errors import (
    BudgetError,
    ClosedError,
    GroupError,
    MpimeshError,
    OutOfMemoryError,
    RankError,
    on_all_ranks,
)
from mpimesh.runtime.agreement import agree, agree_alike, compare
from mpimesh.runtime.call import Call, Message, call_stack
from mpimesh.runtime.operands import host_array
from mpimesh.runtime.plan import Plan
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.scatter_head import misfit
from mpimesh.runtime.traffic import Amount, Arrival, Members, Rule, from_others, uniform
from mpimesh.runtime.work import CollectiveTensor, OpenWork
from mpimesh.runtime.world import MeshContext

__all__ = ["GroupCore", "collective"]

P = ParamSpec("P")
R = TypeVar("R")

_POISON_WAIT_S = 2.0
_SHARED_FROM = 32 * 1024


def collective(
    function: Callable[Concatenate[GroupCore, P], R],
) -> Callable[Concatenate[GroupCore, P], R]:
    """Mark a function as collective: with checks on, its errors reach the other ranks, too."""

    @wraps(function)
    def guarded(group: GroupCore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(group, *args, **kwargs)
        except Exception as error:
            group.fail(function.__name__, error)

    return guarded


class GroupCore(Starter[CollectiveTensor[Any]]):
    """A named, ordered set of ranks of one mesh, which starts operations and keeps account of them.

    A :class:`~mpimesh.ProcessGroup` has one; what mpimesh itself does among the ranks goes by it.

    Attributes:
        name: The group's name.
        ranks: Its ranks, as numbered in the mesh, in group order.
        size: How many they are.
        rank: This rank's place in `ranks`; None if it is not a member.
        world_rank: This rank in the mesh.
        context: What all groups of the mesh share.
        ledger: That of its communicator, which groups of the same ranks share; None where this rank
            can start nothing.
        drop: Closes the group; None for one of the mesh's own.
        open_work: What is not resolved, of the whole mesh.
        progress: The unfinished operations of this rank.
        checked: Whether the ranks compare each call by messages before it starts.
        courier: Starts messages within a node; None if there are none.
        saving: The save that was started last, for which the next one waits.
    """

    context: MeshContext
    ledger: Ledger | None
    progress: Progress
    open_work: OpenWork

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        ledger: Ledger | None,
        context: MeshContext,
        prefer: str = "",
    ) -> None:
        super().__init__(name, ledger, context, CollectiveTensor, Call, digest_of)
        self.ranks = ranks
        self.size = len(ranks)
        self._prefer = prefer
        self.world_rank = context.rank
        self._members = Members(ranks, self.rank or 0)  # no operation starts where it has none
        self._closed = False
        self.drop: Callable[[Any], None] | None = None
        self.saving: CollectiveTensor[Any] | None = None
        self.courier: Courier | None = None
        if ledger is None:
            return
        window = ledger.communicator.window
        if window is not None and device_ready():
            window.mark_ready()
        if ledger.communicator.node_mail is not None:
            self.courier = Courier(self)

    @property
    def started(self) -> int:
        """Number of collectives that this rank has started among the ranks of the group."""
        return 0 if self.ledger is None else self.ledger.started

    @property
    def communicator(self) -> Communicator:
        """The transport of the group, for code that moves flat buffers itself.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the group or the mesh is closed.
        """
        communicator: Communicator = self.live("use the communicator").communicator
        return communicator

    @property
    def full_name(self) -> str:
        """The name of its communicator, alike on all its ranks and of no other one in the job."""
        return self.live("use the communicator").name

    @property
    def closed(self) -> bool:
        """True once the group, or its mesh, is closed."""
        return self._closed or self.open_work.closed

    def shut(self) -> None:
        """Let nothing start any more. Local."""
        self._closed = True
        self.ledger = self.drop = None

    def live(self, action: str) -> Ledger:
        """Return the ledger, or refuse `action`."""
        if self.ledger is None or self.open_work.closed:
            self.refuse(action)
        return self.ledger

    def member(self, action: str) -> int:
        """Return this rank's place in the group, or refuse `action`."""
        self.live(action)
        return self.rank or 0

    def refuse(self, action: str) -> NoReturn:
        """Raise, for this rank can start nothing here."""
        if self.open_work.closed:
            raise ClosedError(
                f"rank {self.context.rank} cannot {action} on group {self.name!r}: "
                f"{self.context.why_closed}"
            )
        if self._closed:
            raise ClosedError(
                f"rank {self.context.rank} cannot {action} on group {self.name!r}: the group is "
                "closed; make another with mesh.add_group, which is collective"
            )
        raise RankError(
            f"rank {self.context.rank} cannot {action} on group {self.name!r}: it is not one of "
            f"its ranks {list(self.ranks[:16])}"
        )

    # -- the start of operations ---------------------------------------------------------------

    def plan(self, make: Callable[..., Plan], data: Array, *options: Any) -> Plan:
        """Plan a collective of `data`, an array as the group moves it. Local."""
        refuse_objects(data.dtype)
        plan = make(self, data, *options)
        self.account(plan, plan.name, (plan.name, plan.rule, plan.compared, plan.kind))
        return plan

    def plan_barrier(self) -> Prepared:
        """Plan a barrier. Local."""
        plan = PlanRecord()
        plan.name, plan.rule, plan.kind = "barrier", "", ""
        self.account(plan, "barrier", ("barrier", "", None, ""))
        return Prepared(plan, self.communicator.prepare("barrier", ()))

    def account(self, plan: PlanRecord, name: str, signature: Signature) -> None:
        """Have the starts of a plan counted and compared. Local."""
        plan.tally = self.context.traffic.tally(name, plan.nbytes, plan.receives, self._members)
        node = self.communicator.node
        if node is not None and not self.checked:
            plan.digest = digest_of(node, signature)

    def received(self, plan: PlanRecord) -> tuple[int, int]:
        """Return the bytes and the messages that this rank receives in a start of a plan. Local."""
        if plan.receives is None:
            return 0, 0
        rule, amount = plan.receives
        nbytes, messages = from_others(rule, self._members, amount).sum(axis=1).tolist()
        return nbytes, messages

    def count(self, call: Call, plan: PlanRecord, counts: bool) -> None:
        """Count a start of a plan that is not counted often, or whose result is counted later."""
        traffic = self.context.traffic
        traffic.count(call.name, plan.nbytes)
        if plan.receives is not None and counts:
            rule, amount = plan.receives
            traffic.count_received(call.name, rule, self._members, amount)

    def begin_on_device(self, name: str, library: ModuleType, *arguments: Any) -> Request | Steps:
        """Start a collective of device memory."""
        started: Request | Steps = getattr(self.side(library), name)(*arguments)
        return started

    def in_turn(self, call: Call, prepared: Prepared, asks: bool) -> Steps:
        """Return the steps that begin what has to wait for others."""
        # The stack of the call: it may begin while something else is waited for.
        stack = call_stack() if self.context.settings.checks > 1 else ()
        return self._in_turn(call, prepared, asks, stack)

    def _in_turn(self, call: Call, prepared: Prepared, asks: bool, stack: tuple[str, ...]) -> Steps:
        """Begin what has waited for others, unless the mesh was left meanwhile.

        Before that, the ranks compare the call, with checks on, and then what its plan says.

        Args:
            call: What is called.
            prepared: The operation.
            asks: Whether they ask each other then whether the budget of any is exceeded.
            stack: Where it was called, to be compared, too; empty if that is not.
        """
        plan = prepared.plan
        if self.checked:
            yield from compare(self.communicator, call, call.compared, stack=stack)
        if self.ledger is None or self.open_work.closed:
            self.refuse(call.name)
        if (asks or plan.also is not None) and self.post(call, plan) and call.posted is not None:
            yield call.posted  # whose test raises
        if plan.also is not None:
            yield from plan.also(call)
        if asks:
            yield from self._ask_for_budget(call, plan)
        return (yield from run_steps(partial(self.begin, call, prepared)))

    @collective
    def compose(
        self,
        name: str,
        begin: Callable[[], Request | Steps],
        *,
        rule: str,
        nbytes: int = 0,
        finish: Callable[[], Any] | None = None,
        lock: Array | None = None,
        label: str | None = None,
        receives: tuple[Rule, Amount] | None = None,
    ) -> CollectiveTensor:
        """Start a collective of several steps, which keeps its place among all of the group.

        Args:
            name: What it is called in messages and counts.
            begin: Starts it, be it one request or several steps, when what came before it on this
                group has ended.
            rule: What must agree over ranks; compared with ``MPIMESH_CHECKS`` on.
            nbytes: The bytes that this rank puts in.
            finish: Makes the result; None for the value of the steps.
            lock: The caller's input, which must not change meanwhile.
            label: The caller's name for this call.
            receives: How what this rank receives is counted; None if it receives nothing.

        Raises:
            BudgetError: When it is resolved, on every rank, if any receives more than a budget has
                left. Then nothing has moved.
        """
        call = Call(name, self.name, rule, label=label)
        plan = PlanRecord(nbytes, receives, unequal=True)
        return self.submit(call, Prepared(plan, begin, None, finish), lock)

    def asks_for_budget(self, call: Call, plan: PlanRecord) -> bool:
        """Admit what a start receives; or tell that the ranks are to ask each other first. Local.

        They may receive unequally much: one that refused alone would leave the others in an
        exchange with its next one.

        Raises:
            BudgetError: If it receives more than a budget has left.
        """
        traffic = self.context.traffic
        if plan.unequal and traffic.refuses and self.size > 1:
            return True
        if plan.receives is not None:
            traffic.admit_by(call, plan.receives[0], self._members, plan.receives[1])
        return False

    def _ask_for_budget(self, call: Call, plan: PlanRecord) -> Steps:
        """Go on, and count it, only if no rank exceeds a budget."""
        traffic, side, receives = self.context.traffic, self.communicator, plan.receives
        error: BudgetError | None = None
        if receives is not None:
            error = traffic.excess(call, receives[0], self._members, receives[1])
        exceeded = np.zeros(self.size, np.int8)
        yield side.all_gather(np.array([error is not None], np.int8), exceeded, [1] * self.size)
        if exceeded.any():
            ranks = [self.ranks[place] for place in np.flatnonzero(exceeded).tolist()]
            raise on_all_ranks(
                error
                or BudgetError(
                    f"rank {self.world_rank}: {call} is refused on all ranks, because it exceeds "
                    f"the budget of rank {', '.join(map(str, ranks[:8]))}"
                )
            )
        if receives is not None:
            traffic.admit_by(call, receives[0], self._members, receives[1])
            traffic.count_received(call.name, receives[0], self._members, receives[1])

    def check_algorithm(self, name: str, algorithm: str | None, *, on_device: bool = False) -> None:
        """Refuse an algorithm that a caller asks for and the group does not have. Local.

        Args:
            name: The collective.
            algorithm: By which it is to go; None for that of the table.
            on_device: Whether the array lies on a device.

        Raises:
            GroupError: If the group cannot do it so.
        """
        side = self.communicator
        if algorithm is None:
            return
        if on_device:
            rule, cure = "an array on a device goes by its device's own", "take a NumPy array"
        elif isinstance(algorithm, str) and side.has_algorithm(name, algorithm):
            return
        else:
            has = [word for word in ALGORITHM_NAMES if side.has_algorithm(name, word)]
            rule = f"its ranks have {', '.join(has)} (and tree(b) with any b from 2 on)"
            cure = "take one of these"
        raise GroupError(
            f"rank {self.world_rank} cannot {name} by algorithm {shown(algorithm)} on group "
            f"{self.name!r}: {rule}; {cure}, or algorithm=None, which print(group.algorithms()) "
            "explains"
        )

    def algorithms(self) -> Algorithms:
        """Return the table of algorithms. Local."""
        table = self.communicator.algorithms()
        if not self.moves_device_memory:
            return table
        if self.size == 1:
            return Algorithms([*table, Row("*", "device", 0, "copy", "the group has one rank")])
        return Algorithms([*table, *self.side(sys.modules["cupy"]).algorithms()])

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
        # Imported late: most programs have no device.
        from mpimesh.comm.device_communicator import SelfCommunicator, device_communicator

        if self.size == 1:
            return SelfCommunicator()
        # Shared memory is a way for the host; for a device it says nothing.
        prefer = self._prefer if self._prefer in ("mpi", "nccl") else ""
        return device_communicator(self.communicator, prefer=prefer)

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        library: ModuleType = np,
        like: Array | None = None,
    ) -> Array:
        """Return memory for a result, warm from earlier ones where it can be.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            library: NumPy or CuPy.
            like: The operand: what is made of one in shared memory lies there, too, so that the
                ranks write into each other's results. Small results are ordinary arrays.
        """
        if library is np:
            world = self.context.world
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes >= _SHARED_FROM and like is not None and world.is_shared(like):
                return world.shared_bytes(nbytes).view(dtype).reshape(shape)
            return world.pool.take(shape, dtype)
        return library.empty(shape, dtype)  # CuPy has a pool of its own

    def empty_once(
        self, shape: Sequence[SupportsIndex] | SupportsIndex, dtype: Any
    ) -> tuple[HostArray, bool]:
        """Return an array that a node's ranks have once, and whether this rank writes it.

        Collective. See :meth:`ProcessGroup.empty_once`.
        """
        sizes, kind = agree_alike(
            self,
            "empty_once",
            lambda: array_shape(shape, dtype),
            lambda found: f"{found[0]} {found[1]}",
        )
        array, sources = self.node_empty(sizes, kind)
        array.flags.writeable = writes = sources[self.rank or 0] == self.rank
        return array, writes

    def node_empty(
        self, sizes: tuple[int, ...], dtype: DType, *, turn: int = 0
    ) -> tuple[HostArray, tuple[int, ...]]:
        """Return an array that a node's ranks have once and may all write. Collective.

        Args:
            sizes: Its shape, alike on all ranks.
            dtype: Its dtype.
            turn: Which rank of each node gives the memory, counted on round and round. It is kept
                as long as the group, or up to :meth:`node_release`.

        Returns:
            The array, uninitialised; and for each rank of the group the one that gives the memory
            of its array: ranks that cannot open each other's memory have an array each.
        """
        nbytes = math.prod(sizes) * dtype.itemsize
        communicator = self.communicator
        source, place, memory = communicator.offer_once(nbytes, turn)
        offers = agree(self, Call("empty_once", self.name), [source, place])
        sources = tuple(
            giver if offers[giver][1] >= 0 else rank for rank, (giver, _) in enumerate(offers)
        )
        if sources[self.rank or 0] != self.rank:
            memory = communicator.take_once(source, offers[source][1], nbytes)
        if memory is None:
            return aligned_empty(sizes, dtype, self.context.world.shared_bytes), sources
        array: HostArray = memory.view(dtype).reshape(sizes)
        return array, sources

    def node_release(self, array: HostArray) -> None:
        """Give memory of :meth:`node_empty` back. Local, when no rank uses the array any more."""
        if array.nbytes and self.ledger is not None and not self.open_work.closed:
            self.ledger.communicator.release_once(array)

    def lock(self, x: Array | None, call: Call) -> Callable[[], None] | None:
        """With checks on, make the input of a call read-only; return what makes it writable."""
        if not self.checked or not isinstance(x, np.ndarray):
            return None
        return self.context.world.locks.lock(x, call)

    def abandon(self, *buffers: object) -> None:
        """Keep the buffers of what has failed here and may go on elsewhere, for ever.

        The mesh keeps its MPI communicators, too: MPI gives the number of one that is freed to
        another, whose receives would take the messages that are still on their way.
        """
        if buffers:
            self.context.world.abandoned.append(buffers)
        self.context.unended = True

    def misfit(self, call: Call, operation: Operation, out: Array) -> MpimeshError:
        """Return what is wrong with the array for a block of a scatter."""
        return misfit(operation, self.rank or 0, self.size, out)

    def wait(self, work: CollectiveTensor, timeout_s: float | None) -> bool:
        """Wait for work of this group; False after `timeout_s`."""
        call = work._call
        with self.context.tracer.span(call.name, "wait"):
            return self.progress.wait(
                self.communicator,
                work._request,
                what=call,
                timeout_s=timeout_s,
                peers=call.peers,
                look=work._compare,
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

    def fail(self, name: str, error: Exception) -> NoReturn:
        """Raise `error` of the call `name`; with checks on, the other ranks raise, too."""
        cause = None
        if isinstance(error, MemoryError):
            error, cause = self.out_of_memory(name, error), error
        self.poison(Call(name, self.name), error)
        if cause is None:
            raise error
        raise error from cause

    def out_of_memory(self, name: str, error: MemoryError) -> OutOfMemoryError:
        """Return an error that says which call has no memory, and what to do."""
        return OutOfMemoryError(
            f"{name} on group {self.name!r}: rank {self.world_rank} has no memory for the result "
            "or for a contiguous copy of the array, which of a broadcast view is as large as its "
            f"shape: {error}; move it in parts"
        )

    def poison(self, call: Call, error: Exception) -> None:
        """With checks on, make the other ranks raise, too: this one cannot take part in `call`.

        Waits a little for them to come; if they do not, they will find the note later.
        """
        ledger = self.ledger
        if not self.checked or ledger is None or self.context.closed:
            return
        note = f"raised {type(error).__name__}: {error}"
        ledger.started += 1
        communicator = ledger.communicator
        request = self.progress.stage(communicator, compare(communicator, call, note=note))
        has_ended = self.progress.wait(
            communicator,
            lambda: request.settled,
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

    def tally(self, name: str, nbytes: int, receives: tuple[Rule, Amount] | None) -> Counter:
        """Return what counts operations of one kind by a single addition each."""
        return self.context.traffic.tally(name, nbytes, receives, self._members)

    def arrival(self) -> Arrival:
        """Return what counts the bytes of an operation whose size only the sender knows."""
        return Arrival(self.context.traffic, self._members)

    def count_from_each(self, call: Call, nbytes: int) -> None:
        """Count an exchange in which each rank sends every other one so many bytes."""
        traffic = self.context.traffic
        traffic.admit_by(call, uniform, self._members, nbytes)
        traffic.count(call.name, nbytes * (self.size - 1))
        traffic.count_received(call.name, uniform, self._members, nbytes)

    def mail_with(self, rank: int) -> Mail | None:
        """Return what moves messages to and from a rank in shared memory; None if there is none."""
        mail = self.communicator.node_mail
        return mail if mail is not None and mail.reaches(rank) else None

    def count_start(self, call: Call, plan: PlanRecord) -> None:
        """Count a message or a shift that goes by no plan made before.

        A mesh is not to close as if a message were received that was not.
        """
        self.count(call, plan, True)
        ledger = self.ledger
        if isinstance(call, Message) and ledger is not None:
            ledger.unread += 1 if call.name == "send" else -1
            if ledger.mail is not None:
                ledger.mail.post(call)
