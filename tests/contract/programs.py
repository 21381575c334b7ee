"""Random programs: a few operations, plain and planned, on overlapping groups, all at once.

A program follows from its number alone, and so do all ranks' inputs: each rank works out by NumPy
what it must get. Meanwhile ranks come late, waits run into their limits or end by an exception of
a signal handler and are taken up again, and budgets refuse operations. To run many programs, or one
that failed, on processes, with `--nodes 2` as if each two ranks were a node, or on virtual ranks::

    mpiexec -n 3 python -m tests.contract.programs FIRST HOW_MANY
    python -m tests.contract.programs FIRST HOW_MANY --virtual 3
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from traceback import walk_stack
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.errors import BudgetError, CollectiveTimeoutError, TransportError
from tests.contract.cases import (
    ALL,
    COMPLEX,
    FLOATS,
    HALVES,
    INTEGERS,
    LAYOUTS,
    NUMBERS,
    WRITABLE,
    same,
    values,
)
from tests.contract.meshes import mesh_of
from tests.contract.oracle import cut, joined, reduced
from tests.contract.shared_memory import nodes_of

__all__ = ["BORDERS", "every_planned", "opened", "program_of", "run", "unlike"]

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MOVEMENTS = ("all_gather", "gather", "scatter", "all_to_all", "broadcast", "from whom", "shift")
OTHERS = ("send and recv", "barrier", "refused")
PLANNED = (
    *REDUCTIONS,
    "all_gather",
    "gather",
    "all_to_all",
    "broadcast",
    "send and recv",
    "scatter",
)
BY_ALGORITHMS = ("all_reduce", "reduce", "broadcast", "from whom")
ALGORITHMS = ("centralized", "tree(2)", "tree(3)", "ring")
WITHOUT_AXIS = ("all_reduce", "reduce", "broadcast", "from whom", "shift", "send and recv")
MEMORIES = ("ordinary", "shared", "mixed")
BORDERS = (72, 8 << 10, 128 << 10, 256 << 10)
"""Bytes around which other ways begin."""
_TURNS_OF_OUT = (None, "plain", "x", "fortran", "overlap")


@dataclass(frozen=True)
class Step:
    """One operation with its arrays, started once or several times; sizes as for any group.

    Attributes:
        kind: Which.
        group: On which of the groups, modulo how many there are.
        dtype: Of the arrays.
        shape: Of the arrays, but for the axis that is cut.
        numbers: ``whole``, small ones; ``wide`` integers, which wrap around; ``real`` ones, whose
            sums depend on their order; ``special``: NaN, infinities, zeros of both signs.
        layout: Memory order of the input.
        memory: Where it lies: in ordinary memory, shared memory, or on every second rank in shared.
        out: Memory order of the output, ``x`` for the input itself, ``overlap`` for memory that has
            a part in common with it; None for a new one.
        out_memory: Where that lies.
        axis: The axis that is cut or joined.
        other_axis: The second axis of an all-to-all.
        sizes: Blocks along the axis, cyclically; None for equal ones.
        root: The root, or how far a shift goes.
        op: The reduction.
        planned: Whether it is planned once; if not, each start is a call.
        again: Whether all calls have the same arrays.
        starts: How often it is started.
        label: What the calls are called.
        algorithm: By which it goes; None for the group's own choice.
        turns: Whether the ranks differ where they may: in memory order, outputs, and who plans.
    """

    kind: str
    group: int
    dtype: Any
    shape: tuple[int, ...]
    numbers: str
    layout: str
    memory: str
    out: str | None
    out_memory: str
    axis: int
    other_axis: int
    sizes: tuple[int, ...] | None
    root: int
    op: str
    planned: bool
    again: bool
    starts: int
    label: str | None
    algorithm: str | None
    turns: bool


@dataclass(frozen=True)
class Program:
    """Steps, and bursts of starts; inside a burst each rank has an order of its own over groups.

    Attributes:
        number: Its number.
        steps: The steps.
        bursts: Of each burst the places of the steps that start, and for which time.
        meeting: The group whose ranks meet after each burst, modulo how many there are; None for
            none.
        limited: Whether all is inside a budget, which is large enough.
    """

    number: int
    steps: list[Step]
    bursts: list[list[tuple[int, int]]]
    meeting: int | None = None
    limited: bool = False


def program_of(number: int, most_bytes: int = 1 << 62) -> Program:
    """Draw a program; arrays of a rank have about `most_bytes` at most."""
    rng = random.Random(number)
    steps = [_step(rng, most_bytes) for _ in range(rng.randint(1, 6))]
    waiting = [place for place, step in enumerate(steps) for _ in range(step.starts)]
    rng.shuffle(waiting)
    bursts: list[list[tuple[int, int]]] = [[]]
    started = [0] * len(steps)
    for place in waiting:
        if place in [other for other, _ in bursts[-1]] or rng.random() < 0.4:
            bursts.append([])
        bursts[-1].append((place, started[place]))
        started[place] += 1
    meeting = rng.randrange(100) if rng.random() < 0.1 else None
    return Program(number, steps, bursts, meeting, rng.random() < 0.2)


def _step(rng: random.Random, most_bytes: int) -> Step:
    kind = rng.choice(REDUCTIONS + MOVEMENTS + OTHERS)
    dtype = rng.choice(NUMBERS if kind in REDUCTIONS else ALL)
    if kind in REDUCTIONS and rng.random() < 0.05:
        dtype = np.dtype(bool)
    op = rng.choice(_ops_of(dtype)) if kind in REDUCTIONS else ""
    planned = kind in PLANNED and rng.random() < 0.5
    again = planned or rng.random() < 0.5
    memory = rng.choice(MEMORIES)
    shape = _shape(rng, kind, dtype, most_bytes)
    by_algorithm = kind in BY_ALGORITHMS and rng.random() < 0.1
    return Step(
        kind=kind,
        group=rng.randrange(100),
        dtype=dtype,
        shape=shape,
        numbers=rng.choice(_numbers_of(dtype)),
        layout=rng.choice(WRITABLE if again or memory != "ordinary" else [*LAYOUTS]),
        memory=memory,
        out=rng.choice([None, "x", "plain", "overlap", rng.choice(WRITABLE)]),
        out_memory=rng.choice(MEMORIES),
        axis=rng.randrange(-len(shape), len(shape)) if shape else 0,
        other_axis=rng.randrange(-len(shape), len(shape)) if shape else 0,
        sizes=rng.choice([None, tuple(rng.choices(range(4), k=rng.randint(1, 3)))]),
        root=rng.randrange(10),
        op=op,
        planned=planned,
        again=again,
        starts=rng.choice([1, 1, 2, 3]),
        label=rng.choice([None, None, None, "weight"]),
        algorithm=rng.choice(ALGORITHMS) if by_algorithm else None,
        turns=rng.random() < 0.3,
    )


def _ops_of(dtype: Any) -> list[str]:
    ops = ["sum", "prod", "sum"] if dtype.kind != "b" else []
    ops += ["min", "max"] if dtype not in COMPLEX else []
    return [*ops, "mean"] if dtype in FLOATS + HALVES + COMPLEX else ops


def _shape(rng: random.Random, kind: str, dtype: Any, most_bytes: int) -> tuple[int, ...]:
    """Return a small shape of any kind, or one about as large as a border."""
    if rng.random() < 0.6:
        least = 0 if kind in WITHOUT_AXIS else 1
        return tuple(rng.choices(range(5), k=rng.randint(least, 3)))
    (border,) = rng.choices(BORDERS, [60, 30, 8, 2])
    count = max(1, min(border, most_bytes) // dtype.itemsize + rng.randint(-1, 1))
    return rng.choice([(count,), (count, 1), (-(-count // 3), 3)])


def _numbers_of(dtype: Any) -> list[str]:
    if dtype in INTEGERS:
        return ["whole", "wide"]
    if dtype in COMPLEX:
        return ["whole", "real"]
    if dtype in FLOATS or dtype in HALVES[:3]:  # the rest has no infinity
        return ["whole", "real", "special"]
    return ["whole"]


def every_planned(shapes: Callable[[Any], Sequence[tuple[int, ...]]], dtypes: Any) -> Program:
    """Return a program of planned operations of these dtypes and shapes, each started twice.

    All are under way at once, in the first group, by turns in ordinary and shared memory. Of what
    moves bytes as they are every dtype has a half.
    """
    steps: list[Step] = []
    for number, dtype in enumerate(dtypes):
        has_sums = dtype in [*NUMBERS, np.dtype(bool)]
        for place, kind in enumerate(PLANNED):
            if not has_sums if kind in REDUCTIONS else (number + place) % 2:
                continue
            for shape in shapes(dtype):
                turn = len(steps)
                step = _step(random.Random(turn), 0)
                step = replace(step, kind=kind, group=0, dtype=dtype, shape=shape, starts=2)
                step = replace(step, planned=True, again=True, axis=0, other_axis=0, sizes=None)
                op = _ops_of(dtype)[turn % 2] if kind in REDUCTIONS else ""
                step = replace(step, layout=WRITABLE[turn % 2], op=op, algorithm=None)
                steps.append(replace(step, numbers=_numbers_of(dtype)[-1 - turn % 2 :][0]))
    starts = [[(step, start) for step in range(len(steps))] for start in (0, 1)]
    return Program(0, steps, starts)


# -- what the ranks put in, and what must come out ------------------------------------------------


def _input(step: Step, rank: int, shape: tuple[int, ...], seed: int) -> Any:
    """Return what a rank puts in, which any rank can work out."""
    if step.numbers == "whole":
        return values(rank, shape, step.dtype, seed)
    rng = np.random.default_rng([rank, seed, *shape])
    if step.numbers == "wide":
        bounds = np.iinfo(step.dtype)
        wide = rng.integers(bounds.min, bounds.max, shape, step.dtype.newbyteorder("="), True)
        return np.asarray(wide).astype(step.dtype)
    if step.numbers == "special":
        numbers = rng.choice([-2.0, -1.0, -0.0, -0.0, 0.0, 1.0, 2.0, -np.inf, np.inf], shape)
        return np.asarray(np.where(rng.random(shape) < 0.1, np.nan, numbers)).astype(step.dtype)
    real = rng.standard_normal(shape) * 10.0 ** rng.integers(-1, 2, shape)
    if step.dtype in COMPLEX:
        return np.asarray(real + 1j * rng.standard_normal(shape)).astype(step.dtype)
    return np.asarray(real).astype(step.dtype)


@dataclass(frozen=True)
class Form:
    """A step on this rank of a group.

    Attributes:
        shapes: Of all ranks' inputs.
        result: What this rank must get, of all ranks' inputs.
        options: The arguments of the call.
        gives: Whether this rank has an input.
        gets: Whether it gets a result, so that it may have an output.
    """

    shapes: Sequence[tuple[int, ...]]
    result: Callable[[list[Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    gives: bool = True
    gets: bool = True


def _form(step: Step, group: Any) -> Form:
    me, n, kind, axis = group.rank, group.size, step.kind, step.axis
    root, alike = step.root % n, [step.shape] * n
    sizes = [step.sizes[rank % len(step.sizes)] for rank in range(n)] if step.sizes else None
    if kind in OTHERS[1:]:
        return Form([()] * n, lambda inputs: None, gives=False, gets=False)
    chosen = {} if step.algorithm is None or n == 1 else {"algorithm": step.algorithm}
    if kind in ("all_reduce", "reduce"):
        options = {"op": step.op, **chosen} | ({"root": root} if kind == "reduce" else {})
        gets = kind == "all_reduce" or me == root
        return Form(alike, lambda xs: reduced(xs, step.op) if gets else None, options, gets=gets)
    if kind in ("broadcast", "from whom"):
        options = {"root": root if kind == "broadcast" else None, **chosen}
        gives = kind == "broadcast" or me == root
        return Form(alike, lambda xs: np.array(xs[root]), options, gives=gives)
    if kind == "shift":
        offset, wrap = step.root - 4, step.sizes is None
        shapes = [_resized(step, step.shape[axis] + r) if step.shape else () for r in range(n)]
        source = me - offset
        inside = wrap or 0 <= source < n
        return Form(
            shapes,
            lambda xs: np.array(xs[source % n]) if inside else None,
            {"offset": offset, "wrap": wrap},
            gets=False,
        )
    if kind == "send and recv":
        offset = 1 + step.root % max(1, n - 1)
        return Form(
            alike,
            lambda xs: np.array(xs[(me - offset) % n]),
            {"dest": (me + offset) % n, "source": (me - offset) % n},
        )
    blocks = sizes or [step.shape[axis]] * n
    whole = [_resized(step, sum(blocks))] * n
    options = {"axis": axis, "sizes": sizes}
    if kind == "reduce_scatter":
        options["op"] = step.op
        return Form(whole, lambda xs: cut(reduced(xs, step.op), axis, blocks)[me], options)
    if kind in ("all_gather", "gather"):
        options |= {"root": root} if kind == "gather" else {}
        gets = kind == "all_gather" or me == root
        shapes = [_resized(step, size) for size in blocks]
        return Form(shapes, lambda xs: joined(xs, axis) if gets else None, options, gets=gets)
    if kind == "scatter":
        options["root"] = root
        return Form(whole, lambda xs: cut(xs[root], axis, blocks)[me], options, gives=me == root)
    return _all_to_all(step, group, blocks)


def _all_to_all(step: Step, group: Any, rows: list[int]) -> Form:
    """All cut `axis` alike; along another axis each brings a number of its own."""
    me, n, ndim = group.rank, group.size, len(step.shape)
    along_one = step.axis % ndim == step.other_axis % ndim
    shapes, columns = [], []
    for rank in range(n):
        shape = list(_resized(step, sum(rows)))
        if not along_one and step.sizes is not None:
            shape[step.other_axis] = (rank + step.root) % 4
        shapes.append(tuple(shape))
        columns.append(shape[step.other_axis])
    equal = step.sizes is None and step.root % 2 == 0
    options = {
        "split_axis": step.axis,
        "concat_axis": step.other_axis,
        "sizes": None if step.sizes is None else rows,
        "recv_sizes": None if equal else [rows[me]] * n if along_one else columns,
    }
    return Form(
        shapes,
        lambda xs: joined([cut(x, step.axis, rows)[me] for x in xs], step.other_axis),
        options,
    )


def _resized(step: Step, size: int) -> tuple[int, ...]:
    shape = list(step.shape)
    shape[step.axis] = size
    return tuple(shape)


def _compare(step: Step, got: Any, inputs: list[Any], expected: Any) -> None:
    """Fail unless `got` is what NumPy has, sums of real numbers within their rounding."""
    if expected is None or step.kind not in REDUCTIONS or step.numbers != "real":
        same(got, expected, step)
        if expected is not None and (step.dtype in FLOATS or step.dtype in HALVES):
            _compare_zeros(step, got, inputs, expected)
        return
    assert got.shape == expected.shape, step
    assert got.dtype == expected.dtype, step
    wide = np.clongdouble if step.dtype in COMPLEX else np.longdouble
    with np.errstate(all="ignore"):
        size: list[Any] = [abs(np.asarray(x).astype(wide)) for x in inputs]
        bound = np.prod(size, axis=0) if step.op == "prod" else np.sum(size, axis=0)
        half = step.dtype in HALVES
        rounding = 4 * len(inputs) * _eps(np.dtype("f4") if half else step.dtype) * bound
        if step.kind == "reduce_scatter":
            rounding = np.max(rounding, initial=0.0)
        rounding = rounding + abs(expected.astype(wide)) * _eps(step.dtype)
        near = abs(got.astype(wide) - expected.astype(wide)) <= rounding
    assert np.all(near | (got == expected)), f"{step}: got\n{got}\nnot\n{expected}"


def _compare_zeros(step: Step, got: Any, inputs: list[Any], expected: Any) -> None:
    """Fail unless zeros have their sign; which zero is the smaller one nobody says."""
    if step.op in ("min", "max") or step.kind == "reduce_scatter":
        return
    minus = np.signbit(expected)
    if step.op in ("sum", "mean"):  # NumPy adds all to a zero
        minus = np.logical_and.reduce([np.signbit(x) for x in map(np.asarray, inputs)])
    zero = expected == 0
    assert np.array_equal(np.signbit(got) & zero, minus & zero), f"{step}: the sign of a zero"


def _eps(dtype: Any) -> float:
    return 2.0**-7 if dtype.kind == "V" else np.finfo(dtype.newbyteorder("=")).eps


def _digest(x: Any, *, nan_bits: bool) -> int:
    """Return what arrays of the same bits have in common; one NaN is as any other if not that."""
    flat = np.array(x).reshape(-1)
    if not nan_bits:
        flat[flat != flat] = np.nan
    if flat.dtype.char in "gG" and flat.size:  # which has bytes that are no part of the number
        flat = np.ascontiguousarray(flat.view("g").reshape(-1, 1).view(np.uint8)[:, :10])
    return zlib.crc32(flat.view(np.uint8).data)


# -- running --------------------------------------------------------------------------------------


@contextmanager
def opened(comm: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Collective: open a mesh, and its groups that overlap, turn, and have the same ranks."""
    with mesh_of(comm) as mesh:
        ranks = list(range(mesh.world_size))
        mesh.add_group("turned", ranks[::-1])
        mesh.add_group("rotated", ranks[1:] + ranks[:1])
        mesh.add_group("twin", ranks)
        mesh.add_group("first and last", sorted({ranks[-1], 0}, reverse=True))
        mesh.add_group("but the last", ranks[:-1] or ranks)
        mesh.add_group("but the first", ranks[1:] or ranks)
        groups = [mesh.get_group(name) for name in mesh.group_names]
        yield mesh, [*groups, mesh.group().alone()]


