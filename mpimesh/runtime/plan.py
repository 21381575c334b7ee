"""Collectives planned once and started many times.

A `Plan` is what a collective needs to know but for the arrays: how the transport is called, in
which dtype, with which blocks, and how what comes becomes the result. A call looks it up by shape,
dtype and arguments, binds it to its arrays, which makes it `Prepared`, and starts that. A
`PersistentCollective` is a plan bound once (`persistent.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mpimesh.arrays import (
    Array,
    DType,
    HostArray,
    OpLike,
    ReduceOp,
    StreamScope,
    as_reduce_op,
    is_cupy,
    moved,
    namespace,
    wire_dtype,
)
from mpimesh.comm import Communicator, Request, Steps
from mpimesh.comm.algorithms import Algorithms
from mpimesh.core.call import PlanRecord, Prepared
from mpimesh.core.node import Bound, Window
from mpimesh.runtime.call import Call
from mpimesh.runtime.operands import (
    AgreedSizes,
    Blocks,
    check_output,
    compare_blocks,
    normal_axis,
    output_array,
)
from mpimesh.runtime.traffic import Amount, Rule, all_reduced, per_rank, sparse, uniform

__all__ = [
    "Plan",
    "plan_all_gather",
    "plan_all_reduce",
    "plan_all_to_all",
    "plan_broadcast",
    "plan_gather",
    "plan_reduce",
    "plan_reduce_scatter",
    "plan_scatter",
    "receive",
    "rule_by",
]


class PlanningGroup(Protocol):
    """A group as far as plans are made for it: its core has it all."""

    size: int

    @property
    def rank(self) -> int | None: ...

    @property
    def communicator(self) -> Communicator: ...

    def check_rank(self, rank: int, what: str) -> int: ...

    def check_algorithm(
        self, name: str, algorithm: str | None, *, on_device: bool = False
    ) -> None: ...

    def begin_on_device(
        self, name: str, library: ModuleType, *arguments: Any
    ) -> Request | Steps: ...

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        library: ModuleType = np,
        like: Array | None = None,
    ) -> Array: ...


class Plan(PlanRecord):
    """A collective of a group, worked out but for the arrays.

    Args:
        name: The operation, which is the transport's, too.
        data: This rank's array, as the group moves it: of NumPy, or of CuPy on its device.
        rule: What must agree over ranks beside shape and dtype, in words.
        compared: The part of the shape that must agree.
        tail: What the transport is given after the buffers.
        shape: The result's shape; None if this rank gets none.
        wire: The dtype in which values are reduced; None if bytes are moved.
        outgoing: The blocks into which `data` is cut.
        incoming: The blocks that come.
        divisor: By which the result is divided.
        sends: Whether this rank's array is read.
        in_place: Whether the transport can reduce an array where it lies.
        algorithm: By which the transport is asked to do it; None for that of its table. The ranks
            compare it, too.
        receives: How what this rank receives is counted; None if it receives nothing, or is counted
            when it comes.
        also: Compares more over the ranks before each start; None for nothing more.

    Attributes:
        nbytes: Bytes that this rank puts in.
        digest: Of what the ranks compare; 0 if it is not known, or they do not.
        tally: Counts its starts; None if it starts once.
        tells: Digests of what a scatter fits of which the root alone knows what it is; on the root
            the first one, of what it tells. None of any other.
        told: What the root tells.
        unequal: Whether the ranks may receive unequally much, so that all ask whether the budget
            of any is exceeded.
        shape_in: The shape of the input.
        kind: What the ranks compare of its dtype.
    """

    __slots__ = (
        "algorithm", "converts", "divisor", "dtype", "incoming", "is_plain", "library", "on_device",
        "outgoing", "reads", "tail", "tells", "told", "wire",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        data: Array,
        rule: str,
        compared: object,
        tail: tuple[Any, ...],
        shape: tuple[int, ...] | None,
        *,
        wire: DType | None = None,
        outgoing: Blocks | None = None,
        incoming: Blocks | None = None,
        divisor: int = 1,
        sends: bool = True,
        in_place: bool = False,
        algorithm: str | None = None,
        receives: tuple[Rule, Amount] | None = None,
        also: Callable[[Call], Steps] | None = None,
    ) -> None:
        super().__init__(data.nbytes if sends else 0, receives)
        self.name, self.rule, self.compared = name, rule_by(rule, algorithm), compared
        self.shape_in, self.shape, self.dtype = data.shape, shape, data.dtype
        self.library = namespace(data)
        self.on_device = self.library is not np
        self.kind = f"{data.dtype} on a device" if self.on_device else data.dtype
        self.tail, self.wire, self.divisor, self.algorithm = tail, wire, divisor, algorithm
        self.reads, self.in_place, self.also = sends, in_place, also
        self.tells: tuple[int, int] | None = None
        self.told: bytes | None = None
        self.outgoing = None if outgoing is None or outgoing.in_order else outgoing
        self.incoming = None if incoming is None or incoming.in_order else incoming
        self.converts = wire is not None and wire != data.dtype
        self.is_plain = not self.converts and divisor == 1 and self.incoming is None

    def way(self, table: Algorithms, is_shared: bool) -> str:
        """Return by which algorithm of a table it goes, and why.

        Args:
            table: The table.
            is_shared: Whether the input lies in memory of :meth:`DeviceMesh.shared_empty`.
        """
        memory = "device" if self.on_device else "shared" if is_shared else "host"
        way = self.algorithm or table.pick(self.name, memory, self.nbytes)
        why = "asked for" if self.algorithm else table.reason(way)
        return f"{way}: {why}"

    def tables(self, window: Window, dtype: DType) -> Bound | None:
        """Return it bound to arrays like those to come, for its tables; None if no window can.

        Args:
            window: The window.
            dtype: That of the arrays; the plan's may be an equal one.
        """
        if not self.is_plain or self.on_device or self.outgoing is not None:
            return None
        if self.algorithm is not None or self.also is not None:
            return None
        kind: DType = np.dtype(np.uint8) if self.wire is None else self.wire
        arrays: list[HostArray | None] = [np.empty(self.shape_in, dtype).reshape(-1).view(kind)]
        if self.name != "broadcast":
            result = None if self.shape is None else np.empty(self.shape, dtype)
            arrays.append(None if result is None else result.reshape(-1).view(kind))
        self.in_place = self.in_place or self.name == "broadcast"
        bound: Bound = getattr(window, self.name)(*arrays, *self.tail)
        if self.tells is not None:
            bound.tell(*self.tells, self.told)
        return bound

    def bind(
        self,
        group: PlanningGroup,
        x: Array,
        data: Array,
        out: Array | None,
        *,
        starts: bool = True,
    ) -> Prepared:
        """Return the collective of these arrays, with what makes the result of what comes.

        Args:
            group: Gives memory for the result.
            x: The caller's array.
            data: The same, as the group moves it.
            out: The caller's array for the result; may be `x`.
            starts: Whether it is to be started now; if not, nothing is written.

        Raises:
            ShapeError: If `out` does not fit.
            DTypeError: If `out` is no array, or of another dtype.
        """
        arguments, value, finish = self._buffers(group, x, data, out, starts)
        begin: Callable[[], Request | Steps]
        scope = None
        if self.on_device:
            # Only in its turn: the first on a device makes what moves its memory, collectively.
            begin = partial(group.begin_on_device, self.name, self.library, *arguments)
            scope = StreamScope()
        else:
            begin = group.communicator.prepare(self.name, arguments, self.algorithm)
            if self.tells is not None and isinstance(begin, Bound):
                begin.tell(*self.tells, self.told)
            if out is not None and type(out) is not np.ndarray:
                scope = StreamScope.of(out)
        return Prepared(self, begin, value, finish, scope, arguments)

    def _buffers(
        self, group: PlanningGroup, x: Array, data: Array, out: Array | None, starts: bool
    ) -> tuple[tuple[Any, ...], Any, Callable[[], Any] | None]:
        """Return the arguments of the transport's method, what comes, and what finishes it."""
        library, wire = self.library, self.wire
        flags = data.flags
        in_order = flags.c_contiguous and (library is not np or flags.aligned)
        if self.shape is None:
            if out is not None:
                check_output(out)  # so that all ranks refuse what is no array
            return (self._packed(data, in_order), None, *self.tail), None, None
        recv: Array
        finish = None
        if x is data and self.is_plain and (out is None or (out is x and in_order)):
            if out is None:
                target: Array = group.empty(self.shape, data.dtype, library, data)
            else:
                output_array(out, self.shape, data.dtype)
                target = out
            recv = target.reshape(-1)
            if wire is None:
                recv = recv.view(np.uint8)
        else:
            recv, target, finish = receive(
                group,
                library,
                (self.shape, data.dtype),  # not the plan's, which may be an equal one
                out,
                of_caller=library if x is data else namespace(x),
                wire=wire,
                blocks=self.incoming,
                divisor=self.divisor,
                like=data,
            )
        if self.name == "broadcast":
            if self.reads and starts and target is not x:
                target[...] = data
            return (recv, *self.tail), target, finish
        send: Array | None = None
        if self.reads and (target is not x or not self.in_place):
            send = self._packed(data, in_order)
            if out is not None and library.may_share_memory(send, recv):
                send = send.copy()
        return (send, recv, *self.tail), target, finish

    def _packed(self, data: Array, in_order: bool) -> Array:
        """Return what is sent: flat, contiguous, in the dtype of the wire; a view where it can."""
        wire = self.wire
        if self.converts or (wire is not None and not in_order):
            data = data.astype(wire, order="C")
        if self.outgoing is not None:
            data = self.outgoing.pack(data)
        elif not data.flags.c_contiguous:
            data = self.library.ascontiguousarray(data)
        flat = data.reshape(-1)
        return flat if wire is not None else flat.view(np.uint8)


