"""The ways in which ranks come to differ, as one table; checks must find all but a few.

A case is a program for all ranks of a mesh ``dp=-1``, and differs on the last one, where `odd` is
True. Run on virtual ranks, or with others of the table under mpiexec, with MPIMESH_CHECKS=1::

    mpiexec -n 2 python -m tests.contract.mismatch_catalogue FOLDER "split: an axis" ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.errors import DeadlockError, MismatchError, MpimeshError
from mpimesh.mesh import Mesh
from tests.contract.mismatch_cases import WRONG, Case, Program
from tests.contract.mismatch_models import MODELS

__all__ = ["CASES", "outcome_of", "run_case"]


def run_case(case: Case) -> None:
    """Run a case on this rank, in a mesh of its own. Raises what was found."""
    with mm.DeviceMesh("dp=-1") as mesh:
        found = case.body(mesh, mesh.rank == mesh.size - 1)
        if isinstance(found, mm.CollectiveTensor):
            found.resolve()


def outcome_of(error: BaseException | None) -> str:
    """Return by what a case was found."""
    if error is None:
        return "silent"
    if isinstance(error, DeadlockError):
        return "deadlock"
    if isinstance(error, MismatchError):
        return "mismatch"
    return "error" if isinstance(error, MpimeshError) else f"raised {error!r}"


# -- collectives -----------------------------------------------------------------------------


def _calls(program: Program, mesh: Any, odd: bool) -> None:
    for call in program.odd if odd else program.rest:
        call(mesh.group()).resolve()


def _group_calls() -> Iterator[Case]:
    for one in WRONG:
        body = partial(_calls, one)
        yield Case(f"group: {one.name}", body, "any" if one.local else "mismatch", ranks=one.least)


def _ones(*shape: int, dtype: Any = float) -> Any:
    return np.ones(shape, dtype)


def _again(mesh: Any, odd: bool) -> None:
    mesh.add_group("again", range(mesh.size))
    for name in ("again", "world") if odd else ("world", "again"):
        mesh.group(name).all_reduce(_ones(2)).resolve()


def _through_helper(mesh: Any, odd: bool) -> None:
    def summed(value: float) -> Any:
        return mesh.group().all_reduce(np.full(3, value), label="sum").resolve()

    for value in (2.0, 1.0) if odd else (1.0, 2.0):
        summed(value)


def _loop(mesh: Any, odd: bool) -> None:
    for _ in range(2 if odd else 3):
        mesh.group().all_reduce(_ones(2)).resolve()


def _two_senders(mesh: Any, odd: bool) -> None:
    mesh.group().broadcast(_ones(2), root=None).resolve()


def _no_sender(mesh: Any, odd: bool) -> None:
    mesh.group().broadcast(None, root=None).resolve()


_OPEN: list[Any] = []
"""Handles that are never resolved; a dropped one would warn."""


def _unresolved(mesh: Any, odd: bool) -> Any:
    handle = mesh.group().all_reduce(_ones(2))
    _OPEN.append(handle)
    return None if odd else handle.resolve()


_FIELDS = [("a", "i4"), ("b", "i4")]

_COLLECTIVES = [
    Case("group: order of two groups of the same ranks", _again, said="again"),
    Case("group: calls in a loop", _loop),
    Case("group: a result that nobody resolves", _unresolved, "error"),
    Case("group: two senders, root unknown", _two_senders, "error"),
    Case("group: no sender, root unknown", _no_sender, "error"),
    Case(
        "group: fields of a structure",
        lambda m, odd: m.group().all_gather(_ones(2, dtype=_FIELDS[::-1] if odd else _FIELDS)),
    ),
    Case("group: no elements", lambda m, odd: m.group().all_reduce(_ones(0 if odd else 4))),
    Case(
        "group: bool and uint8",
        lambda m, odd: m.group().all_reduce(_ones(4, dtype=bool if odd else "u1"), "max"),
    ),
    Case(
        "group: complex and float",
        lambda m, odd: m.group().all_reduce(_ones(4, dtype=complex if odd else float)),
    ),
    Case(
        "group: reduce and all_reduce",
        lambda m, odd: (m.group().reduce if odd else m.group().all_reduce)(_ones(4)),
    ),
    Case(
        "group: gather and all_gather",
        lambda m, odd: (m.group().gather if odd else m.group().all_gather)(_ones(4)),
    ),
    Case(
        "group: broadcast and scatter",
        lambda m, odd: (m.group().broadcast if odd else m.group().scatter)(_ones(m.size)),
    ),
    Case(
        "group: shift and barrier",
        lambda m, odd: m.group().shift(_ones(4)) if odd else m.group().start_barrier(),
    ),
    Case(
        "group: barriers with a limit and without",
        lambda m, odd: m.group().barrier(timeout_s=1.0 if odd else None),
        "any",
        alone=True,
    ),
    Case("group: all_reduce and close", lambda m, odd: odd or m.group().all_reduce(_ones(4))),
    Case("mesh: dims", lambda m, odd: mm.DeviceMesh("a=-1" if odd else "b=-1")),
    Case(
        "mesh: ranks of a new group",
        lambda m, odd: m.add_group("g", [0] if odd else range(m.size)),
    ),
    Case(
        "mesh: name of a new group",
        lambda m, odd: m.add_group("g" if odd else "h", range(m.size)),
    ),
    Case(
        "mesh: a new group on one rank",
        lambda m, odd: m.add_group("g", range(m.size)) if odd else m.group().barrier(),
    ),
    Case("mesh: reshape", lambda m, odd: m.reshape("a=1,b=-1" if odd else "a=-1,b=1")),
    Case("mesh: reshape and close", lambda m, odd: odd and m.reshape("a=-1")),
    Case(
        "mesh: a copy and an all_reduce",
        lambda m, odd: m.copy() if odd else m.group().all_reduce(_ones(2)).resolve(),
        "deadlock",
        said="all_reduce",
    ),
    Case(
        "mesh: another mesh and an all_reduce",
        lambda m, odd: mm.DeviceMesh("a=-1") if odd else m.group().all_reduce(_ones(2)).resolve(),
        "deadlock",
        said="all_reduce",
    ),
    Case(
        "mesh: links and a barrier",
        lambda m, odd: m.measure_links() if odd else m.group().barrier(),
        "deadlock",
        said="measure_links",
    ),
]

# -- messages and waits -------------------------------------------------------------------------


def _large() -> Any:
    return np.ones(1 << 20)


def _send(mesh: Any, odd: bool, *, tag: int = 0, x: Any = None, then: Any = None) -> Any:
    """Rank 0 sends to the last rank, which receives as `then` says."""
    group = mesh.group()
    if mesh.rank == 0:
        group.send(_ones(3) if x is None else x, group.size - 1, tag=tag).resolve()
    elif odd and then is not None:
        then(group)


def _crossed(mesh: Any, odd: bool) -> None:
    """Three groups of two, each rank in two of them, in a ring."""
    ring = [("ab", [0, 1]), ("bc", [1, 2]), ("ca", [2, 0])]
    for name, ranks in ring:
        mesh.add_group(name, ranks)
    if mesh.rank < 3:
        for name in [("ab", "ca"), ("bc", "ab"), ("ca", "bc")][mesh.rank]:
            mesh.group(name).all_reduce(_ones(2)).resolve()


def _rows_and_columns(mesh: Any, odd: bool) -> None:
    """Rows and columns of two by two ranks, in another order on two of them."""
    groups = {"a0": [0, 2], "a1": [1, 3], "b0": [0, 1], "b1": [2, 3]}
    for name, ranks in groups.items():
        mesh.add_group(name, ranks)
    for kind in "ba" if mesh.rank in (0, 3) else "ab":
        for name, ranks in groups.items():
            if name.startswith(kind) and mesh.rank in ranks:
                mesh.group(name).all_reduce(_ones(2)).resolve()


def _other_group(mesh: Any, odd: bool) -> None:
    mesh.add_group("again", range(mesh.size))
    if mesh.rank == 0:
        mesh.group("again").send(_ones(2), mesh.size - 1).resolve()
    elif odd:
        mesh.group().recv(0).resolve()


def _wrong_destination(mesh: Any, odd: bool) -> None:
    group = mesh.group()
    if mesh.rank == 0:
        group.send(_ones(3), 1).resolve()
    elif odd:
        group.recv(0).resolve()


def _head_on(mesh: Any, odd: bool) -> None:
    group, peer = mesh.group(), 0 if odd else mesh.size - 1
    if odd or mesh.rank == 0:
        group.send(_large(), peer).resolve()
        group.recv(peer).resolve()


def _recv_ring(mesh: Any, odd: bool) -> None:
    group = mesh.group()
    group.recv((mesh.rank - 1) % mesh.size).resolve()
    group.send(_ones(2), (mesh.rank + 1) % mesh.size).resolve()


def _open_recv(mesh: Any, odd: bool) -> None:
    if odd:
        _OPEN.append(mesh.group().recv(0))


def _answer_missing(mesh: Any, odd: bool) -> None:
    group = mesh.group()
    if mesh.rank == 0:
        group.send(_ones(2), mesh.size - 1).resolve()
        group.recv(mesh.size - 1).resolve()
    elif odd:
        group.recv(0).resolve()
        group.all_reduce(_ones(2)).resolve()
    else:
        group.all_reduce(_ones(2)).resolve()


_MESSAGES = [
    Case(
        "message: tag",
        partial(_send, tag=3, then=lambda g: g.recv(0, tag=4).resolve()),
        "deadlock",
        said="tag 4",
    ),
    Case("message: destination", _wrong_destination, "deadlock", said="source 0", ranks=3),
    Case(
        "message: source",
        partial(_send, then=lambda g: g.recv(1).resolve()),
        "deadlock",
        said="source 1",
        ranks=3,
    ),
    Case(
        "message: recv against recv",
        lambda m, odd: m.group().recv(0 if odd else m.size - 1).resolve(),
        "deadlock",
        said="recv",
    ),
    Case("message: a ring of recv", _recv_ring, "deadlock", said="recv", ranks=3),
    Case(
        "message: recv against all_reduce",
        lambda m, odd: (m.group().recv(0) if odd else m.group().all_reduce(_ones(2))).resolve(),
        "deadlock",
        said="all_reduce",
    ),
    Case(
        "message: recv against barrier",
        lambda m, odd: m.group().recv(0).resolve() if odd else m.group().barrier(),
        "deadlock",
        said="barrier",
    ),
    Case(
        "message: recv against close",
        lambda m, odd: odd and m.group().recv(0).resolve(),
        "deadlock",
        said="close",
    ),
    Case("message: no answer", _answer_missing, "deadlock", said="recv"),
    Case(
        "message: recv against shift",
        lambda m, odd: (m.group().recv(0) if odd else m.group().shift(_ones(2))).resolve(),
        "deadlock",
        said="shift",
    ),
    Case("message: two large sends", _head_on, "deadlock", said="send", rendezvous=True),
    Case("message: never received", _send, said="tag 0"),
    Case(
        "message: one of two received",
        lambda m, odd: [_send(m, odd), _send(m, odd, then=lambda g: g.recv(0).resolve())],
        said="tag 0",
    ),
    Case("message: recv never resolved", _open_recv, "error", said="recv"),
    Case("message: group", _other_group, "error", said="again"),
    Case(
        "message: shape",
        partial(_send, then=lambda g: g.recv(0, shape=4).resolve()),
        "error",
        said="(4,)",
    ),
    Case(
        "message: dtype",
        partial(_send, then=lambda g: g.recv(0, dtype="i4").resolve()),
        "error",
        said="int32",
    ),
    Case(
        "message: shape of out",
        partial(_send, then=lambda g: g.recv(0, out=np.empty(5)).resolve()),
        "error",
        said="(5,)",
    ),
    Case("wait: three groups in a ring", _crossed, "deadlock", said="'ab'", ranks=3),
    Case("wait: rows and columns", _rows_and_columns, "deadlock", said="'b0'", ranks=4),
]

# -- split arrays -------------------------------------------------------------------------------


def _x(mesh: Any, placements: str = "dp=S0", *, shape: tuple[int, ...] = (4, 4)) -> Any:
    return mm.distribute(np.arange(16.0).reshape(shape), mesh, placements)


def _split(name: str, body: Callable[[Any, Any, bool], object], **options: Any) -> Case:
    """A case with a split array of 4 x 4 numbers, which it takes as its second argument."""
    return Case(f"split: {name}", lambda m, odd: body(m, _x(m), odd), **options)


def _put(x: Any, key: Any, value: Any) -> None:
    x[key] = value


def _rows(mesh: Any, count: int) -> Any:
    return mm.DTensor.from_local(np.ones((count, 2)), mesh, "dp=S0")


_SPLIT = [
    _split("function", lambda m, x, odd: x + x if odd else x * x, said="multiply"),
    _split("in-place function", lambda m, x, odd: x.__iadd__(x) if odd else x.__imul__(x)),
    _split("order of operands", lambda m, x, odd: x - x.T.copy() if odd else x.T.copy() - x),
    _split("a number", lambda m, x, odd: x + (2.0 if odd else 1.0), said="2.0"),
    _split("a number's kind", lambda m, x, odd: x + (1 if odd else 1.0)),
    _split("values of an ordinary array", lambda m, x, odd: x + np.arange(4.0) * (1 + odd)),
    _split("an axis", lambda m, x, odd: x.sum(axis=int(odd)), said="axis"),
    _split("an axis of a sort", lambda m, x, odd: np.sort(x, axis=int(odd))),
    _split("a reduction", lambda m, x, odd: x.max() if odd else x.sum(), said="max"),
    _split("keepdims", lambda m, x, odd: x.sum(axis=0, keepdims=odd)),
    _split("a dtype in an argument", lambda m, x, odd: x.sum(dtype="f4" if odd else "f8")),
    _split("an index", lambda m, x, odd: x[1 if odd else 0], said="getitem"),
    _split("a slice", lambda m, x, odd: x[1:3] if odd else x[:2]),
    _split("an index array", lambda m, x, odd: x[np.array([0, 2 if odd else 1])]),
    _split("a mask", lambda m, x, odd: x[x > (3 if odd else 2)]),
    _split("a value that is set", lambda m, x, odd: _put(x, 0, 2.0 if odd else 1.0), said="2.0"),
    _split("a key that is set", lambda m, x, odd: _put(x, 1 if odd else 0, 1.0), said="setitem"),
    _split("an array that is set", lambda m, x, odd: _put(x, ..., np.full(4, 1.0 + odd))),
    _split("a split array that is set", lambda m, x, odd: _put(x, 0, x[1] if odd else x[2])),
    _split("fill", lambda m, x, odd: x.fill(2.0 if odd else 1.0)),
    _split("where", lambda m, x, odd: np.where(x > 2, 0.0 if odd else 1.0, x)),
    _split("clip", lambda m, x, odd: x.clip(0, 5 if odd else 6)),
    _split("einsum", lambda m, x, odd: np.einsum("ij,jk->ik" if odd else "ij,kj->ik", x, x)),
    _split("matmul and dot of a row", lambda m, x, odd: x @ np.ones(4) if odd else x * np.ones(4)),
    _split("a cast", lambda m, x, odd: x.astype("f4" if odd else "f8") + 1),
    _split("a shape", lambda m, x, odd: x.reshape(2, 8) if odd else x.reshape(8, 2)),
    _split("a transpose", lambda m, x, odd: (x.T if odd else x) + 1),
    _split("fft", lambda m, x, odd: np.fft.ifft(x) if odd else np.fft.fft(x), said="fft"),
    _split("linalg", lambda m, x, odd: np.linalg.norm(x, 1 if odd else 2)),
    _split("quantile", lambda m, x, odd: np.quantile(x, 0.5 if odd else 0.25)),
    _split("histogram", lambda m, x, odd: np.histogram(x, bins=3 if odd else 4)),
    _split("a function left out", lambda m, x, odd: odd or x + x),
    _split("a layout", lambda m, x, odd: x.redistribute("dp=S1" if odd else "dp=R")),
    _split("memory of a move", lambda m, x, odd: x.redistribute("dp=S1", max_bytes=64 * odd)),
    _split("a move and a sum", lambda m, x, odd: x.redistribute("dp=R") if odd else x.sum().full()),
    _split("full on one rank", lambda m, x, odd: odd or x.full()),
    _split("root of full", lambda m, x, odd: x.full(root=1 if odd else 0)),
    _split("an element", lambda m, x, odd: x.item(0, int(odd))),
    _split("a copied write", lambda m, x, odd: np.copyto(x, x + odd)),
    _split("a number as a condition", lambda m, x, odd: odd or bool(x.sum() > 0)),
    _split("local_map and a sum", lambda m, x, odd: odd or mm.local_map(np.exp, "dp=S0")(x)),
    _split("offset of a shift", lambda m, x, odd: mm.shift(x, 2 if odd else 1, axis=0)),
    _split("cumsum and cumprod", lambda m, x, odd: x.cumprod(0) if odd else x.cumsum(0)),
    _split("another array", lambda m, x, odd: (_x(m, shape=(2, 8)) if odd else x) + 1),
    Case("made: values", lambda m, odd: mm.distribute(np.full(4, 1.0 + odd), m, "dp=S0")),
    Case("made: placements", lambda m, odd: _x(m, "dp=S1" if odd else "dp=S0")),
    Case(
        "made: root",
        lambda m, odd: mm.distribute(_ones(4), m, "dp=S0", root=1 if odd else 0),
    ),
    Case("made: seed", lambda m, odd: mm.Random(7 + odd).normal((4, 2), m, "dp=S0"), said="Random"),
    Case("made: draws", lambda m, odd: [_draw(m) for _ in range(1 + odd)]),
    Case(
        "made: order of draws",
        lambda m, odd: _draw(m, "normal" if odd else "uniform"),
        said="uniform",
    ),
    Case(
        "made: numbers of a draw",
        lambda m, odd: mm.Random(7).normal((4, 2), m, "dp=S0", scale=2.0 if odd else 1.0),
    ),
    Case("made: shape", lambda m, odd: mm.zeros((4 + odd, 2), m, "dp=R"), said="(5, 2)"),
    Case("made: value", lambda m, odd: mm.full((4, 2), 1.0 + odd, m, "dp=S0")),
    Case("made: ones and zeros", lambda m, odd: (mm.ones if odd else mm.zeros)(4, m, "dp=S0")),
    Case("made: dtype", lambda m, odd: mm.empty(4, m, "dp=S0", dtype="f4" if odd else "f8")),
    Case("made: arange", lambda m, odd: mm.arange(4.0 + odd, mesh=m, placements="dp=S0")),
    Case("made: linspace", lambda m, odd: mm.linspace(0, 1 + odd, 8, mesh=m, placements="dp=S0")),
    Case("made: eye", lambda m, odd: mm.eye(4, k=int(odd), mesh=m, placements="dp=S0")),
    Case(
        "made: copies that differ",
        lambda m, odd: mm.DTensor.from_local(np.full(3, 1.0 + odd), m, "dp=R"),
    ),
    Case(
        "made: copies that differ, shape known",
        lambda m, odd: mm.DTensor.from_local(np.full(3, 1.0 + odd), m, "dp=R", shape=(3,)),
    ),
    Case(
        "made: dtype of blocks",
        lambda m, odd: mm.DTensor.from_local(_ones(3, dtype="f4" if odd else "f8"), m, "dp=S0"),
    ),
    Case(
        "made: axes of blocks",
        lambda m, odd: mm.DTensor.from_local(_ones(3, 1 + odd), m, "dp=S0"),
    ),
    Case(
        "made: placements of blocks",
        lambda m, odd: mm.DTensor.from_local(_ones(3, 3), m, "dp=S1" if odd else "dp=S0"),
    ),
    Case(
        "made: whole shape of blocks",
        lambda m, odd: (
            mm.DTensor.from_local(
                _ones(3), m, "dp=S0", shape=(3 * m.size if not odd else 3 * m.size + 0,)
            )
            if not odd
            else _rows(m, 3)
        ),
    ),
    Case(
        "made: shape of a callback",
        lambda m, odd: mm.from_callback((6 + odd, 2), m, "dp=R", _zeros_at),
        said="(7, 2)",
    ),
    Case(
        "made: values of a callback",
        lambda m, odd: mm.from_callback((6, 2), m, "dp=R", lambda i: _zeros_at(i) + odd),
    ),
    Case(
        "made: dtype of a callback",
        lambda m, odd: mm.from_callback((6, 2), m, "dp=R", _zeros_at, dtype="f4" if odd else "f8"),
    ),
    Case("made: an array on one rank", lambda m, odd: odd and mm.zeros(4, m, "dp=S0")),
    Case("made: a variable's value", lambda m, odd: _variable(m, odd)),
    Case("split: a block that the user writes", lambda m, odd: _written(m, odd), "silent"),
]


def _zeros_at(index: tuple[slice, ...]) -> Any:
    return np.zeros([one.stop - one.start for one in index])


def _draw(mesh: Any, kind: str = "normal") -> Any:
    return getattr(mm.Random(7), kind)((4, 2), mesh, "dp=S0")


def _variable(mesh: Any, odd: bool) -> None:
    v = mm.dtensor.DVariable(np.zeros(4), layout="dp=S0", mesh=mesh)
    v.assign(v.value() + (1.0 + odd))


def _written(mesh: Any, odd: bool) -> None:
    """No call says what is written into `local`, and a copy is not read at each use."""
    x = _x(mesh, "dp=R")
    x.local[...] = float(odd)
    (x + 1).sum()


def _saved(body: Callable[[Any, str, bool], object]) -> Callable[[Any, bool], object]:
    """Save x and y into a folder that all ranks know, and go on with that."""

    def run(mesh: Any, odd: bool) -> None:
        folder = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
        with folder() if mesh.rank == 0 else nullcontext() as name:
            data = np.frombuffer(name.encode(), np.uint8) if name else None
            path = mesh.group().broadcast(data, root=None).resolve().tobytes().decode()
            x, y = (mm.distribute(np.full(6, v), mesh, "dp=S0") for v in (1.0, 2.0))
            mm.save(f"{path}/a", {"x": x, "y": y})
            body(mesh, path, odd)
            mesh.barrier()  # rank 0 removes it

    return run


def _load(mesh: Any, path: str, **options: Any) -> None:
    x, y = (mm.zeros(6, mesh, "dp=S0") for _ in range(2))
    mm.load(f"{path}/a", {"x": x, "y": y}, **options)


def _renamed(mesh: Any, path: str, odd: bool) -> None:
    names = {"x": "z"} if odd else {"y": "z"}
    mm.load(f"{path}/a", {"z": mm.zeros(6, mesh, "dp=S0")}, rename=names, strict=False)


_STORE = [
    Case("load: only", _saved(lambda m, p, odd: _load(m, p, only="x" if odd else None))),
    Case("load: strict", _saved(lambda m, p, odd: _load(m, p, strict=not odd))),
    Case("load: verify", _saved(lambda m, p, odd: _load(m, p, verify="none" if odd else "read"))),
    Case("load: rename", _saved(_renamed)),
    Case(
        "load: layout",
        _saved(lambda m, p, odd: mm.load(f"{p}/a", mesh=m, layout="dp=R" if odd else "dp=S0")),
    ),
    Case(
        "save: file_bytes",
        _saved(lambda m, p, odd: mm.save(f"{p}/b", [1], mesh=m, file_bytes=1000 + odd)),
    ),
]


def _two(mesh: Any) -> Any:
    return [mm.distribute(np.full(6, value), mesh, "dp=S0") for value in (0.0, 100.0)]


def _other(name: str, body: Callable[[Any, Any, Any], object], said: str = "#") -> Case:
    """A case with two arrays of the same looks, which the odd rank takes for each other."""
    return Case(
        f"other array: {name}",
        lambda m, odd: body(m, *(_two(m)[::-1] if odd else _two(m))),
        said=said,
    )


def _planned(x: Any) -> None:
    planned = x.redistribute_init("dp=R")
    for _ in range(2):
        planned.start().resolve()


def _to_another_mesh(x: Any, *, few: bool = False) -> None:
    dims = Mesh("a=1", world_size=1) if few else "a=-1"
    with mm.DeviceMesh(dims) as goal:
        x.redistribute("a=S0", mesh=goal)


def _halo(x: Any, y: Any) -> None:
    halo = mm.Halo(x)
    now, then = halo.field(x), halo.field(y)
    halo.exchange(now)
    then.tensor.sum()


def _written_since(mesh: Any, odd: bool) -> None:
    x = mm.zeros(6, mesh, "dp=S0")
    before = x.copy()
    x[2:] = 1.0
    (before if odd else x).sum()


def _by_name(mesh: Any, odd: bool) -> None:
    names = ("bias", "weight") if odd else ("weight", "bias")
    made = {name: mm.ones(6, mesh, "dp=S0") for name in names}
    made["bias"].sum()


_OTHER = [
    _other("a sum", lambda m, x, y: x.sum(), "numpy.sum((6,) float64 as dp=S0"),
    _other("order of two sums", lambda m, x, y: [x.sum(), y.sum()]),
    _other("order of operands", lambda m, x, y: x - y),
    _other("a row of arrays", lambda m, x, y: np.concatenate([x, y])),
    _other("a part of a result", lambda m, x, y: np.split(np.concatenate([x, y]), 2)[0] + 1),
    _other("a write", lambda m, x, y: _put(x, slice(2), 7.0)),
    _other("values that are set", lambda m, x, y: _put(x * 1, ..., y)),
    _other("out", lambda m, x, y: np.add(1.0, 1.0, out=x)),
    _other("full", lambda m, x, y: x.full()),
    _other("full on one rank", lambda m, x, y: x.full(root=0)),
    _other("a copy", lambda m, x, y: x.copy().sum()),
    _other("a cast", lambda m, x, y: x.astype("f4").sum()),
    _other("a move", lambda m, x, y: x.redistribute("dp=R")),
    _other("a move to the same layout", lambda m, x, y: x.redistribute("dp=S0")),
    _other("a move to another mesh", lambda m, x, y: _to_another_mesh(x)),
    _other("a move to a mesh of one rank", lambda m, x, y: _to_another_mesh(x, few=True)),
    _other("a planned move", lambda m, x, y: _planned(x)),
    _other("a halo", lambda m, x, y: _halo(x, y), "halo"),
    _other("a shift", lambda m, x, y: mm.shift(x, 1, 0), "shift"),
    _other("local_map", lambda m, x, y: mm.local_map(np.exp, "dp=S0")(x)),
    _other("a variable", lambda m, x, y: mm.dtensor.DVariable(x).assign_add(y), "assign_add"),
    Case("other array: a copy from before a write", _written_since, said="#"),
    Case("other array: made in another order", _by_name, said="#"),
    Case(
        "other array: saved",
        _saved(lambda m, p, odd: mm.save(f"{p}/b", {"x": _two(m)[odd]})),
        said="same split array as x",
    ),
    Case(
        "other array: loaded",
        _saved(
            lambda m, p, odd: mm.load(
                f"{p}/a", dict(zip("yx" if odd else "xy", _two(m), strict=True))
            )
        ),
        said="same split array as",
    ),
    Case(
        "other array: in a file",
        _saved(lambda m, p, odd: mm.save_array(f"{p}/x.npy", _two(m)[odd])),
        said="#",
    ),
]


CASES = {
    case.name: case
    for case in [*_group_calls(), *_COLLECTIVES, *_MESSAGES, *_SPLIT, *_OTHER, *_STORE, *MODELS]
}


def main(folder: Path, names: list[str]) -> None:
    """Run cases under mpiexec, and let each rank write down what came of each.

    Without names, all that can follow each other.
    """
    from mpi4py import MPI  # late: virtual ranks need none

    rank = MPI.COMM_WORLD.rank
    outcomes: dict[str, tuple[str, str]] = {}
    size = MPI.COMM_WORLD.size
    together = [
        name for name, case in CASES.items() if case.ranks <= size and not case.leaves_ranks_apart
    ]
    for name in names or together:
        error: BaseException | None = None
        try:
            run_case(CASES[name])
        except Exception as raised:
            error = raised
        outcomes[name] = outcome_of(error), str(error)
        (folder / f"rank-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