class _Task:
    """A step on this rank, with its arrays."""

    def __init__(self, mesh: Any, group: Any, step: Step, seed: int) -> None:
        self.mesh, self.group, self.step, self.seed = mesh, group, step, seed
        side, settings = group.communicator, mesh._core.context.settings
        in_a_node = settings.node_shared == "always" and not side.nodes
        self.shared = in_a_node or side.kind == "virtual"
        self.form = _form(step, group)
        self.layout, self.out_as, self.planned = step.layout, step.out, step.planned
        if step.turns:
            place = group.rank + self.seed
            if step.layout in WRITABLE:
                self.layout = WRITABLE[place % len(WRITABLE)]
            self.out_as = _TURNS_OF_OUT[place % len(_TURNS_OF_OUT)]
            # A planned scatter tells nothing, so all plan it.
            self.planned = step.planned and (step.kind == "scatter" or place % 2 == 0)
        self.handles: list[Any] = []
        self.x: Any = None
        self.out: Any = None
        self.plans: list[Any] = []
        self.inputs: list[Any] = []
        self.expected: Any = None
        self.kept: list[tuple[Any, Any]] = []
        self.digests: dict[int, int] = {}
        self.number = 0
        self.is_made = False

    @property
    def overlaps(self) -> bool:
        return self.out is not None and self.x is not None and np.may_share_memory(self.out, self.x)

    @property
    def in_one(self) -> bool:
        """Whether it goes by one request, not by steps, which end with what a handler raises."""
        kind, options = self.step.kind, self.form.options
        by_steps = kind in ("from whom", "shift") or (kind == "scatter" and not self.planned)
        asks = kind == "all_to_all" and options["recv_sizes"] is not None
        is_checked = self.mesh._core.context.settings.checks
        return self.shared and not (is_checked or by_steps or asks or self.step.algorithm)

    def start(self, number: int) -> None:
        step, form, group = self.step, self.form, self.group
        # A list has no dtype. Those that can be written are filled with the values as they are.
        is_plain = self.layout == "list" or self.layout in WRITABLE
        make = LAYOUTS["plain" if is_plain else self.layout]
        self.number = number
        self.inputs = [
            make(_input(step, rank, shape, self.seed + number))
            for rank, shape in zip(group.ranks, form.shapes, strict=True)
        ]
        self.expected = form.result([np.array(x) for x in self.inputs])
        if not (self.is_made and step.again):
            self._allocate()
        if self.out is not None:
            self.out[...] = np.zeros((), step.dtype)
        if form.gives and self.layout in WRITABLE:
            self.x[...] = self.inputs[group.rank]
        self.handles = self._begin()

    def _allocate(self) -> None:
        step, form, group = self.step, self.form, self.group
        mine, self.is_made = self.inputs[group.rank], True
        if self.layout in WRITABLE:
            self.x = self._placed(self.layout, mine.shape, step.memory) if form.gives else None
        else:
            self.x = mine if form.gives else None
        self.out = None
        if self.out_as is None or not form.gets or self.expected is None:
            return
        if self.out_as not in ("x", "overlap"):
            self.out = self._placed(self.out_as, self.expected.shape, step.out_memory)
        elif not form.gives or self.layout not in WRITABLE or step.kind == "send and recv":
            return
        elif self.out_as == "x":
            self.out = self.x if self.x.shape == self.expected.shape else None
        else:
            sizes = self.x.size, self.expected.size
            begin = self.seed % (1 + min(sizes))
            room = self._placed("plain", (max(sizes[0], begin + sizes[1]),), step.memory)
            self.x = room[: sizes[0]].reshape(self.x.shape)
            self.out = room[begin : begin + sizes[1]].reshape(self.expected.shape)

    def _placed(self, layout: str, shape: tuple[int, ...], memory: str) -> Any:
        """Return an array of this memory order, in memory that is shared or not."""
        is_shared = memory == "shared" or (memory == "mixed" and self.mesh.rank % 2 == 1)
        empty: Callable[..., Any] = self.mesh.shared_empty if is_shared else np.empty
        dtype = self.step.dtype
        if layout == "fortran":
            return empty(shape[::-1], dtype).T
        if layout == "backwards":
            return empty(shape, dtype)[(..., *[slice(None, None, -1)] * len(shape))]
        if layout == "sliced":
            wide = empty([2 * size + 1 for size in shape], dtype)
            return wide[(..., *[slice(1, None, 2)] * len(shape))]
        if layout == "unaligned":
            size = int(np.prod(shape)) * dtype.itemsize
            return empty(size + 1, np.uint8)[1:].view(dtype).reshape(shape)
        return empty(shape, dtype)

    def _begin(self) -> list[Any]:
        step, group, options = self.step, self.group, self.form.options
        if step.kind == "refused":
            self._be_refused()
            return []
        if step.kind == "barrier":
            return [group.start_barrier(label=step.label)]
        if step.kind == "send and recv":
            return self._begin_messages(options["dest"], options["source"])
        if step.kind == "shift":
            return [group.shift(self.x, label=step.label, **options)]
        name = "broadcast" if step.kind == "from whom" else step.kind
        options = {"out": self.out, "label": step.label, **options}
        x = self.x
        if step.kind == "scatter" and x is None and step.turns:
            x = np.empty(self.form.shapes[group.rank], step.dtype)  # ignored
        if not self.planned:
            return [getattr(group, name)(x, **options)]
        if step.kind == "scatter" and x is None and self.out is None:
            x = np.empty(self.form.shapes[group.rank], step.dtype)
        if not self.plans:
            self.plans = [getattr(group, f"{name}_init")(x, **options)]
        return [self.plans[0].start()]

    def _be_refused(self) -> None:
        """Start what exceeds a budget on all ranks, so that none of them takes part."""
        with self.mesh.budget(bytes=7):
            try:
                self.group.all_reduce(np.ones(1)).resolve()
            except BudgetError:
                return
        assert self.group.size == 1, f"{self.step} was not refused"

    def _begin_messages(self, dest: int, source: int) -> list[Any]:
        step, group, tag = self.step, self.group, self.seed % 1000
        if group.size == 1:
            return []
        if not self.planned:
            kind = {"shape": step.shape, "dtype": step.dtype} if step.again else {}
            return [
                group.send(self.x, dest, tag=tag, label=step.label),
                group.recv(source, out=self.out, tag=tag, label=step.label, **kind),
            ]
        if self.out is None:
            self.out = np.empty(self.expected.shape, step.dtype)
        if not self.plans:
            self.plans = [
                group.send_init(self.x, dest, tag=tag),
                group.recv_init(self.out, source, tag=tag),
            ]
        return [plan.start() for plan in self.plans]

    def finish(self, rng: random.Random, *, interrupts: bool) -> None:
        """Resolve, compare, and spoil the arrays, which nobody may look at any more.

        Args:
            rng: Of this rank.
            interrupts: Whether a signal handler may end a wait.
        """
        handles, self.handles = self.handles, []
        if not handles:
            return
        step, me = self.step, self.group.rank
        rng.shuffle(handles)
        results = []
        lost = False
        for handle in handles:
            if rng.random() < 0.2:
                handle.done()
            elif rng.random() < 0.1:
                with suppress(CollectiveTimeoutError):
                    handle.resolve(timeout_s=rng.random() * 1e-3)
            elif interrupts and rng.random() < 0.3 and _interrupted(handle, rng.random() * 1e-3):
                lost = True
                continue
            results.append(handle.resolve())
            assert handle.resolve() is results[-1], f"{step}: a second resolve() gave another"
        if lost:
            return
        got = next((one for one in results if one is not None), None)
        _compare(step, got, self.inputs, self.expected)
        if self.out is not None:
            assert got is self.out, f"{step}: out= was not returned"
        elif got is not None and not self.planned:
            self.kept.append((got, got.copy()))
        if step.kind == "all_reduce":
            # MPI's own sums promise less.
            nan_bits = self.shared or step.op in ("min", "max") or step.numbers != "special"
            self.digests[self.number] = _digest(got, nan_bits=nan_bits)
        if self.form.gives and step.kind != "barrier":
            if not self.overlaps:
                same(np.array(self.x), np.array(self.inputs[me]), f"the input of {step}")
            if self.layout in WRITABLE:
                self.x[...] = values(0, (), step.dtype, 1)
        if self.out is not None:
            self.out[...] = values(0, (), step.dtype, 1)

    def over(self) -> None:
        for got, copy in self.kept:
            same(got, copy, f"a result that was resolved before, of {self.step}")