# -- results -------------------------------------------------------------------------------------


def receive(
    group: PlanningGroup,
    library: ModuleType,
    result: tuple[tuple[int, ...], DType],
    out: Array | None,
    *,
    of_caller: ModuleType,
    wire: DType | None = None,
    blocks: Blocks | None = None,
    divisor: int = 1,
    like: Array | None = None,
) -> tuple[Array, Any, Callable[[], Any] | None]:
    """Return a flat buffer to receive into, the array it becomes, and the work that it still needs.

    Args:
        group: Gives memory.
        library: The library whose memory bytes come into, NumPy or CuPy.
        result: Shape and dtype.
        out: The caller's array for the result.
        of_caller: The library whose array the caller gets.
        wire: The dtype in which values come; None for bytes.
        blocks: The blocks that come, if they do not lie one after the other in the result.
        divisor: By which it is to be divided.
        like: The operand, which decides where a new result lies.
    """
    shape, dtype = result
    if out is not None:
        output_array(out, shape, dtype)
    arrives_as = dtype if wire is None else wire
    fits = (
        out is not None
        and arrives_as == dtype
        and namespace(out) is library
        and out.flags.c_contiguous
        and (wire is None or is_aligned(out))
    )
    target = out if fits and out is not None else group.empty(shape, arrives_as, library, like)
    packed = target if blocks is None else group.empty((target.size,), arrives_as, library)
    # Bytes, or the very type of what is sent: NumPy's long and long long may be equal.
    recv = packed.reshape(-1).view(np.uint8 if wire is None else wire)
    plain = blocks is None and divisor == 1 and arrives_as == dtype
    if plain and (target is out or (out is None and of_caller is library)):
        return recv, target, None

    def finish() -> Any:
        if blocks is not None:
            blocks.unpack(packed, target)
        # Overflow and NaN pass silently, as they do in the reduction itself.
        with np.errstate(all="ignore"):
            if divisor != 1:
                library.divide(target, divisor, out=target)
            value = target if arrives_as == dtype else target.astype(dtype)
        if out is None:
            return moved(value, of_caller)
        if out is not target:
            out[...] = moved(value, namespace(out))
        return out

    return recv, target, finish


