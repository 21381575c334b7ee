"""``mpimesh bench``: the collectives of this job's ranks, by each way, beside mpi4py's."""

from __future__ import annotations

import csv
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from mpimesh.arguments import counted, size_text
from mpimesh.cli.console import (
    InputError,
    check_file,
    check_picture,
    print_page,
    table,
    write_picture,
)
from mpimesh.cli.facts import node_name
from mpimesh.errors import TransportError
from mpimesh.mesh.probe import memory_limit_bytes
from mpimesh.runtime import DeviceMesh, Launch, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.settings import Settings
from mpimesh.trace.svg import curves_svg

__all__ = ["COLLECTIVES", "Arrays", "Collective", "Point", "bench", "round_s", "run_bench"]

SIZES_BYTES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)
_ROUNDS = 15
_LEAST_ROUNDS = 2
_MOST_CALLS = 1000
_CHECKED_BYTES = 2 << 20
_MPI4PY = "mpi4py"


# -- the collectives, by mpi4py and by mpimesh ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one call; `x` is `y` where a collective works in place.

    Attributes:
        x: What goes in.
        y: What comes out.
    """

    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: how big its arrays are, and how it is called by both.

    Attributes:
        operation: Its name in mpimesh.
        call: Its name in mpi4py.
        blocks: Whether what goes in and what comes out is the whole array or a block of it.
        in_place: Whether both are one array.
        mpi: Calls mpi4py.
        mesh: Calls mpimesh.
        expected: Makes the result of this rank out of what all ranks put in.
    """

    operation: str
    call: str
    blocks: tuple[bool, bool]
    in_place: bool
    mpi: Callable[[Any, Arrays], object]
    mesh: Callable[[ProcessGroup, Arrays], object]
    expected: Callable[[list[Any], int], Any]

    def arrays(self, empty: Callable[..., Any], nbytes: int, ranks: int) -> Arrays:
        """Make the arrays of this rank, of zeros, with whole blocks for all ranks.

        Args:
            empty: Makes memory, such as :func:`numpy.empty` or :meth:`DeviceMesh.shared_empty`.
            nbytes: Of the whole array.
            ranks: Number of ranks.
        """
        block = nbytes // 8 // ranks
        whole = block * ranks if self.cuts else nbytes // 8
        x, y = (empty(block if is_block else whole, np.float64) for is_block in self.blocks)
        y[...] = 0
        if self.in_place:
            return Arrays(y, y)
        x[...] = 0
        return Arrays(x, y)

    @property
    def cuts(self) -> bool:
        """True if the array is cut into blocks for the ranks."""
        return any(self.blocks) or self.operation == "all_to_all"

    def takes(self, nbytes: int, ranks: int) -> bool:
        """Tell whether an array of so many bytes is enough for so many ranks."""
        return nbytes >= 8 * (ranks if self.cuts else 1)

    def planned(self, group: ProcessGroup, arrays: Arrays) -> Callable[[], object]:
        """Return what starts the collective from a plan that is made once. Collective."""
        plan = getattr(group, f"{self.operation}_init")(arrays.x, out=arrays.y)
        return lambda: plan.start().resolve()

    def check(self, comm: Any, arrays: Arrays, call: Callable[[], object], what: str) -> None:
        """See that one call gives the right result, and leave zeros behind. Collective.

        Raises:
            TransportError: On every rank, if it is wrong on one.
        """
        # Small whole numbers, whose sums are exact in any order.
        inputs = [np.arange(arrays.x.size) % 251 + 1000.0 * rank for rank in range(comm.size)]
        arrays.y[...] = -1
        arrays.x[...] = inputs[comm.rank]
        call()
        right = np.array_equal(arrays.y, self.expected(inputs, comm.rank))
        arrays.x[...] = arrays.y[...] = 0
        if not all(comm.allgather(right)):
            raise TransportError(f"{what} gives a wrong result")


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


