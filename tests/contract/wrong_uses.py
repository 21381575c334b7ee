"""Random wrong uses: ranks that call different things, or one whose own arguments are wrong.

Each has a mesh of its own. Calls that were right came before and are still under way: they end with
their results. Then the ranks start one collective, some of them another way, and one more after it.
Nobody waits for ever, no result is wrong, and all that can know it raise MismatchError::

    mpiexec -n 3 python -m tests.contract.wrong_uses FIRST HOW_MANY
    python -m tests.contract.wrong_uses FIRST HOW_MANY --virtual 3
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.errors import MpimeshError
from tests.contract.shared_memory import nodes_of

__all__ = ["Case", "Outcome", "case_of", "in_a_mesh", "is_skipped", "wrong"]

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "gather", "broadcast", "scatter")
CALLS = (*REDUCING, "all_gather", "gather", "all_to_all", "broadcast", "scatter", "shift")
KINDS = (*CALLS, "start_barrier")
SIZES = (1, 2, 40, 5000, 70_000)
LIMIT_S = 15.0
LOCAL = ("bad op", "bad root", "no array", "objects", "misfit")
"""Wrong by themselves: they raise where they are called."""
NEEDS_CHECKS = ("label", "twin")
HARMLESS = ("planned", "memory", "out")


@dataclass(frozen=True)
class Call:
    """A collective on a rank; `rows` for each rank of the group."""

    kind: str
    rows: int
    dtype: str = "f8"
    op: str = "sum"
    root: int = 0
    columns: int = 1
    group: str = "world"
    planned: bool = False
    shared: bool = False
    out: str | None = None
    x: str = "array"
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Case:
    """What most ranks call, what is other on some, and on which.

    Attributes:
        number: Its number.
        rest: The call of most ranks.
        odd: That of the others; None if they leave it out.
        what: What differs.
        ranks: The others, modulo the number of ranks.
        before: The calls that all have under way before.
    """

    number: int
    rest: Call
    odd: Call | None
    what: str
    ranks: frozenset[int]
    before: tuple[Call, ...]


@dataclass
class Outcome:
    """What came of the three on a rank: of those before, the call, and the one after it."""

    before: list[str]
    first: str
    second: str
    seconds: float


def case_of(number: int, size: int) -> Case:
    """Draw a case for so many ranks."""
    rng = random.Random(number)
    rest = _call(rng, size)
    what = rng.choice(_ways(rest))
    odd = _other(rng, rest, what, size)
    few = 1 if rng.random() < 0.7 else rng.randint(1, size - 1)
    ranks = frozenset(rng.sample(range(size), few))
    if what == "no array" and rest.kind == "scatter":
        ranks = frozenset([rest.root])
    if what == "root" and rest.kind == "scatter":  # its array is looked at
        ranks = frozenset([odd.root]) if odd is not None else ranks
    before = tuple(_call(rng, size) for _ in range(rng.choice([0, 0, 1, 3])))
    return Case(number, rest, odd, what, ranks, before)


def _call(rng: random.Random, size: int) -> Call:
    return Call(
        kind=rng.choice(KINDS),
        rows=rng.choices(SIZES, [30, 30, 20, 15, 5])[0],
        dtype=rng.choice(["f8", "f4", "i4"]),
        op=rng.choice(["sum", "max"]),
        root=rng.randrange(size),
        shared=rng.random() < 0.3,
        planned=rng.random() < 0.3,
    )


def _ways(call: Call) -> list[str]:
    kind = call.kind
    ways = ["kind", "missing", "twice", *NEEDS_CHECKS]
    if kind == "start_barrier":
        return ways
    ways += ["objects", "memory"]
    if kind != "shift":
        ways += ["planned", "out", "misfit"]
    if kind in ("reduce_scatter", "all_gather", "gather", "all_to_all", "scatter"):
        ways += ["bad sizes"]
    if kind in REDUCING:
        ways += ["op", "bad op"]
    if kind in ROOTED:
        ways += ["root", "bad root"]
    if kind in ("broadcast", "scatter"):
        ways += ["no array"]
    if kind not in ("shift", "scatter"):
        ways += ["dtype", "rows", "columns", "dtype", "rows"]
    if kind in ("all_reduce", "reduce", "broadcast"):
        ways += ["algorithm"]
    return ways


def _other(rng: random.Random, call: Call, what: str, size: int) -> Call | None:
    match what:
        case "kind":
            return replace(call, kind=rng.choice([k for k in KINDS if k != call.kind]))
        case "op":
            return replace(call, op="max" if call.op == "sum" else "sum")
        case "root":
            return replace(call, root=(call.root + rng.randint(1, size - 1)) % size)
        case "dtype":
            dtypes = {"f8": ["f4", "i8"], "f4": ["f8", "i4"], "i4": ["f4", "i8"]}
            return replace(call, dtype=rng.choice(dtypes[call.dtype]))
        case "rows":
            return replace(call, rows=rng.choice([rows for rows in SIZES if rows != call.rows]))
        case "columns":
            return replace(call, columns=3)
        case "twin":
            return replace(call, group="twin")
        case "planned":
            return replace(call, planned=not call.planned)
        case "memory":
            return replace(call, shared=not call.shared)
        case "out" | "misfit":
            return replace(call, out="fits" if what == "out" else what)
        case "no array" | "objects":
            return replace(call, x=what)
        case "label":
            return replace(call, options=(("label", "odd"),))
        case "algorithm":
            return replace(call, options=(("algorithm", "ring"),))
        case "bad op":
            return replace(call, op="xor")
        case "bad root":
            return replace(call, root=size)
        case "bad sizes":
            return replace(call, options=(("sizes", [1] * (size + 1)),))
    return None if what == "missing" else call


def _input(call: Call, rank: int, size: int) -> Any:
    x = (np.arange(call.rows * size * call.columns) % 7 + rank).astype(call.dtype)
    return x if call.columns == 1 else x.reshape(-1, call.columns)


def _expected(call: Call, rank: int, size: int) -> Any:
    """Return what this rank must get if all call this."""
    xs = [_input(call, one, size) for one in range(size)]
    kind, block = call.kind, slice(rank * call.rows, (rank + 1) * call.rows)
    if kind in REDUCING:
        whole = np.sum(xs, axis=0, dtype=call.dtype) if call.op == "sum" else np.max(xs, axis=0)
        if kind == "reduce" and rank != call.root:
            return None
        return whole[block] if kind == "reduce_scatter" else whole
    if kind in ("all_gather", "gather"):
        return np.concatenate(xs) if kind == "all_gather" or rank == call.root else None
    if kind == "all_to_all":
        return np.concatenate([x[block] for x in xs])
    if kind in ("broadcast", "scatter"):
        return xs[call.root] if kind == "broadcast" else xs[call.root][block]
    return xs[rank - 1] if kind == "shift" and rank else None


def _start(mesh: Any, call: Call) -> Any:
    group, kind = mesh.group(call.group), call.kind
    n, me, options = group.size, group.rank, dict(call.options)
    if kind == "start_barrier":
        return group.start_barrier(**options)
    x = _input(call, me, n)
    if call.shared:
        shared = mesh.shared_empty(x.shape, x.dtype)
        shared[...] = x
        x = shared
    if call.x == "objects":
        x = np.full(x.shape, None)
    elif call.x == "no array":
        x = None
    if kind == "shift":
        return group.shift(x, **options)
    if kind in REDUCING:
        options["op"] = call.op
    if kind in ROOTED:
        options["root"] = call.root
    if call.out is not None:
        expected = _expected(replace(call, root=call.root % n), me, n)
        shape = (1,) if expected is None else expected.shape
        more = call.out == "misfit"
        options["out"] = np.empty((shape[0] + more, *shape[1:]), call.dtype)
    if not call.planned:
        return getattr(group, kind)(x, **options)
    return getattr(group, f"{kind}_init")(x, **options).start()


def _resolved(begin: Any, call: Call, mesh: Any) -> str:
    """Return ``right``, ``wrong``, or the name of the error."""
    try:
        handle = begin()
        if not isinstance(handle, str):
            got = handle.resolve(timeout_s=LIMIT_S)
    except MpimeshError as error:
        return type(error).__name__
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if isinstance(handle, str):
        return handle
    expected = _expected(call, mesh.rank, mesh.size)
    if (got is None) != (expected is None):
        return f"wrong: {got}"
    same = expected is None or (got.shape == expected.shape and (got == expected).all())
    return "right" if same else f"wrong: {str(got)[:60]}"


_LAST = Call("all_reduce", 5, "i2", "max")


def run(mesh: Any, case: Case) -> Outcome:
    """Run a case on this rank."""
    rng = random.Random(f"{case.number} on {mesh.rank}")
    is_odd = mesh.rank in case.ranks
    call = case.odd if is_odd else case.rest
    began = time.monotonic()

    def begin(one: Call) -> Any:
        try:
            return _start(mesh, one)
        except MpimeshError as error:
            return type(error).__name__

    handles = [(begin(one), one) for one in case.before]
    if call is not None:
        handles.append((begin(call), call))
        if case.what == "twice" and is_odd:
            handles.append((begin(call), call))
    if rng.random() < 0.3:
        time.sleep(0.002)
    places = list(range(len(handles)))
    rng.shuffle(places)
    results = {p: _resolved(lambda p=p: handles[p][0], handles[p][1], mesh) for p in places}
    first = [results[place] for place in range(len(case.before), len(handles))]
    second = _resolved(lambda: _start(mesh, _LAST), _LAST, mesh)
    seconds = time.monotonic() - began
    before = [results[place] for place in range(len(case.before))]
    return Outcome(before, " and ".join(first) or "left out", second, seconds)


def wrong(case: Case, outcomes: Sequence[Outcome], *, checks: bool) -> str | None:
    """Return what is wrong with the outcomes of all ranks; None for nothing."""
    what, size = case.what, len(outcomes)
    odd = {rank for rank in range(size) if rank in case.ranks}
    for rank, outcome in enumerate(outcomes):
        if any(text != "right" for text in outcome.before):
            return f"rank {rank}: what came before is {outcome.before}"
        if "wrong" in outcome.first or "wrong" in outcome.second:
            return f"rank {rank} has wrong numbers: {outcome.first}, {outcome.second}"
        if "raised" in outcome.first or "raised" in outcome.second:
            return f"rank {rank} {outcome.first} {outcome.second}"
        if outcome.seconds > LIMIT_S:
            return f"rank {rank} took {outcome.seconds:.1f} s: {outcome.first}, {outcome.second}"
    firsts, seconds = [o.first for o in outcomes], [o.second for o in outcomes]
    known = [{*first.split(" and "), second} for first, second in zip(firsts, seconds, strict=True)]
    if _is_right(case, odd, checks):
        good = all(names == {"right"} for names in known)
        return None if good else f"is right, and gives {firsts}, {seconds}"
    if _is_for_one(case, checks):
        error = "DTypeError" if what == "objects" else "ShapeError"
        joint = what != "misfit"
        alike = [error if rank in odd or joint else "right" for rank in range(size)]
        good = firsts == alike and set(seconds) == {"right"}
        return None if good else f"gives {firsts}, {seconds}"
    if what == "twin" and not checks:
        return None if set(seconds) == {"right"} else f"gives {firsts}, {seconds}"
    own = {"bad op": {"ReduceOpError"}, "bad root": {"RankError"}, "objects": {"DTypeError"}}
    may = own.get(what, {"ShapeError"} if what in (*LOCAL, "bad sizes") else set())
    for rank, names in enumerate(known):
        rest = names - {"right", "left out"} - (may if rank in odd else set())
        if rest - {"MismatchError"}:
            return f"rank {rank} raises {rest}: {firsts}, {seconds}"
        if "MismatchError" not in names and not (checks and rank in odd and names & may):
            return f"rank {rank} is told nothing: {firsts}, {seconds}"
    return None


def _is_right(case: Case, odd: set[int], checks: bool) -> bool:
    """Tell whether nothing is wrong."""
    what, rest = case.what, case.rest
    if what in NEEDS_CHECKS:
        return not checks and (what != "twin" or rest.kind != "shift")
    if what == "planned":
        return rest.kind != "scatter"
    if what == "misfit" and rest.kind in ("reduce", "gather"):
        return rest.root not in odd
    if what in ("objects", "no array") and rest.kind == "scatter" and not rest.planned:
        return rest.root not in odd
    return what in HARMLESS


def _is_for_one(case: Case, checks: bool) -> bool:
    """Tell whether the ranks take part and then raise, some or all of them."""
    if case.rest.kind != "scatter" or case.rest.planned:
        return False
    return case.what == "misfit" or (case.what in ("objects", "no array") and not checks)


def is_skipped(case: Case, *, checks: bool) -> bool:
    """Tell whether nothing certain can be said of a case."""
    # What is not even planned, or left out, leaves the ranks out of step for good.
    what, odd = case.what, case.odd
    apart = odd is None or (odd.planned and what in (*LOCAL, "bad sizes"))
    if checks and (apart or what == "twice"):
        return True
    scatters = "scatter" in (case.rest.kind, odd and odd.kind)
    planned = case.rest.planned or (odd is not None and odd.planned)
    return scatters and planned and what in (*HARMLESS, "misfit", "objects", "no array")


def _shown(case: Case, outcomes: Sequence[Outcome], *, checks: bool, shows: bool) -> bool:
    problem = wrong(case, outcomes, checks=checks)
    if problem is not None and shows:
        print(f"case {case.number}, {case.what}: {problem}\n  {case}", flush=True)
    return problem is not None


def in_a_mesh(comm: Any, case: Case) -> Outcome:
    """Run a case in a mesh of its own. Collective."""
    with mm.DeviceMesh("a=-1", comm) as mesh:
        mesh.add_group("twin", range(mesh.size))
        return run(mesh, case)


def main(first: int, count: int, nodes: int) -> bool:
    """Run cases under mpiexec; rank 0 prints what was wrong."""
    from mpi4py import MPI  # late: virtual ranks need none

    comm, failed = MPI.COMM_WORLD, 0
    checks = os.environ.get("MPIMESH_CHECKS", "0") != "0"
    for number in range(first, first + count):
        case = case_of(number, comm.size)
        if not is_skipped(case, checks=checks):
            with nodes_of(nodes):
                outcomes = comm.allgather(in_a_mesh(comm, case))
            failed += _shown(case, outcomes, checks=checks, shows=comm.rank == 0)
    return failed > 0


def on_virtual_ranks(first: int, count: int, size: int) -> bool:
    """Run cases on virtual ranks."""
    failed = 0
    checks = os.environ.get("MPIMESH_CHECKS", "0") != "0"
    for number in range(first, first + count):
        case = case_of(number, size)
        if not is_skipped(case, checks=checks):
            outcomes = mm.run_virtual(size, in_a_mesh, None, case)
            failed += _shown(case, outcomes, checks=checks, shows=True)
    return failed > 0


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