def rule_by(rule: str, algorithm: str | None) -> str:
    """Return what must agree over ranks, with the algorithm if one is asked for."""
    return rule if algorithm is None else f"{rule}, algorithm {algorithm}"


def is_aligned(x: Array) -> bool:
    """Tell whether each element of `x` starts where its type may; all of CuPy's do."""
    return is_cupy(x) or bool(x.flags.aligned)


def _byte_counts(blocks: Blocks, dtype: DType) -> list[int]:
    return [count * dtype.itemsize for count in blocks.counts]


# -- reductions ----------------------------------------------------------------------------------


def plan_all_reduce(
    group: PlanningGroup, data: Array, op: OpLike, algorithm: str | None = None
) -> Plan:
    """Plan an all-reduce."""
    op = as_reduce_op(op)
    wire = wire_dtype(data.dtype, op)
    group.check_algorithm("all_reduce", algorithm, on_device=namespace(data) is not np)
    moved_as, divisor = _moved_as(group, op, data, wire, algorithm)
    return Plan(
        "all_reduce",
        data,
        str(op),
        data.shape,
        (moved_as,),
        data.shape,
        wire=wire,
        divisor=divisor,
        receives=(all_reduced, data.nbytes),
        in_place=True,
        algorithm=algorithm,
    )