class _Interrupt(BaseException):
    """What the signal handler raises."""


def _interrupted(handle: Any, after_s: float) -> bool:
    """Let a handler raise in a wait; tell whether that came while the result was made."""
    if threading.current_thread() is not threading.main_thread():
        return False  # where no handler runs

    def handler(_: int, frame: Any) -> None:
        names = {one.f_code.co_name for one, _ in walk_stack(frame)}
        if not names & {"__del__", "_remove"}:  # where Python but prints it
            raise _Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, after_s))
        try:
            handle.resolve()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    try:
        handle.resolve()
    except TransportError as error:
        if "is lost" not in str(error):
            raise
        return True
    return False


def run(mesh: Any, groups: list[Any], program: Program) -> tuple[list[str], dict[Any, int]]:
    """Run a program, also where something is wrong. Collective.

    Returns:
        What was wrong, and digests of results that must be alike on all ranks that have them.
    """
    rng = random.Random(f"{program.number} on {mesh.rank}")
    tasks: dict[int, _Task] = {}
    for place, step in enumerate(program.steps):
        group = groups[step.group % len(groups)]
        if group.rank is not None:
            tasks[place] = _Task(mesh, group, step, 1000 * program.number + 10 * place)
    problems: list[str] = []
    interrupts = all(task.in_one for task in tasks.values())

    def finish(task: _Task) -> None:
        try:
            task.finish(rng, interrupts=interrupts)
        except AssertionError as error:
            problems.append(f"program {program.number}, rank {mesh.rank}: {error}")

    with mesh.budget(bytes=1 << 40) if program.limited else nullcontext():
        for burst in program.bursts:
            if rng.random() < 0.1:
                time.sleep(0.01 if rng.random() < 0.05 else 0.0005)
            for place, number in _own_order(rng, tasks, burst):
                finish(tasks[place])
                tasks[place].start(number)
            for task in rng.sample([*tasks.values()], rng.randint(0, len(tasks))):
                finish(task)
            if program.meeting is not None:
                problems += _meet(groups[program.meeting % len(groups)], program.number)
    for task in rng.sample([*tasks.values()], len(tasks)):
        finish(task)
        try:
            task.over()
        except AssertionError as error:
            problems.append(f"program {program.number}, rank {mesh.rank}: {error}")
    digests = {
        (program.number, place, number, tuple(task.group.ranks)): digest
        for place, task in tasks.items()
        for number, digest in task.digests.items()
    }
    return problems, digests


