"""Random programs: a few operations on random groups, arrays and memory, all under way at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.contract.cases import ALL, COMPLEX, LAYOUTS, NUMBERS, WRITABLE, output, values
from tests.contract.flight import Flight
from tests.contract.oracle import cut, joined, reduced

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MOVEMENTS = ("all_gather", "gather", "scatter", "all_to_all", "broadcast", "from whom", "shift")
MESSAGES = ("send and recv",)
GROUPS = ("world", "turned", "rotated", "first and last", "a", "b", "joined")


@dataclass(frozen=True)
class Step:
    """One operation; the numbers are taken modulo what there is.

    Attributes:
        kind: Which.
        group: On which of the groups.
        dtype: Of the arrays.
        shape: Of the arrays, but for the axis that is cut.
        layout: Memory order of the inputs.
        axis: The axis that is cut or joined.
        other_axis: The second axis of an all-to-all.
        sizes: Blocks along the axis, cyclically; None for equal ones.
        root: The root, or how far a shift goes.
        op: The reduction.
        out: Memory order of the output; None for a new one.
    """

    kind: str
    group: str
    dtype: Any
    shape: tuple[int, ...]
    layout: str
    axis: int
    other_axis: int
    sizes: tuple[int, ...] | None
    root: int
    op: str
    out: str | None


@st.composite
def steps(draw: Any) -> Step:
    """Draw one operation that is right."""
    kind = draw(st.sampled_from(REDUCTIONS + MOVEMENTS + MESSAGES))
    dtype = draw(st.sampled_from(NUMBERS if kind in REDUCTIONS else ALL))
    ops = ["sum", "prod"]
    if dtype not in COMPLEX:
        ops += ["min", "max"]
    if dtype.kind in "fc":
        ops.append("mean")
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    return Step(
        kind=kind,
        group=draw(st.sampled_from(GROUPS)),
        dtype=dtype,
        shape=shape,
        layout=draw(st.sampled_from([*LAYOUTS])),
        axis=draw(st.integers(-len(shape), len(shape) - 1)),
        other_axis=draw(st.integers(-len(shape), len(shape) - 1)),
        sizes=draw(st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)),
        root=draw(st.integers(0, 9)),
        op=draw(st.sampled_from(ops)),
        out=draw(st.none() | st.sampled_from(WRITABLE)),
    )


programs = st.lists(steps(), min_size=1, max_size=5)


def run(groups: list[Any], program: list[Step], seed: int) -> None:
    """Start all operations of a program that this rank takes part in, resolve them, compare."""
    flight = Flight(seed)
    mine = {group.name: group for group in groups}
    for place, step in enumerate(program):
        if step.group in mine:
            _STARTS[step.kind](flight, mine[step.group], step, place)
    flight.land()


def _resized(step: Step, size: int) -> tuple[int, ...]:
    shape = list(step.shape)
    shape[step.axis] = size
    return tuple(shape)


def _sizes(step: Step, group: Any) -> list[int]:
    if step.sizes is None:
        return [step.shape[step.axis]] * group.size
    return [step.sizes[rank % len(step.sizes)] for rank in range(group.size)]


def _inputs(step: Step, group: Any, shapes: list[tuple[int, ...]], seed: int) -> list[Any]:
    make = LAYOUTS["plain" if step.layout == "list" else step.layout]
    return [
        make(values(rank, shape, step.dtype, seed))
        for rank, shape in zip(group.ranks, shapes, strict=True)
    ]


def _out(step: Step, expected: Any, *, here: bool = True) -> Any:
    if step.out is None or not here:
        return None
    return output(step.out, expected.shape, step.dtype)


def _all_reduce(flight: Flight, group: Any, step: Step, seed: int) -> None:
    inputs = _inputs(step, group, [step.shape] * group.size, seed)
    expected = reduced(inputs, step.op)
    out = _out(step, expected)
    handle = group.all_reduce(inputs[group.rank], step.op, out=out)
    flight.add(handle, expected, (step, group), into=out)


def _reduce(flight: Flight, group: Any, step: Step, seed: int) -> None:
    root = step.root % group.size
    inputs = _inputs(step, group, [step.shape] * group.size, seed)
    expected = reduced(inputs, step.op)
    out = _out(step, expected, here=group.rank == root)
    handle = group.reduce(inputs[group.rank], step.op, root=root, out=out)
    flight.add(handle, expected if group.rank == root else None, (step, group), into=out)


def _reduce_scatter(flight: Flight, group: Any, step: Step, seed: int) -> None:
    sizes = _sizes(step, group)
    inputs = _inputs(step, group, [_resized(step, sum(sizes))] * group.size, seed)
    expected = cut(reduced(inputs, step.op), step.axis, sizes)[group.rank]
    out = _out(step, expected)
    given = None if step.sizes is None else sizes
    handle = group.reduce_scatter(inputs[group.rank], step.op, axis=step.axis, sizes=given, out=out)
    flight.add(handle, expected, (step, group), into=out)


def _all_gather(flight: Flight, group: Any, step: Step, seed: int) -> None:
    sizes = _sizes(step, group)
    inputs = _inputs(step, group, [_resized(step, size) for size in sizes], seed)
    expected = joined(inputs, step.axis)
    out = _out(step, expected)
    given = None if step.sizes is None else sizes
    handle = group.all_gather(inputs[group.rank], axis=step.axis, sizes=given, out=out)
    flight.add(handle, expected, (step, group), into=out)


def _gather(flight: Flight, group: Any, step: Step, seed: int) -> None:
    root, sizes = step.root % group.size, _sizes(step, group)
    inputs = _inputs(step, group, [_resized(step, size) for size in sizes], seed)
    expected = joined(inputs, step.axis)
    out = _out(step, expected, here=group.rank == root)
    given = None if step.sizes is None else sizes
    handle = group.gather(inputs[group.rank], root=root, axis=step.axis, sizes=given, out=out)
    flight.add(handle, expected if group.rank == root else None, (step, group), into=out)


def _scatter(flight: Flight, group: Any, step: Step, seed: int) -> None:
    root, sizes = step.root % group.size, _sizes(step, group)
    (whole,) = _inputs(step, group, [_resized(step, sum(sizes))] * group.size, seed)[root:][:1]
    expected = cut(whole, step.axis, sizes)[group.rank]
    out = _out(step, expected)
    given = None if step.sizes is None else sizes
    x = whole if group.rank == root else None
    handle = group.scatter(x, root=root, axis=step.axis, sizes=given, out=out)
    flight.add(handle, expected, (step, group), into=out)


def _all_to_all(flight: Flight, group: Any, step: Step, seed: int) -> None:
    me, n, ndim = group.rank, group.size, len(step.shape)
    rows = _sizes(step, group)
    shapes = [list(_resized(step, sum(rows))) for _ in range(n)]
    along_one = step.axis % ndim == step.other_axis % ndim
    columns = [step.root % 3 + source % 2 for source in range(n)]
    if not along_one:
        for source in range(n):
            shapes[source][step.other_axis] = columns[source]
    inputs = _inputs(step, group, [tuple(shape) for shape in shapes], seed)
    expected = joined([cut(x, step.axis, rows)[me] for x in inputs], step.other_axis)
    out = _out(step, expected)
    handle = group.all_to_all(
        inputs[me],
        split_axis=step.axis,
        concat_axis=step.other_axis,
        sizes=None if step.sizes is None else rows,
        recv_sizes=[rows[me]] * n if along_one else columns,
        out=out,
    )
    flight.add(handle, expected, (step, group), into=out)


def _broadcast(flight: Flight, group: Any, step: Step, seed: int) -> None:
    root = step.root % group.size
    inputs = _inputs(step, group, [step.shape] * group.size, seed)
    expected = np.array(inputs[root])
    out = _out(step, expected)
    handle = group.broadcast(inputs[group.rank], root=root, out=out)
    flight.add(handle, expected, (step, group), into=out)


def _from_whom(flight: Flight, group: Any, step: Step, seed: int) -> None:
    sender = step.root % group.size
    inputs = _inputs(step, group, [step.shape] * group.size, seed)
    expected = np.array(inputs[sender])
    out = _out(step, expected)
    x = inputs[sender] if group.rank == sender else None
    flight.add(group.broadcast(x, root=None, out=out), expected, (step, group), into=out)


def _shift(flight: Flight, group: Any, step: Step, seed: int) -> None:
    offset, wrap = step.root - 4, step.sizes is None
    sizes = [step.shape[step.axis] + rank for rank in range(group.size)]
    inputs = _inputs(step, group, [_resized(step, size) for size in sizes], seed)
    source = group.rank - offset
    inside = wrap or 0 <= source < group.size
    expected = np.array(inputs[source % group.size]) if inside else None
    flight.add(group.shift(inputs[group.rank], offset, wrap=wrap), expected, (step, group))


def _send_and_recv(flight: Flight, group: Any, step: Step, seed: int) -> None:
    if group.size == 1:
        return
    offset = 1 + step.root % (group.size - 1)
    dest, source = (group.rank + offset) % group.size, (group.rank - offset) % group.size
    shape = tuple(size * (1 + 30 * (step.sizes is None)) for size in step.shape)
    inputs = _inputs(step, group, [shape] * group.size, seed)
    expected = np.array(inputs[source])
    out = _out(step, expected)
    flight.add(group.send(inputs[group.rank], dest, tag=seed), None, (step, group))
    handle = group.recv(source, out=out, tag=seed)
    flight.add(handle, expected, (step, group), into=out)


_STARTS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "from whom": _from_whom,
    "shift": _shift,
    "send and recv": _send_and_recv,
}