def _moved_as(
    group: PlanningGroup, op: ReduceOp, data: Array, wire: DType, algorithm: str | None = None
) -> tuple[str, int]:
    """Return the transport's name of a reduction, and by what its result is to be divided here."""
    if op is not ReduceOp.MEAN:
        return str(op.value), 1
    of_host = namespace(data) is np and wire.char in "fd" and algorithm is None
    if of_host and group.communicator.averages(data.size * wire.itemsize):
        return "mean", 1  # divided while it is in cache
    return "sum", group.size


def plan_reduce(
    group: PlanningGroup,
    data: Array,
    op: OpLike,
    root: int,
    algorithm: str | None = None,
) -> Plan:
    """Plan a reduction to one rank."""
    root = group.check_rank(root, "root")
    op = as_reduce_op(op)
    wire = wire_dtype(data.dtype, op)
    at_root = group.rank == root
    group.check_algorithm("reduce", algorithm, on_device=namespace(data) is not np)
    moved_as, divisor = _moved_as(group, op, data, wire, algorithm)
    return Plan(
        "reduce",
        data,
        f"{op}, root {root}",
        data.shape,
        (moved_as, root),
        data.shape if at_root else None,
        wire=wire,
        divisor=divisor,
        receives=(uniform, data.nbytes) if at_root else None,
        algorithm=algorithm,
    )


def plan_reduce_scatter(
    group: PlanningGroup, data: Array, op: OpLike, axis: int, sizes: Sequence[int] | None
) -> Plan:
    """Plan a reduce-scatter."""
    op = as_reduce_op(op)
    wire = wire_dtype(data.dtype, op)
    axis = normal_axis(axis, data.ndim)
    blocks = Blocks.of_whole(data.shape, axis, group.size, sizes)
    rank = group.rank or 0
    moved_as, divisor = _moved_as(group, op, data, wire)
    return Plan(
        "reduce_scatter",
        data,
        f"{op}, axis {axis}, sizes {list(blocks.sizes)}",
        data.shape,
        (blocks.counts, moved_as),
        blocks.block_shape(rank),
        wire=wire,
        outgoing=blocks,
        divisor=divisor,
        receives=(uniform, blocks.counts[rank] * data.dtype.itemsize),
    )


# -- movements: of bytes, so of every dtype but objects ---------------------------------------


def plan_all_gather(
    group: PlanningGroup, data: Array, axis: int, sizes: Sequence[int] | None
) -> Plan:
    """Plan an all-gather."""
    shape = data.shape or (1,)
    axis = normal_axis(axis, len(shape))
    blocks = Blocks.of_mine(shape, axis, group.rank or 0, group.size, sizes)
    counts = _byte_counts(blocks, data.dtype)
    return Plan(
        "all_gather",
        data,
        f"axis {axis}, sizes {list(blocks.sizes)}",
        blocks.shape,
        (counts,),
        blocks.shape,
        incoming=blocks,
        receives=(per_rank, tuple(counts)),
    )


