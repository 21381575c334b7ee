"""How many functions and files of mpimesh a call passes on its way, warm, on rank 0.

To see them, indented by depth, of one way or of all::

    mpiexec -n 2 python -m tests.helpers.hops "x + y"

A function counts once, if most of several calls pass it. How long rank 0 waits for the others, and
what it does meanwhile, differs from call to call: so it comes late, and what functions named `wait`
and `ring` do is left out. So are compiled functions, and comprehensions, for which Python 3.12 has
no frames.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

import mpimesh as mm

__all__ = ["Hops", "hops", "ways"]

_ROOT = str(Path(mm.__file__).parent) + "/"
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
_WAITS = ("wait", "ring")
_WARM, _TRIES = 5, 12
_LATE_S = 0.002


class Call(NamedTuple):
    """A call of a function of mpimesh: in how many others it is, and where it stands."""

    depth: int
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Hops:
    """What a call passes.

    Attributes:
        functions: How many functions.
        files: In how many files.
        calls: The calls of one time, in order.
    """

    functions: int
    files: int
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        """Show the calls, each in those that it was called by."""
        return "\n".join(
            f"{'  ' * call.depth}{call.file}:{call.line} {call.function}" for call in self.calls
        )


def hops(call: Callable[[], object], rank: int) -> Hops:
    """Return what `call` passes. Collective: all ranks make as many calls."""
    for _ in range(_WARM):
        call()
    tries = [_profiled(call, late=rank == 0) for _ in range(_TRIES)]
    times = Counter(one for calls in tries for one in {one[1:] for one in calls})
    mostly = [one for one, number in times.items() if 2 * number > _TRIES]
    shortest = min(tries, key=len)
    return Hops(len(mostly), len({file for file, *_ in mostly}), tuple(shortest))


def _profiled(call: Callable[[], object], *, late: bool) -> list[Call]:
    passed: list[Call] = []

    def look(frame: Any, event: str, _: object) -> None:
        if event != "call" or not _is_ours(frame.f_code):
            return
        code, depth, outer = frame.f_code, 0, frame
        while outer is not None:
            if _is_ours(outer.f_code):
                if outer.f_code.co_name in _WAITS:
                    return
                depth += 1
            outer = outer.f_back
        file = code.co_filename.removeprefix(_ROOT)
        passed.append(Call(depth - 1, file, code.co_firstlineno, code.co_qualname))

    before = sys.getprofile()
    gc.disable()  # what it collects may have finalizers of its own
    try:
        if late:
            time.sleep(_LATE_S)
        sys.setprofile(look)
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return passed


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_ROOT) and code.co_name not in _COMPREHENSIONS


def ways(mesh: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the main ways by name. Collective."""
    group = mesh.group()
    x = np.ones(8)
    yield "all_reduce", lambda: group.all_reduce(x, out=x).resolve()
    planned = group.all_reduce_init(x, out=x)
    yield "all_reduce, planned", lambda: planned.start().resolve()
    yield "barrier", group.barrier
    other, came = 1 - mesh.rank, np.empty_like(x)

    def exchange() -> None:
        sent = group.send(x, other)
        group.recv(other, out=came).resolve()
        sent.resolve()

    yield "send and recv", exchange
    blocks = mm.distribute(np.ones((16, 16)), mesh, "dp=S0")
    whole = mm.distribute(np.ones((16, 16)), mesh, "dp=R")
    yield "redistribute", lambda: blocks.redistribute("dp=R")
    yield "x + y", lambda: blocks + blocks
    yield "x @ w", lambda: blocks @ whole
    halo = mm.Halo(blocks)
    field = halo.field(blocks)
    yield "halo exchange", lambda: halo.exchange(field)
    net = mm.nn.Sequential(mm.nn.Linear(16, 64), mm.nn.ReLU(), mm.nn.Linear(64, 4))
    model = mm.DataParallel(net, mesh, "dp", loss=mm.nn.cross_entropy)
    optimizer = mm.ParallelOptimizer(mm.optim.SGD(model.parameters(), lr=0.01), model)
    rows, targets = np.ones((16, 16), "f4"), np.zeros(16, "i8")
    yield "train_step", lambda: model.train_step(rows, targets, optimizer=optimizer)


def main(names: list[str]) -> None:
    """Print a line for each way, and what it passes for those that are named."""
    with mm.DeviceMesh("dp=-1") as mesh:
        for name, call in ways(mesh):
            found = hops(call, mesh.rank)
            if mesh.rank == 0:
                print(f'    "{name}": ({found.functions}, {found.files}),', flush=True)
                if name in names:
                    print(found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