COLLECTIVES = (
    Collective(
        "all_reduce",
        "Allreduce in place",
        (False, False),
        True,
        lambda comm, a: comm.Allreduce(_in_place(), a.y),
        lambda group, a: group.all_reduce(a.x, out=a.y).resolve(),
        lambda inputs, rank: sum(inputs),
    ),
    Collective(
        "reduce_scatter",
        "Reduce_scatter_block",
        (False, True),
        False,
        lambda comm, a: comm.Reduce_scatter_block(a.x, a.y),
        lambda group, a: group.reduce_scatter(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.split(sum(inputs), len(inputs))[rank],
    ),
    Collective(
        "all_gather",
        "Allgather",
        (True, False),
        False,
        lambda comm, a: comm.Allgather(a.x, a.y),
        lambda group, a: group.all_gather(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.concatenate(inputs),
    ),
    Collective(
        "broadcast",
        "Bcast",
        (False, False),
        True,
        lambda comm, a: comm.Bcast(a.y),
        lambda group, a: group.broadcast(a.x, out=a.y).resolve(),
        lambda inputs, rank: inputs[0],
    ),
    Collective(
        "all_to_all",
        "Alltoall",
        (False, False),
        False,
        lambda comm, a: comm.Alltoall(a.x, a.y),
        lambda group, a: group.all_to_all(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.concatenate([np.split(x, len(inputs))[rank] for x in inputs]),
    ),
)


# -- measuring ------------------------------------------------------------------------------------


def round_s(
    comm: Any,
    way: Callable[[], object],
    calls: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of a call on the slowest rank, of `calls` after a barrier. Collective.

    Args:
        comm: An mpi4py communicator.
        way: What is called.
        calls: How often, the same on all ranks.
        clock: Gives seconds.
    """
    comm.Barrier()
    start_s = clock()
    for _ in range(calls):
        way()
    return float(max(comm.allgather((clock() - start_s) / calls)))


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements of one collective at one size by one way.

    Attributes:
        operation: The collective.
        nbytes: Bytes of the whole array: the result of an all-gather, else what goes in.
        way: One of the columns of the table.
        algorithm: The row of mpimesh's table of algorithms by which it goes.
        seconds: Median over the rounds of the time of a call on the slowest rank.
        ratio: Median over the rounds of mpi4py's time over this one, in the same round.
        rounds: Number of rounds.
    """

    operation: str
    nbytes: int
    way: str
    algorithm: str
    seconds: float
    ratio: float
    rounds: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the whole array over the time, as nccl-tests' "algbw"."""
        return self.nbytes / self.seconds


_WAYS = {
    "messages": "ordinary arrays, by MPI's own collectives",
    "arrays": "ordinary arrays, by mpimesh's own way: see group.algorithms()",
    "planned": "the same, started from a plan that was made once: group.all_reduce_init(x, out=x)",
    "shared": "arrays of mesh.shared_empty, which the ranks of a node read in place",
    "sh.plan": "the same, from a plan",
}


def bench(*, seconds: float = 120.0, sizes_bytes: Sequence[int] = SIZES_BYTES) -> list[Point]:
    """Measure every collective by every way, for about so many seconds. Collective.

    The ways take turns, since a machine's speed drifts from second to second. What is measured is
    the same on all ranks: rank 0 alone looks at the clock.

    Args:
        seconds: The time for everything. Sizes for which none is left are not measured.
        sizes_bytes: Bytes of the whole arrays, from the smallest. Those are left out for which
            there is too little memory.

    Returns:
        The points, the same on every rank.

    Raises:
        TransportError: If a way gives a wrong result.
    """
    end_s = time.perf_counter() + seconds
    with ExitStack() as stack:
        meshes = {}
        for choice in ("never", "auto"):
            with _node_shared(choice):
                meshes[choice] = stack.enter_context(DeviceMesh("ranks=-1"))
        comm = meshes["auto"].group().communicator.native
        # All of a node's ranks together take a quarter of what each may have.
        here = sum(node == node_name(Launch.detect()) for node in comm.allgather(_node()))
        most = min(comm.allgather(memory_limit_bytes() // (16 * here) or 1 << 62))
        sizes = [nbytes for nbytes in sizes_bytes if nbytes <= most]
        points: list[Point] = []
        for place, nbytes in enumerate(sizes):
            cells = [one for one in COLLECTIVES if one.takes(nbytes, comm.size)]
            left_s = comm.bcast(end_s - time.perf_counter())
            if points and left_s <= 0:
                break
            # What is left is for this size and the larger ones, which take longer.
            share_s = max(0.0, left_s) / (len(sizes) - place) / max(1, len(cells))
            for collective in cells:
                points += _cell(meshes, comm, collective, nbytes, share_s)
                gc.collect()  # arrays of the last cell, whose plans may be in circles
        return points


def _node() -> str:
    return node_name(Launch.detect())


@contextmanager
def _node_shared(choice: str) -> Iterator[None]:
    """Set MPIMESH_NODE_SHARED while a mesh is made."""
    name = "MPIMESH_NODE_SHARED"
    before = os.environ.get(name)
    os.environ[name] = choice
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _cell(
    meshes: dict[str, DeviceMesh], comm: Any, collective: Collective, nbytes: int, share_s: float
) -> list[Point]:
    """Measure a collective of one size by all ways, for about `share_s` seconds. Collective."""
    auto = meshes["auto"].group()
    ordinary = collective.arrays(np.empty, nbytes, comm.size)
    shared = collective.arrays(meshes["auto"].shared_empty, nbytes, comm.size)
    ways: dict[str, Callable[[], object]] = {_MPI4PY: partial(collective.mpi, comm, ordinary)}
    ways["messages"] = partial(collective.mesh, meshes["never"].group(), ordinary)
    ways["arrays"] = partial(collective.mesh, auto, ordinary)
    ways["planned"] = collective.planned(auto, ordinary)
    ways["shared"] = partial(collective.mesh, auto, shared)
    ways["sh.plan"] = collective.planned(auto, shared)
    first_s: dict[str, float] = {}
    for way, call in ways.items():
        arrays = shared if way.startswith("sh") else ordinary
        if nbytes <= _CHECKED_BYTES:
            what = f"{collective.operation} of {size_text(nbytes)}, {way}"
            collective.check(comm, arrays, call, what)
        first_s[way] = round_s(comm, call, 1)
    round_of_one_s = sum(first_s.values())
    calls = int(min(_MOST_CALLS, max(1, share_s / (2 * _ROUNDS * round_of_one_s))))
    names = list(ways)
    rows: list[dict[str, float]] = []
    begin_s = time.perf_counter()
    while len(rows) < _ROUNDS:
        turn = len(rows) % len(names)
        rows.append(
            {name: round_s(comm, ways[name], calls) for name in names[turn:] + names[:turn]}
        )
        late = time.perf_counter() - begin_s > share_s
        if comm.bcast(late) and len(rows) >= _LEAST_ROUNDS:
            break
    picked = {way: auto.algorithms().pick(collective.operation, "host", nbytes) for way in ways}
    picked["messages"] = "mpi"
    for way in ("shared", "sh.plan"):
        picked[way] = auto.algorithms().pick(collective.operation, "shared", nbytes)
    picked[_MPI4PY] = collective.call
    return [
        Point(
            collective.operation,
            nbytes,
            way,
            picked[way],
            median(row[way] for row in rows),
            median(row[_MPI4PY] / row[way] for row in rows),
            len(rows),
        )
        for way in names
    ]


# -- the command ----------------------------------------------------------------------------------


def run_bench(
    *, seconds: float, as_json: bool, csv_path: Path | None, svg_path: Path | None
) -> None:
    """Measure, and let rank 0 show it. Collective over MPI's world.

    Args:
        seconds: For how long.
        as_json: Write one JSON object and nothing else.
        csv_path: Where to write the table, if anywhere.
        svg_path: Where to draw it, if anywhere.

    Raises:
        InputError: On every rank, if there is one rank only, or a file cannot be
            written.
        MpimeshError: If no mesh can be made.
    """
    check_picture("--svg", svg_path)
    with DeviceMesh("ranks=-1") as mesh:
        group = mesh.group()
        if getattr(group.communicator, "native", None) is None and group.size > 1:
            raise InputError(
                "virtual ranks are threads of one process, and tell nothing of a cluster: "
                "mpiexec -n 4 mpimesh bench"
            )
        if group.size == 1:
            raise InputError(
                "one rank alone moves nothing: mpiexec -n 4 mpimesh bench, or srun -n 4 mpimesh "
                "bench"
            )
        rank = mesh.rank
        problem = _unwritable(csv_path, svg_path) if rank == 0 else ""
        found = agree(group, "the cores of the ranks", [_node(), _cores(), problem])
        if found[0][2]:
            raise InputError(found[0][2])
        places = [(node, cores) for node, cores, _ in found]
        notes = [_headline(places), *_crowded(places)]
    if Settings.from_environment().checks:
        notes.append("MPIMESH_CHECKS is on: mpimesh compares every call over the ranks first")
    if rank == 0:
        about = f"# {notes[0]}: measuring for about {seconds:g} s\n"
        sys.stderr.write(about)
        sys.stderr.flush()
    points = bench(seconds=seconds)
    if rank != 0:
        return
    largest = max(one.nbytes for one in points)
    if largest < SIZES_BYTES[-1]:
        notes.append(
            f"nothing above {size_text(largest)}: give it more --seconds, or the ranks more memory"
        )
    if as_json:
        rows = [asdict(one) | {"bytes_per_s": one.bytes_per_s} for one in points]
        fields = {"ranks": len(places), "nodes": len({node for node, _ in places})}
        sys.stdout.write(json.dumps({**fields, "notes": notes, "points": rows}, indent=1) + "\n")
    else:
        print_page(*_page(points, notes), piped_width=100)
    if csv_path is not None:
        _write_csv(csv_path, points)
    if svg_path is not None:
        write_picture("--svg", svg_path, bench_svg(points, notes[0]))
    for path in (csv_path, svg_path):
        if path is not None and not as_json:
            sys.stdout.write(f"written: {path}\n")


def _unwritable(csv_path: Path | None, svg_path: Path | None) -> str:
    """Return why a file cannot be written; without a reason, an empty text."""
    try:
        check_file("--csv", csv_path)
        check_file("--svg", svg_path)
    except InputError as error:
        return str(error)
    if csv_path is not None and csv_path == svg_path:
        return f"--csv and --svg would both write {csv_path}: give two names"
    return ""


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _headline(places: Sequence[tuple[str, Sequence[int]]]) -> str:
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    where = counted(len({node for node, _ in places}), "node")
    return f"{len(places)} ranks on {where}, {vendor} {'.'.join(map(str, version))}"


def _crowded(places: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    """Return a note if ranks of a node take turns on its cores."""
    for node in dict.fromkeys(node for node, _ in places):
        here = [set(cores) for name, cores in places if name == node]
        count = len(set().union(*here))
        if len(here) > count:
            return [
                f"{len(here)} ranks take turns on {counted(count, 'core')} of {node}: all "
                "ways are slow, and the figures say little about one rank on each core"
            ]
    return []


def _page(points: Sequence[Point], notes: Sequence[str]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"mpimesh bench: {notes[0]}", "bold")]
    parts += [Text(note, "yellow") for note in notes[1:]]
    parts += [Text(), Text("microseconds of a call: median, of the slowest rank")]
    for operation in (collective.operation for collective in COLLECTIVES):
        mine = [one for one in points if one.operation == operation]
        if not mine:
            continue
        rows = table(operation, f">{_MPI4PY}", *(f">{way}" for way in _WAYS), ">best", ">GB/s")
        for nbytes in dict.fromkeys(one.nbytes for one in mine):
            here = {one.way: one for one in mine if one.nbytes == nbytes}
            best = min(_WAYS, key=lambda way: here[way].seconds)
            rows.add_row(
                size_text(nbytes),
                *(
                    Text(_microseconds(here[way].seconds), "bold green" * (way == best))
                    for way in (_MPI4PY, *_WAYS)
                ),
                f"{here[best].ratio:.2g}x" if here[best].ratio < 10 else f"{here[best].ratio:.0f}x",
                f"{here[best].bytes_per_s / 1e9:.2f}",
            )
        parts += [Text(), rows]
    legend = table("", "")
    legend.show_header = False
    legend.add_row(_MPI4PY, "raw: comm.Allreduce(MPI.IN_PLACE, x) and the like")
    for way, meaning in _WAYS.items():
        legend.add_row(way, meaning)
    legend.add_row("best", "mpi4py's time over that of mpimesh's fastest way: above 1x is faster")
    legend.add_row("GB/s", "the array's bytes over the time of that way")
    return [*parts, Text(), legend]


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def _write_csv(path: Path, points: Sequence[Point]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        columns = ["operation", "nbytes", "way", "algorithm", "seconds", "ratio", "rounds"]
        writer.writerow([*columns, "bytes_per_s"])
        for one in points:
            writer.writerow([*(getattr(one, name) for name in columns), one.bytes_per_s])


def bench_svg(points: Sequence[Point], subtitle: str) -> str:
    """Draw the time of every collective over the size, a curve for each way, as an SVG."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    order = [collective.operation for collective in COLLECTIVES]
    for one in sorted(points, key=lambda one: order.index(one.operation)):
        curves = panels.setdefault(one.operation, {})
        curves.setdefault(one.way, []).append((one.nbytes, one.seconds))
    return curves_svg(
        panels,
        title="mpimesh bench: time of a call over the size of the array",
        subtitle=subtitle,
    )