def plan_gather(
    group: PlanningGroup, data: Array, root: int, axis: int, sizes: Sequence[int] | None
) -> Plan:
    """Plan a gather."""
    root = group.check_rank(root, "root")
    shape = data.shape or (1,)
    axis = normal_axis(axis, len(shape))
    blocks = Blocks.of_mine(shape, axis, group.rank or 0, group.size, sizes)
    counts = _byte_counts(blocks, data.dtype)
    at_root = group.rank == root
    return Plan(
        "gather",
        data,
        f"root {root}, axis {axis}, sizes {list(blocks.sizes)}",
        blocks.shape,
        (counts, root),
        blocks.shape if at_root else None,
        incoming=blocks,
        receives=(per_rank, tuple(counts)) if at_root else None,
    )


def plan_scatter(
    group: PlanningGroup,
    data: Array,
    root: int,
    axis: int,
    sizes: Sequence[int] | None,
    is_whole: bool,
) -> Plan:
    """Plan a scatter of which all ranks know the shape: of the whole, or of their block."""
    root = group.check_rank(root, "root")
    rank = group.rank or 0
    shape = data.shape or (1,)
    axis = normal_axis(axis, len(shape))
    if is_whole:
        blocks = Blocks.of_whole(shape, axis, group.size, sizes)
    else:
        blocks = Blocks.of_mine(shape, axis, rank, group.size, sizes)
    counts = _byte_counts(blocks, data.dtype)
    nbytes = counts[rank]
    return Plan(
        "scatter",
        data,
        f"root {root}, axis {axis}, sizes {list(blocks.sizes)}",
        blocks.shape,
        (counts, root),
        blocks.block_shape(rank),
        outgoing=blocks if rank == root else None,
        sends=rank == root,
        receives=None if rank == root else (sparse, (root, nbytes, int(nbytes > 0))),
    )


def plan_all_to_all(
    group: PlanningGroup,
    data: Array,
    split_axis: int,
    concat_axis: int | None,
    sizes: Sequence[int] | None,
    recv_sizes: Sequence[int] | None,
) -> Plan:
    """Plan an all-to-all.

    Without sizes the arrays of all ranks must be of one shape, which goes into what they compare
    in any case. With sizes each rank knows its own only: they tell each other before they start.
    """
    ndim = data.ndim
    split_axis = normal_axis(split_axis, ndim, what="split_axis")
    if concat_axis is None:
        concat_axis = split_axis
    concat_axis = normal_axis(concat_axis, ndim, what="concat_axis")
    given = sizes is not None or recv_sizes is not None
    agreed = isinstance(sizes, AgreedSizes) and isinstance(recv_sizes, AgreedSizes)
    blocks = Blocks.of_whole(data.shape, split_axis, group.size, sizes)
    incoming = blocks.answered(group.rank or 0, concat_axis, recv_sizes)
    recv_counts = _byte_counts(incoming, data.dtype)
    return Plan(
        "all_to_all",
        data,
        f"split_axis {split_axis}, concat_axis {concat_axis}" + (", with sizes" if given else ""),
        ndim if given else data.shape,
        (_byte_counts(blocks, data.dtype), recv_counts),
        incoming.shape,
        outgoing=blocks,
        incoming=incoming,
        also=partial(compare_blocks, group.communicator, outgoing=blocks, incoming=incoming)
        if given and not agreed and group.size > 1
        else None,
        receives=(per_rank, tuple(recv_counts)),
    )


def plan_broadcast(
    group: PlanningGroup, data: Array, root: int, algorithm: str | None = None
) -> Plan:
    """Plan a broadcast from a rank that all know."""
    root = group.check_rank(root, "root")
    group.check_algorithm("broadcast", algorithm, on_device=namespace(data) is not np)
    at_root = group.rank == root
    whole = (sparse, (root, data.nbytes, int(data.nbytes > 0)))
    return Plan(
        "broadcast",
        data,
        f"root {root}",
        data.shape,
        (root,),
        data.shape,
        receives=None if at_root else whole,
        sends=at_root,
        algorithm=algorithm,
    )
