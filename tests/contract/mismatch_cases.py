"""Programs in which one rank calls something else than the others, and programs that are right.

Each is data: what the odd rank runs, and what the rest run, as rows of calls made one after the
other. A call stands on a line of its own, by which an error message must name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "COLLECTIVES",
    "RIGHT",
    "WRONG",
    "Case",
    "Program",
    "differences",
    "place_of",
    "plannings",
]

Calls = Sequence[Callable[[Any], Any]]


@dataclass(frozen=True)
class Program:
    """The calls of the ranks of a group.

    Attributes:
        name: What it is about.
        odd: The calls of the odd rank.
        rest: The calls of all others.
        local: True if the odd rank's call is wrong in itself and raises where it is called.
        least: How many ranks it needs to be what it is.
    """

    name: str
    odd: Calls
    rest: Calls
    local: bool = False
    least: int = 2


@dataclass(frozen=True)
class Case:
    """One way to differ.

    Attributes:
        name: The kind, and what differs.
        body: The program of a rank: takes the mesh, and whether this is the odd rank.
        found: ``mismatch`` by comparing, ``deadlock`` by who waits for whom, ``error`` by another
            error of mpimesh, or ``silent``.
        said: What the error must name.
        ranks: The fewest ranks that it takes.
        alone: Whether the ranks part at different times, so that no other case can follow.
        rendezvous: Whether virtual sends wait for their receives, as MPI's of large arrays do.
    """

    name: str
    body: Callable[[Any, bool], object]
    found: str = "mismatch"
    said: str = ""
    ranks: int = 2
    rendezvous: bool = False
    alone: bool = False

    @property
    def leaves_ranks_apart(self) -> bool:
        """Whether no other case can be run after it in one job."""
        return self.alone or self.found == "deadlock"


def place_of(call: Any) -> str:
    """The ``file:line`` of a call."""
    return f"{call.__code__.co_filename}:{call.__code__.co_firstlineno}"


def _x(*shape: int, dtype: Any = "f8") -> Any:
    return np.ones(shape, dtype)


def _reduce_to(root: int) -> Callable[[Any], Any]:
    return lambda g: g.reduce(_x(3), root=root % g.size)


WRONG = [
    Program(
        "operation",
        odd=[lambda g: g.broadcast(_x(4))],
        rest=[lambda g: g.all_reduce(_x(4))],
    ),
    Program(
        "barrier against data",
        odd=[lambda g: g.start_barrier()],
        rest=[lambda g: g.all_gather(_x(4))],
    ),
    Program(
        "shape",
        odd=[lambda g: g.all_reduce(_x(8))],
        rest=[lambda g: g.all_reduce(_x(4))],
    ),
    Program(
        "shape of the same size",
        odd=[lambda g: g.all_reduce(_x(2, 3))],
        rest=[lambda g: g.all_reduce(_x(3, 2))],
    ),
    Program(
        "dtype of the same bytes",
        odd=[lambda g: g.all_reduce(_x(8, dtype="f4"))],
        rest=[lambda g: g.all_reduce(_x(4))],
    ),
    Program(
        "dtype of the same width",
        odd=[lambda g: g.all_reduce(_x(4, dtype="i8"))],
        rest=[lambda g: g.all_reduce(_x(4))],
    ),
    Program(
        "byte order",
        odd=[lambda g: g.all_gather(_x(4, dtype=">i4"))],
        rest=[lambda g: g.all_gather(_x(4, dtype="i4"))],
    ),
    Program(
        "reduction",
        odd=[lambda g: g.all_reduce(_x(4), "max")],
        rest=[lambda g: g.all_reduce(_x(4), "sum")],
    ),
    Program(
        "sum against mean",
        odd=[lambda g: g.reduce_scatter(_x(2 * g.size), "mean")],
        rest=[lambda g: g.reduce_scatter(_x(2 * g.size))],
    ),
    Program(
        "root of a broadcast",
        odd=[lambda g: g.broadcast(_x(4), root=1)],
        rest=[lambda g: g.broadcast(_x(4), root=0)],
    ),
    Program(
        "root known and unknown",
        odd=[lambda g: g.broadcast(_x(4), root=None)],
        rest=[lambda g: g.broadcast(_x(4), root=0)],
    ),
    Program(
        "root of a reduction",
        odd=[lambda g: g.reduce(_x(4), root=1)],
        rest=[lambda g: g.reduce(_x(4))],
    ),
    Program(
        "root of a gather",
        odd=[lambda g: g.gather(_x(4), root=1)],
        rest=[lambda g: g.gather(_x(4))],
    ),
    Program(
        "root of a scatter",
        odd=[lambda g: g.scatter(_x(g.size), root=g.rank)],
        rest=[lambda g: g.scatter(_x(g.size) if g.rank == 0 else None)],
    ),
    Program(
        "count of a gather",
        odd=[lambda g: g.gather(_x(2))],
        rest=[lambda g: g.gather(_x(4))],
    ),
    Program(
        "axis",
        odd=[lambda g: g.all_gather(_x(3, 3), axis=1)],
        rest=[lambda g: g.all_gather(_x(3, 3))],
    ),
    Program(
        "sizes",
        odd=[lambda g: g.all_gather(_x(2))],
        rest=[lambda g: g.all_gather(_x(2), sizes=[2] * (g.size - 1) + [3])],
    ),
    Program(
        "sizes of a scatter",
        odd=[lambda g: g.scatter(None, sizes=[1] * (g.size - 1) + [2])],
        rest=[lambda g: g.scatter(_x(g.size + 1), sizes=[2] + [1] * (g.size - 1))],
    ),
    Program(
        "shape beside the axis of an all_to_all",
        odd=[lambda g: g.all_to_all(_x(g.size, 5))],
        rest=[lambda g: g.all_to_all(_x(g.size, 3))],
    ),
    Program(
        "sizes of an all_to_all that the others do not expect",
        odd=[lambda g: g.all_to_all(_x(g.size + 1), sizes=[2] + [1] * (g.size - 1))],
        rest=[lambda g: g.all_to_all(_x(g.size))],
    ),
    Program(
        "fewer came than recv_sizes say",
        odd=[lambda g: g.all_to_all(_x(2 * g.size), recv_sizes=[3] + [2] * (g.size - 1))],
        rest=[lambda g: g.all_to_all(_x(2 * g.size))],
    ),
    Program(
        "offset of a shift",
        odd=[lambda g: g.shift(_x(4), 2, wrap=True)],
        rest=[lambda g: g.shift(_x(4), 1, wrap=True)],
    ),
    Program(
        "wrap of a shift",
        odd=[lambda g: g.shift(_x(4), wrap=True)],
        rest=[lambda g: g.shift(_x(4))],
    ),
    Program(
        "order of two kinds",
        odd=[
            lambda g: g.all_gather(_x(4)),
            lambda g: g.all_reduce(_x(4)),
        ],
        rest=[
            lambda g: g.all_reduce(_x(4)),
            lambda g: g.all_gather(_x(4)),
        ],
    ),
    Program(
        "order of two shapes",
        odd=[
            lambda g: g.all_reduce(_x(5)),
            lambda g: g.all_reduce(_x(4)),
        ],
        rest=[
            lambda g: g.all_reduce(_x(4)),
            lambda g: g.all_reduce(_x(5)),
        ],
    ),
    Program(
        "order told by labels alone",
        odd=[
            lambda g: g.all_reduce(_x(4), label="bias"),
            lambda g: g.all_reduce(_x(4), label="weight"),
        ],
        rest=[
            lambda g: g.all_reduce(_x(4), label="weight"),
            lambda g: g.all_reduce(_x(4), label="bias"),
        ],
    ),
    Program(
        "label",
        odd=[lambda g: g.broadcast(_x(4), label="a")],
        rest=[lambda g: g.broadcast(_x(4))],
    ),
    Program(
        "a call left out",
        odd=[lambda g: g.all_gather(_x(4))],
        rest=[
            lambda g: g.all_reduce(_x(4)),
            lambda g: g.all_gather(_x(4)),
        ],
    ),
    Program(
        "an argument that is wrong by itself: the op",
        odd=[lambda g: g.all_reduce(_x(4), "xor")],
        rest=[lambda g: g.all_reduce(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: the dtype",
        odd=[lambda g: g.all_reduce(np.array(["text"]))],
        rest=[lambda g: g.all_reduce(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: a ragged list",
        odd=[lambda g: g.all_gather([[1], [2, 3]])],
        rest=[lambda g: g.all_gather(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: out",
        odd=[lambda g: g.broadcast(_x(4), out=_x(5))],
        rest=[lambda g: g.broadcast(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: sizes",
        odd=[lambda g: g.all_to_all(_x(g.size), sizes=[1])],
        rest=[lambda g: g.all_to_all(_x(g.size))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: the root",
        odd=[lambda g: g.gather(_x(4), root=g.size)],
        rest=[lambda g: g.gather(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: no array at the root",
        odd=[lambda g: g.scatter(None, root=g.rank)],
        rest=[lambda g: g.scatter(None, root=g.size - 1)],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: objects to shift",
        odd=[lambda g: g.shift(np.array([None]))],
        rest=[lambda g: g.shift(_x(4))],
        local=True,
    ),
    Program(
        "an argument that is wrong by itself: the label of a barrier",
        odd=[lambda g: g.start_barrier(label=3)],
        rest=[lambda g: g.start_barrier()],
        local=True,
    ),
]

RIGHT = [
    Program(
        "other lines",
        odd=[lambda g: g.all_reduce(_x(4))],
        rest=[lambda g: g.all_reduce(_x(4))],
        least=1,
    ),
    Program(
        "root and others from different lines",
        odd=[lambda g: g.broadcast(np.arange(4.0), root=g.size - 1)],
        rest=[lambda g: g.broadcast(_x(4), root=g.size - 1)],
    ),
    Program(
        "the others need no array",
        odd=[lambda g: g.scatter(_x(g.size), root=g.size - 1)],
        rest=[lambda g: g.scatter(None, root=g.size - 1)],
    ),
    Program(
        "an array that the root ignores",
        odd=[lambda g: g.scatter(_x(g.size), root=g.size - 1)],
        rest=[lambda g: g.scatter(_x(3, 3, 3), root=g.size - 1)],
    ),
    Program(
        "one sender, whoever it is",
        odd=[lambda g: g.broadcast(_x(2, 2), root=None)],
        rest=[lambda g: g.broadcast(None, root=None)],
    ),
    Program(
        "out on one rank only",
        odd=[lambda g: g.all_reduce(_x(4), out=_x(4))],
        rest=[lambda g: g.all_reduce(_x(4))],
    ),
    Program(
        "memory orders",
        odd=[lambda g: g.all_reduce(np.asfortranarray(_x(4, 4)))],
        rest=[lambda g: g.all_reduce(_x(8, 8)[::-2, ::2])],
    ),
    Program(
        "names of a reduction",
        odd=[lambda g: g.all_reduce(_x(4), "avg")],
        rest=[lambda g: g.all_reduce(_x(4), "mean")],
    ),
    Program(
        "an axis counted from either end",
        odd=[lambda g: g.all_gather(_x(2, 3), axis=-1)],
        rest=[lambda g: g.all_gather(_x(2, 3), axis=np.int64(1))],
    ),
    Program(
        "sizes in any sequence",
        odd=[lambda g: g.all_gather(_x(2), sizes=np.full(g.size, 2))],
        rest=[lambda g: g.all_gather(_x(2), sizes=[2] * g.size)],
    ),
    Program(
        "sizes in an array against none",
        odd=[lambda g: g.reduce_scatter(_x(2 * g.size), sizes=np.full(g.size, 2, "i2"))],
        rest=[lambda g: g.reduce_scatter(_x(2 * g.size))],
    ),
    Program(
        "sizes of a scatter in an array",
        odd=[lambda g: g.scatter(_x(2 * g.size), root=g.size - 1, sizes=np.full(g.size, 2))],
        rest=[lambda g: g.scatter(None, root=g.size - 1, sizes=(2,) * g.size)],
    ),
    Program(
        "uneven blocks",
        odd=[lambda g: g.all_gather(_x(0, 2), sizes=[1] * (g.size - 1) + [0])],
        rest=[lambda g: g.all_gather(_x(1, 2), sizes=[1] * (g.size - 1) + [0])],
    ),
    Program(
        "an uneven all_to_all",
        odd=[lambda g: g.all_to_all(_x(0, 2), sizes=[0] * g.size, recv_sizes=_all_but_last(g))],
        rest=[
            lambda g: g.all_to_all(_x(g.size, 2), sizes=[1] * g.size, recv_sizes=_all_but_last(g))
        ],
    ),
    Program(
        "shapes of a shift",
        odd=[lambda g: g.shift(_x(7, 7, dtype="i2"), wrap=True)],
        rest=[lambda g: g.shift(_x(2), wrap=True)],
    ),
    Program(
        "a number against an array",
        odd=[lambda g: g.all_reduce(1.0)],
        rest=[lambda g: g.all_reduce(np.array(2.0))],
    ),
    Program(
        "the same labels",
        odd=[
            lambda g: g.all_reduce(_x(4), label="weight"),
            lambda g: g.all_reduce(_x(4), label="bias"),
        ],
        rest=[
            lambda g: g.all_reduce(_x(4), label="weight"),
            lambda g: g.all_reduce(_x(4), label="bias"),
        ],
    ),
    Program(
        "roots that change from call to call",
        odd=[_reduce_to(root) for root in range(5)],
        rest=[_reduce_to(root) for root in range(5)],
        least=1,
    ),
    Program(
        "every operation in a row",
        odd=[
            lambda g: g.all_reduce(_x(g.size)),
            lambda g: g.reduce(_x(g.size)),
            lambda g: g.reduce_scatter(_x(g.size)),
            lambda g: g.all_gather(_x(2)),
            lambda g: g.gather(_x(2)),
            lambda g: g.scatter(None),
            lambda g: g.all_to_all(_x(g.size)),
            lambda g: g.broadcast(_x(2)),
            lambda g: g.start_barrier(),
        ],
        rest=[
            lambda g: g.all_reduce(_x(g.size)),
            lambda g: g.reduce(_x(g.size)),
            lambda g: g.reduce_scatter(_x(g.size)),
            lambda g: g.all_gather(_x(2)),
            lambda g: g.gather(_x(2)),
            lambda g: g.scatter(_x(g.size) if g.rank == 0 else None),
            lambda g: g.all_to_all(_x(g.size)),
            lambda g: g.broadcast(_x(2)),
            lambda g: g.start_barrier(),
        ],
    ),
]


def _all_but_last(group: Any) -> list[int]:
    return [1] * (group.size - 1) + [0]


# -- each collective, plain and planned ------------------------------------------------------------

Start = Callable[[Any, bool], Any]
"""Starts a collective on a group, planned or not."""

_COLLECTIVES: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum"},
    "reduce": {"op": "sum", "root": 0},
    "reduce_scatter": {"op": "sum"},
    "all_gather": {},
    "gather": {"root": 0},
    "all_to_all": {},
    "broadcast": {"root": 0},
    "scatter": {"root": 0},
    "shift": {"offset": 1},
}
COLLECTIVES = tuple(_COLLECTIVES)
_WITHOUT_PLAN = ("scatter", "shift", "barrier")


def _start(name: str, rows: int = 2, dtype: str = "f8", **options: Any) -> Start:
    def start(group: Any, planned: bool) -> Any:
        if name == "start_barrier":
            return group.start_barrier()
        x = _x(rows * group.size, dtype=dtype)
        if planned:
            return getattr(group, f"{name}_init")(x, **options).start()
        return getattr(group, name)(x, **options)

    return start


def differences(name: str) -> dict[str, tuple[Start, Start]]:
    """Return what the odd rank and the rest start, by what differs, for the collective `name`."""
    options = _COLLECTIVES[name]
    rest = _start(name, **options)
    odd = {"barrier": _start("start_barrier")}
    turn = COLLECTIVES.index(name)
    for further in (1, 3):
        other = COLLECTIVES[(turn + further) % len(COLLECTIVES)]
        odd[other] = _start(other, **_COLLECTIVES[other])
    if name not in ("shift", "scatter"):  # whose arrays may differ, or are not looked at
        odd["rows"] = _start(name, rows=4, **options)
        odd["dtype"] = _start(name, dtype="f4", **options)
        odd["dtype of the same width"] = _start(name, dtype="i8", **options)
    if "root" in options:
        odd["root"] = _start(name, **options | {"root": 1})
    if "op" in options:
        odd["op"] = _start(name, **options | {"op": "max"})
    if "offset" in options:
        odd["offset"] = _start(name, **options | {"offset": 2})
    return {what: (start, rest) for what, start in odd.items()}


def plannings(name: str, what: str) -> list[tuple[bool, bool]]:
    """Return whether the odd rank plans, and the rest: all that there is."""
    started = what if what in (*_COLLECTIVES, "barrier") else name
    can = [(False,) if one in _WITHOUT_PLAN else (False, True) for one in (started, name)]
    return [(odd, rest) for odd in can[0] for rest in can[1]]
