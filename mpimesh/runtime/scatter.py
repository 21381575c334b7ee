"""Scatter of an array that only its root knows: in a window by one operation, else by steps.

In a window all ranks compare root, axis and sizes. The root tells shape and dtype of its array
beside its entry. A rank with an `out` has bound that by then, and gets its block if it fits; one
without is told first, and makes its array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays import Array, is_cupy, moved, namespace
from mpimesh.comm import Steps
from mpimesh.comm.requests import Condition
from mpimesh.core.call import PlanRecord, Prepared
from mpimesh.core.node import Operation, Window
from mpimesh.errors import DTypeError, MpimeshError, OutOfMemoryError, ShapeError
from mpimesh.runtime.call import Call
from mpimesh.runtime.messages import Envelope, array_of, library_of, received_as, row_of
from mpimesh.runtime.operands import (
    Blocks,
    check_output,
    check_sizes,
    normal_axis,
)
from mpimesh.runtime.plan import Plan, PlanningGroup, plan_scatter as plan_known_scatter
from mpimesh.runtime.scatter_head import head, read, refusal
from mpimesh.runtime.traffic import Arrival
from mpimesh.runtime.work import CollectiveTensor

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["plan_scatter", "scatter"]

_BY_STEPS = b"steps"
"""Told of an array on a device, if all ranks take memory of devices: it goes by steps."""
_OF_ARRAYS = ShapeError, DTypeError, OutOfMemoryError
"""Errors of an array, which a root tells the others instead of its blocks."""
_BLOCK: Any = np.empty(0, np.uint8)


def scatter(
    group: GroupCore,
    x: Array | None,
    root: int,
    axis: int,
    sizes: Sequence[int] | None,
    out: Array | None,
    label: str | None,
) -> CollectiveTensor:
    """Start a scatter; see :meth:`ProcessGroup.scatter`."""
    rank = group.member("scatter")
    if type(root) is not int or root:
        root = group.check_rank(root, "root")
    if sizes is not None:
        sizes = tuple(check_sizes(sizes, group.size))
    # Without one, a rank that gives a wrong array raises at once, and tells the others nothing.
    window = None if group.checked else group.communicator.window
    unfit: MpimeshError | None = None  # what is wrong with `out`, whatever the array is
    if out is not None and out is not x:
        try:
            check_output(out)
        except _OF_ARRAYS as error:
            if window is None:
                raise
            unfit = error
    problem = unfit
    # What most calls are: all that this rank needs is here.
    mine = x if rank == root else out
    is_direct = type(mine) is np.ndarray and unfit is None and window is not None
    if is_direct and (rank == root or not group.moves_device_memory):
        try:
            return group.run(plan_scatter, mine, out, label, (root, axis, sizes))
        except _OF_ARRAYS as error:
            problem = error
    call = Call("scatter", group.name, _rule(root, axis, sizes), label=label)
    data: Array | None = None
    if rank == root:
        try:
            if x is None:
                raise ShapeError(f"scatter needs an array on its root, rank {root} passed None")
            data = group.operand(x)
        except _OF_ARRAYS as error:
            if window is None:
                raise
            return _refuse(group, call, window, root, error)
    arrival = group.arrival()  # now: for the budgets of this place
    arrival.call = call
    steps = partial(_steps, group, arrival, data, x, root, (axis, sizes), out)
    lock = None if data is None or x is out else x
    if window is None:
        plan = PlanRecord(0 if data is None else data.nbytes)
        return group.submit(call, Prepared(plan, steps, None, None, group.scope_if_any()), lock)
    if group.moves_device_memory:
        window.mark_ready()
    if rank != root:
        bound, scope = window.await_scatter(root), group.scope_if_any()
        prepared = Prepared(PlanRecord(), bound, None, None, scope)
        into = out if unfit is None else None
        prepared.after = partial(_received, group, arrival, window, root, sizes, into, steps)
        handle = group.submit(call, prepared)
        return handle if unfit is None else handle.map(_raising(unfit))
    if is_cupy(data) and window.all_ready:
        return _tell(group, call, window, root, _BY_STEPS, lambda _: steps())
    try:
        if is_cupy(x):
            handle = group.run(plan_scatter, moved(data, np), None, label, (root, axis, sizes, 1))
            return handle.map(partial(_onto_device, out))
        if problem is None:  # it is no array of NumPy's
            return group.run(plan_scatter, data, out, label, (root, axis, sizes))
    except _OF_ARRAYS as error:
        problem = error
    if out is not None:
        # What is wrong with it is the root's alone: the others get their blocks.
        try:
            handle = group.run(plan_scatter, moved(data, np), None, label, (root, axis, sizes))
            return handle.map(_raising(problem))
        except _OF_ARRAYS as error:
            problem = error
    return _refuse(group, call, window, root, problem)


def _rule(root: int, axis: int, sizes: tuple[int, ...] | None) -> str:
    return f"root {root}, axis {axis}, sizes {None if sizes is None else list(sizes)}"


def plan_scatter(
    group: PlanningGroup,
    data: Array,
    root: int,
    axis: int,
    sizes: tuple[int, ...] | None,
    of_device: int = 0,
) -> Plan:
    """Plan a scatter of `data` on the root, or into `data` on another rank.

    Where `of_device` is not 0, `data` is a copy of an array on a device.
    """
    is_root = group.rank == root
    at = normal_axis(axis, data.ndim)  # a scalar has none here
    plan = plan_known_scatter(group, data, root, at, sizes, is_root)
    shape: Any = plan.compared  # of the whole
    plan.rule, plan.compared, plan.in_place = _rule(root, axis, sizes), None, not is_root
    plan.kind = ""  # which only the root knows
    told, digest = head(shape, data.dtype, at, sizes, bool(of_device))
    if is_root:
        plan.told, plan.tells = told, (digest, 0)
    else:
        plan.tells = digest, head(shape, data.dtype, at, sizes, True)[1]
    return plan


# -- who does more than to start it ----------------------------------------------------------------


def _tell(
    group: GroupCore,
    call: Call,
    window: Window,
    root: int,
    told: bytes,
    after: Callable[[Any], Any],
) -> CollectiveTensor:
    """Start a scatter of nothing on the root, which tells why, and what it does after that."""
    bound = window.scatter(_BLOCK, _BLOCK[:0], [0] * group.size, root)
    bound.tell(digest_bits(told, 32) or 1, 0, told)
    prepared = Prepared(PlanRecord(), bound, None, None, group.scope_if_any())

    def steps(started: Operation) -> Steps:
        yield started
        return (yield from after(None))

    prepared.after = steps
    return group.submit(call, prepared)


def _refuse(
    group: GroupCore, call: Call, window: Window, root: int, problem: MpimeshError
) -> CollectiveTensor:
    """Start a scatter of nothing on the root, which all ranks refuse for what is wrong there."""
    told = refusal(problem)
    return _tell(group, call, window, root, told, lambda _: read(told, root))


def _received(
    group: GroupCore,
    arrival: Arrival,
    window: Window,
    root: int,
    sizes: tuple[int, ...] | None,
    out: Array | None,
    by_steps: Callable[[], Steps],
    operation: Operation,
) -> Steps:
    """Receive this rank's block, when the root has told what it is."""
    yield Condition(lambda: operation.test() or operation.told is not None)
    operation.test()  # raises if what came is no scatter
    told = operation.told or b""
    if told == _BY_STEPS:
        operation.give(None)
        return (yield from by_steps())
    try:
        array = read(told, root)
    except MpimeshError:
        operation.give(None)
        raise
    blocks = Blocks.of_whole(array.shape, array.axis, group.size, sizes)
    counts = [count * array.dtype.itemsize for count in blocks.counts]

    def move(recv: Array, _: Array) -> Steps:
        like = window.scatter(None, recv, counts, root)
        like.tell(digest_bits(told, 32) or 1)
        operation.give(like)
        yield operation

    shape, envelope = blocks.block_shape(group.rank or 0), Envelope(*array[:2], "", array.of_device)
    return (yield from received_as(group, arrival, root, envelope, shape, np, out, move))