def _meet(group: Any, number: int) -> list[str]:
    """Wait for the ranks of a group, and read what one of each node writes."""
    if group.rank is None:
        return []
    if number % 2:
        group.barrier(timeout_s=60)
        return []
    table, writes = group.empty_once(number % 7, "f4")
    if writes:
        table[...] = number
    group.barrier()
    return [] if np.all(table == number) else [f"program {number}: a table has {table}"]


def _own_order(
    rng: random.Random, tasks: dict[int, _Task], burst: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the starts of a burst in an order of this rank's own, of the same ranks in theirs."""
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for start in burst:
        if start[0] in tasks:
            queues.setdefault(tuple(tasks[start[0]].group.ranks), []).append(start)
    turns = [ranks for ranks, queue in queues.items() for _ in queue]
    rng.shuffle(turns)
    return [queues[ranks].pop(0) for ranks in turns]


def unlike(digests: Sequence[dict[Any, int]]) -> list[str]:
    """Return the results that have other bits on other ranks."""
    found: dict[Any, set[int]] = {}
    for of_rank in digests:
        for key, digest in of_rank.items():
            found.setdefault(key, set()).add(digest)
    return [
        f"program {number}: the ranks {ranks} have other bits of step {place}, start {start}"
        for (number, place, start, ranks), several in found.items()
        if len(several) > 1
    ]


def main(first: int, count: int, nodes: int) -> bool:
    """Run programs under mpiexec; rank 0 prints what was wrong, and each thousandth number."""
    from mpi4py import MPI  # late: virtual ranks need none

    comm, failed = MPI.COMM_WORLD, 0
    with nodes_of(nodes), opened(comm) as (mesh, groups):
        for number in range(first, first + count):
            found = comm.allgather(run(mesh, groups, program_of(number)))
            failed += _shown(number, found, comm.rank == 0)
    return failed > 0


def on_virtual_ranks(first: int, count: int, size: int) -> bool:
    """Run programs on virtual ranks."""

    def run_all() -> list[Any]:
        with opened(None) as (mesh, groups):
            return [run(mesh, groups, program_of(number)) for number in range(first, first + count)]

    of_programs = zip(*mm.run_virtual(size, run_all), strict=True)
    failed = [_shown(first + place, found, True) for place, found in enumerate(of_programs)]
    return any(failed)


def _shown(number: int, found: Sequence[Any], shows: bool) -> bool:
    """Tell whether a program went wrong, and print it."""
    problems = [text for texts, _ in found for text in texts]
    problems += unlike([digests for _, digests in found])
    if shows and (problems or number % 1000 == 999):
        print(problems[0] if problems else number, flush=True)
    return bool(problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--nodes", type=int, default=0, help="ranks of a node; 0 for the real ones")
    parser.add_argument("--virtual", type=int, default=0, help="on so many virtual ranks")
    asked = parser.parse_args()
    if asked.virtual:
        sys.exit(on_virtual_ranks(asked.first, asked.count, asked.virtual))
    sys.exit(main(asked.first, asked.count, asked.nodes))