def _steps(
    group: GroupCore,
    arrival: Arrival,
    data: Array | None,
    x: Array | None,
    root: int,
    cut: tuple[int, tuple[int, ...] | None],
    out: Array | None,
) -> Steps:
    """Scatter by steps: the root's head in a broadcast, then the blocks."""
    row = row_of(data, of_cupy=is_cupy(x), takes_device=False)
    yield group.communicator.broadcast(row, root)
    array = array_of(row, root)
    takers = np.array([int(group.moves_device_memory)])
    if array.on_device:
        yield group.communicator.all_reduce(None, takers, "min")
    library = library_of(array.on_device and bool(takers[0]))
    # The same arithmetic on every rank: a misfit raises on all of them.
    axis = normal_axis(cut[0], len(array.shape))
    blocks = Blocks.of_whole(array.shape, axis, group.size, cut[1])
    counts = [count * array.dtype.itemsize for count in blocks.counts]

    def move(recv: Array, _: Array) -> Steps:
        send = None
        if data is not None:
            send = blocks.pack(moved(data, library)).view(np.uint8)
            if library.may_share_memory(send, recv):
                send = send.copy()
        yield group.side(library).scatter(send, recv, counts, root)

    shape = blocks.block_shape(group.rank or 0)
    return (yield from received_as(group, arrival, root, array, shape, library, out, move))


def _raising(error: MpimeshError) -> Callable[[Any], NoReturn]:
    def refuse(_: Any) -> NoReturn:
        raise error

    return refuse


def _onto_device(out: Array | None, block: Array) -> Array:
    """Return a block as it is asked for: where the array lay, or in `out`."""
    if out is None:
        return moved(block, library_of(True))
    out[...] = moved(block, namespace(out))
    return out
