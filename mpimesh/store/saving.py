"""`save`: a tree on the disk, each box of each array written once, by one of those who have it.

All ranks describe what they have. The first of them gives each box to one rank that has it, evenly
by bytes, and tells each what to write; this is planned once for a tree that is saved many times.
Then each writes its boxes into files of its own, in a folder beside the path, in a thread; has them
on the disk; and tells the first rank how that went, with the digests of what it wrote. That one
writes the manifest and renames the folder, and only then is anything seen under the path:

    rank k   copy if wait=False | write, sync (thread) | isend digests        | irecv answer
    rank 0   copy if wait=False | write, sync (thread) | irecv those of all   |
                                | manifest, sync, rename, sync (thread)       | isend answer

If anything fails on any rank, all raise, and what was under the path before is as it was.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from mpimesh.arguments import as_flag, as_int, digest_text, rank_names, shown, size_text
from mpimesh.arrays import Array, DType, HostArray, namespace, to_numpy
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.comm import MAX_USER_TAG, Steps
from mpimesh.comm.requests import Condition, all_done
from mpimesh.errors import MismatchError, StoreError, TransportError, on_all_ranks
from mpimesh.layout.boxes import Box, extent, local_box, slices, uncovered, volume, whole
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.store.drafts import Draft, check_target
from mpimesh.store.files import (
    Background,
    DataFile,
    Kinds,
    Share,
    Writer,
    agreeing,
    as_folder,
    check_mesh,
    compare_arrays,
    data_folder,
    manifest_of,
    new_token,
    temporary_beside,
)
from mpimesh.store.parts import Value
from mpimesh.store.trees import Flat, flatten, in_order, leaf_names, mesh_of
from mpimesh.trace.log import log

__all__ = ["FILE_BYTES", "save", "settle"]

FILE_BYTES = 2 << 30
_PIECE_BYTES = 64 << 20
"""A box that several ranks have is cut into pieces of so many bytes, which they share."""
_NOTE_BYTES = 2048
_SAMPLES, _SAMPLE_BYTES = 8, 256
_TAG = MAX_USER_TAG + 14


@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: DeviceMesh | None = None,
    wait: Literal[True] = True,
    file_bytes: int = FILE_BYTES,
) -> None: ...


@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: DeviceMesh | None = None,
    wait: Literal[False],
    file_bytes: int = FILE_BYTES,
) -> CollectiveTensor: ...


@overload
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: DeviceMesh | None = None,
    wait: bool,
    file_bytes: int = FILE_BYTES,
) -> CollectiveTensor | None: ...


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mesh: DeviceMesh | None = None,
    wait: bool = True,
    file_bytes: int = FILE_BYTES,
) -> CollectiveTensor | None:
    """Save a tree of arrays, models, optimizers and values as a folder. Collective over the mesh.

    What is split is written by the ranks that have it, each box once. The folder is seen under its
    name only when all of it is on the disk; a checkpoint that was there before is good until then.
    :func:`load` reads it on any other mesh, on any number of ranks, and in one process without MPI.

    Arrays that are not split, layers and values must be the same on all ranks: values are compared,
    of arrays samples, and all of them with ``MPIMESH_CHECKS``. A plain optimizer is saved by the
    names of its parameters in the models of the same tree.

    Args:
        path: The folder, which all ranks can see. It may hold a checkpoint, which is replaced: the
            files that its manifest lists; what else is in it stays.
        tree: Dicts, lists and tuples, in each other, of: arrays of NumPy, CuPy or PyTorch,
            `DTensor`; None, truth values, numbers, texts and bytes; models, layers and optimizers,
            PyTorch's, too; generators of NumPy; other objects with `state_dict` and
            `load_state_dict`. Or one of these.
        mesh: The ranks that save together; None for those of the arrays and models in the tree, or
            this process alone where there are none.
        wait: False returns when the tree has been copied, and may be changed again; the copies are
            written in a thread. The handle must be resolved; the next save resolves it, too.
        file_bytes: Most bytes of a file, but for those of an array whose rows are longer.

    Returns:
        With ``wait=False`` a handle, whose result is the path.

    Raises:
        StoreError: On every rank, if any cannot write its part, or there is something else under
            the path than a checkpoint.
        MismatchError: On every rank, if values differ between ranks, or trees are built otherwise.
        DTypeError: On every rank, if an array has a dtype that files do not know.

    Cost:
        The first save of a tree sends descriptions of it to one rank; later ones an exchange of a
        few bytes and of one digest for each box. Reading memory once, and the disk. With
        ``wait=False`` memory for a copy of what this rank writes, which the next save uses again.

    Example:
        >>> mm.save("run/step-100", {"model": model, "optimizer": optimizer, "losses": losses})
    """
    where = as_folder(path)
    size = as_int(file_bytes, "file_bytes", StoreError, least=1)
    as_flag(wait, "wait", StoreError)
    ranks, what = mesh_of(tree) if mesh is None else mesh, f"save to {where}"
    check_mesh(ranks, what)
    if ranks is None:
        if not wait:
            raise StoreError("wait=False needs a mesh: give mesh=")
        with agreeing(None, what, what):
            _save_alone(where, flatten(tree), size)
        return None
    core = ranks.group()._core
    try:
        handle = _start(core, where, tree, size, copy=not wait)
    except MismatchError as error:
        everyone = ranks._core.everyone._core
        if error.agreed or list(core.ranks) != list(everyone.ranks):
            raise
        # Ctrl-C may have come on some ranks in a collective that the others had not started, and
        # the group starts nothing more. Who is not here to save has left by the same mismatch.
        try:
            handle = _start(everyone, where, tree, size, copy=not wait)
        except TransportError:
            raise error from None
    if wait:
        handle.resolve()
        return None
    return handle


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The files of a save, and the arrays in them, as one rank knows them.

    Attributes:
        mine: This rank's share.
        shares: Those of all ranks, on the first one.
        kinds: Shape and dtype of all arrays, on the first one.
        memory: Where copies of this rank's boxes lie between saves, for ``wait=False``.
    """

    mine: Share
    shares: tuple[Share, ...] = ()
    kinds: Kinds = field(default_factory=dict)
    memory: dict[tuple[str, Box], HostArray] = field(default_factory=dict)


def _described(flat: Flat) -> list[Any]:
    """Return what a rank tells of its arrays, as JSON."""
    return [
        [name, parts.shape, dtype_to_json(parts.dtype), [box for box, _ in parts.parts]]
        for name, parts in sorted(flat.arrays.items())
    ]


def plan_shares(
    rows: Sequence[Sequence[Any]], file_bytes: int
) -> tuple[list[Share], dict[str, tuple[tuple[int, ...], DType]]]:
    """Return the share of each rank, by the descriptions of all; and shapes and dtypes of arrays.

    Raises:
        StoreError: If no rank has some elements of an array.
        MismatchError: If ranks have different arrays under one name.
        DTypeError: If files do not know the dtype of one.
    """
    arrays: dict[str, tuple[tuple[int, ...], DType]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, row in enumerate(rows):
        for name, shape, dtype, boxes in row:
            kind = tuple(shape), dtype_from_json(dtype)
            if arrays.setdefault(name, kind) != kind:
                raise MismatchError(
                    f"ranks have different arrays of the name {name!r}: rank {rank} one of shape "
                    f"{kind[0]} and {kind[1]}, and another one {arrays[name][0]} and "
                    f"{arrays[name][1]}"
                )
            for box in (tuple(map(tuple, each)) for each in boxes):
                if volume(box) or not prod(shape):
                    holders.setdefault(name, {}).setdefault(box, []).append(rank)
    pieces: list[tuple[int, str, Box, list[int]]] = []
    for name, (shape, dtype) in arrays.items():
        gap = uncovered([*holders.get(name, ())], whole(shape)) if prod(shape) else None
        if gap is not None:
            raise StoreError(
                f"no rank has box {gap} of {name}, of shape {shape}: all ranks that have a part "
                "of the tree must save it together"
            )
        nbytes = dtype.itemsize
        for box, ranks in holders.get(name, {}).items():
            most = min(file_bytes, _PIECE_BYTES) if len(ranks) > 1 else file_bytes
            cut = _cut(box, max(1, most // max(1, nbytes)))
            pieces += [(volume(tile) * nbytes, name, tile, ranks) for tile in cut]
    loads = [0] * len(rows)
    written: list[list[tuple[str, Box, int]]] = [[] for _ in rows]
    for nbytes, name, box, ranks in sorted(pieces, key=lambda each: (-each[0], *each[1:3])):
        rank = min(ranks, key=lambda each: (loads[each], each))
        loads[rank] += nbytes
        written[rank].append((name, box, nbytes))
    shares = []
    for rank, row in enumerate(written):
        files: list[list[tuple[str, Box]]] = []
        room = 0
        for name, box, nbytes in sorted(row, key=lambda each: (-arrays[each[0]][1].itemsize, each)):
            if not files or nbytes > room:
                files.append([])
                room = file_bytes
            files[-1].append((name, box))
            room -= nbytes
        shares.append(
            tuple(
                DataFile.of(f"{rank:05}-{number:03}.safetensors", boxes, arrays)
                for number, boxes in enumerate(files)
            )
        )
    return shares, arrays


def _cut(box: Box, most: int) -> list[Box]:
    """Cut a box into boxes of at most so many elements, but for single rows."""
    size = extent(box)
    if volume(box) <= most or not size:
        return [box]
    rows = max(1, most // max(1, prod(size[1:])))
    start, stop = box[0]
    return [((at, min(at + rows, stop)), *box[1:]) for at in range(start, stop, rows)]


def _part(flat: Flat, name: str, box: Box) -> Array:
    """Return the values of a box that lies in one of the boxes that a rank has of an array."""
    for outer, array in flat.arrays[name].parts:
        if all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True)):
            return array[slices(local_box(box, outer))] if array.shape else array
    raise StoreError(f"box {box} is in none of this rank's boxes")


# -- alone ----------------------------------------------------------------------------------------


def _save_alone(path: Path, flat: Flat, file_bytes: int) -> None:
    """Save what one process has, without MPI."""
    shares, kinds = plan_shares([_described(flat)], file_bytes)
    token = new_token()
    draft, data = Draft(path, token, _names(shares)), data_folder(token)
    try:
        writer = Writer(draft.fresh / data, shares[0], partial(_part, flat))
        writer.run()
        problem = writer.problem
        if not problem:
            digests = [writer.digests]
            manifest = manifest_of(shares, kinds, data, digests, flat.structure, flat.values)
            end = Background(partial(draft.commit, manifest))
            end.run()
            problem = end.problem
    finally:
        draft.close()
    if problem:
        raise StoreError(_failed(path, problem))


def _names(shares: Sequence[Share]) -> list[str]:
    return [file.name for share in shares for file in share]


def _failed(path: Path, problem: str) -> str:
    return f"cannot save to {path}: {problem}; what was there before is as it was"


# -- together -------------------------------------------------------------------------------------

_plans: WeakKeyDictionary[GroupCore, dict[str, SavePlan]] = WeakKeyDictionary()
_MOST_PLANS = 4


def settle(core: GroupCore) -> None:
    """Wait for the save that is under way among some ranks, if there is one. Collective.

    Raises:
        StoreError: On every rank, if it has failed and nobody has been told so.
    """
    handle, core.saving = core.saving, None
    if handle is not None and not handle._resolved:
        handle.resolve()


def _start(
    core: GroupCore, path: Path, tree: Any, file_bytes: int, *, copy: bool
) -> CollectiveTensor:
    core.member("save")
    settle(core)
    what = f"save to {path}"
    call = f"{what}, wait={not copy}, file_bytes={file_bytes}"
    with agreeing(core, call, what) as rows:  # a state_dict() may fail on one rank alone
        flat = flatten(tree)
        own = _digest([_described(flat), file_bytes])
        copies = copies_of(flat, whole=bool(core.context.settings.checks))
        structure = in_order(flat.structure)
        common = _digest([structure, sorted(flat.values.items()), sorted(copies.items())])
        token = ""
        if core.rank == 0:
            check_target(path)
            token = new_token()
        rows.append([own, common, token])
    compare_arrays(core, "save", flat.arrays)
    token = rows[0][2]
    key = _digest([row[0] for row in rows])
    plans = _plans.setdefault(core, {})
    plan = plans.get(key)
    if plan is None:
        plan = _plan(core, what, flat, file_bytes)
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    alike = len({row[1] for row in rows}) == 1
    values = flat.values if alike else _union(core, what, flat, copies)
    source: Callable[[str, Box], Array] = partial(_part, flat)
    draft: Draft | None = None
    try:
        # Others may change what this rank reads, where they see the same memory.
        with agreeing(core, what, what):
            if core.rank == 0:
                draft = Draft(path, token, _names(plan.shares))
            if copy:
                memory = _copied(core, plan, flat)
                source = lambda name, box: memory[name, box]  # noqa: E731
    except BaseException:
        if draft is not None:
            draft.close()
        raise
    writer = Writer(temporary_beside(path, token) / data_folder(token), plan.mine, source)
    writer.start()
    steps = _steps(core, plan, writer, flat, values, path, token, draft)
    nbytes = sum(file.nbytes for file in plan.mine)
    log(logging.INFO, core.world_rank, "saving %s, of it %s", path, size_text(nbytes))
    started = Call("save", core.name, rule=str(path))
    handle = CollectiveTensor(core, started, core.progress.stage(object(), steps), nbytes=nbytes)
    core.saving = handle
    return handle


def _digest(value: Any) -> str:
    return digest_text(json.dumps(value).encode())


def _copied(core: GroupCore, plan: SavePlan, flat: Flat) -> dict[tuple[str, Box], HostArray]:
    """Copy what this rank is to write, into the memory of the last such save."""
    memory = plan.memory
    try:
        for file in plan.mine:
            for name, box, _ in file.pieces:
                values = _part(flat, name, box)
                copied = memory.get((name, box))
                if copied is None:
                    copied = memory[name, box] = np.empty(values.shape, values.dtype)
                copied[...] = values if isinstance(values, np.ndarray) else to_numpy(values)
    except MemoryError:
        raise StoreError(
            f"rank {core.world_rank} has no memory for a copy of what it saves: save with wait=True"
        ) from None
    return memory


def _plan(core: GroupCore, what: str, flat: Flat, file_bytes: int) -> SavePlan:
    """Plan the files of all ranks, which describe what they have to the first one. Collective."""
    rows = _gathered(core, what, _described(flat))
    shares: list[Share] = []
    kinds: Kinds = {}
    with agreeing(core, what, what):
        if rows is not None:
            shares, kinds = plan_shares(rows, file_bytes)
    named = [
        [[file.name, [piece[:2] for piece in file.pieces]] for file in share] for share in shares
    ]
    mine = _scattered(core, what, named)
    kinds_here = {name: (parts.shape, parts.dtype) for name, parts in flat.arrays.items()}
    share = tuple(
        DataFile.of(file, [(name, tuple(map(tuple, box))) for name, box in boxes], kinds_here)
        for file, boxes in mine
    )
    return SavePlan(share, tuple(shares), kinds)


def copies_of(flat: Flat, *, whole: bool) -> dict[str, str]:
    """Return by name what tells apart arrays of which every rank has a copy, if they differ.

    Args:
        flat: The tree.
        whole: Whether all of each is read; else its first and last bytes, and some between.
    """
    found: dict[str, str] = {}
    for name in flat.copies:
        digest = xxhash.xxh3_64()
        for _, array in flat.arrays[name].parts:
            xp = namespace(array)
            data = xp.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if whole or len(data) <= _SAMPLES * _SAMPLE_BYTES:
                starts, length = [0], len(data)
            else:
                last, length = len(data) - _SAMPLE_BYTES, _SAMPLE_BYTES
                starts = [last * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
            for start in starts:
                digest.update(to_numpy(data[start : start + length]).data)
        found[name] = digest.hexdigest()
    return found


def _union(core: GroupCore, what: str, flat: Flat, copies: Mapping[str, str]) -> dict[str, Value]:
    """Return the values of all ranks by name, on the first one. Collective.

    Raises:
        MismatchError: On every rank, if one name has several values, or trees differ.
    """
    rows = _gathered(core, what, [flat.structure, flat.values, copies]) or []
    union: dict[str, Value] = {}
    first: dict[str, int] = {}
    digests: dict[str, str] = {}
    with agreeing(core, what, what):
        for rank, (structure, values, own) in enumerate(rows):
            if in_order(structure) != in_order(rows[0][0]):
                odd = sorted({*leaf_names(structure)} ^ {*leaf_names(rows[0][0])})
                raise MismatchError(
                    f"all ranks save trees that are built alike, but that of rank {rank} is not as "
                    f"that of rank 0: {', '.join(odd[:4]) or 'leaves are of other kinds'}"
                )
            for name, digest in own.items():
                if digests.setdefault(name, digest) != digest:
                    raise MismatchError(
                        f"array {name} has other values on rank {rank} than on rank 0: what is not "
                        "split is saved once, so ranks must have the same; save a list of all, or "
                        "mm.DTensor.from_local(...)"
                    )
            for name, value in values.items():
                if name in union and json.dumps(union[name]) != json.dumps(value):
                    raise MismatchError(
                        f"{name} has different values on {rank_names([first[name], rank])}: "
                        f"{shown(union[name])} and {shown(value)}; save what is the same on all "
                        "ranks, or a list of all, which all have"
                    )
                first.setdefault(name, rank)
                union.setdefault(name, value)
    return union


def _packed(value: Any) -> HostArray:
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)


def _unpacked(row: HostArray) -> Any:
    return json.loads(zlib.decompress(row.tobytes()))


def _gathered(core: GroupCore, what: str, value: Any) -> list[Any] | None:
    """Return the JSON values of all ranks on the first one, None elsewhere. Collective."""
    mine, communicator = _packed(value), core.communicator
    sizes = [row[0] for row in agree(core, what, [mine.size])]
    if core.rank:
        core.wait_for(communicator.isend(mine, 0, _TAG), what=what, peers=(0,))
        return None
    rows = [np.empty(size, np.uint8) for size in sizes]
    rows[0] = mine
    receives = [communicator.irecv(rows[rank], rank, _TAG) for rank in range(1, core.size)]
    core.wait_for(all_done(*receives), what=what)
    return [_unpacked(row) for row in rows]


def _scattered(core: GroupCore, what: str, values: Sequence[Any]) -> Any:
    """Return to each rank its own of the JSON values that the first one has. Collective."""
    rows, communicator = [_packed(value) for value in values], core.communicator
    sizes = agree(core, what, [row.size for row in rows])[0]
    if core.rank:
        mine = np.empty(sizes[core.rank], np.uint8)
        core.wait_for(communicator.irecv(mine, 0, _TAG), what=what, peers=(0,))
        return _unpacked(mine)
    sends = [communicator.isend(rows[rank], rank, _TAG) for rank in range(1, core.size)]
    core.wait_for(all_done(*sends), what=what)
    return _unpacked(rows[0])


def _steps(
    core: GroupCore,
    plan: SavePlan,
    writer: Writer,
    flat: Flat,
    values: Mapping[str, Value],
    path: Path,
    token: str,
    draft: Draft | None,
) -> Steps:
    """Wait for the writers of all ranks, commit, and learn how it went."""
    communicator, answer = core.communicator, np.zeros(_NOTE_BYTES, np.uint8)
    try:
        yield _ended(core, writer)
        mine = _row(plan.mine)
        mine[: 8 * len(writer.digests)] = np.array(writer.digests, np.uint64).view(np.uint8)
        _write_note(mine[-_NOTE_BYTES:], writer.problem)
        if draft is None:
            yield communicator.isend(mine, 0, _TAG)
            yield communicator.irecv(answer, 0, _TAG)
        else:
            rows = [mine, *map(_row, plan.shares[1:])]
            others = islice(enumerate(rows), 1, None)
            receives = [communicator.irecv(row, rank, _TAG) for rank, row in others]
            yield all_done(*receives)
            texts = [_note(row[-_NOTE_BYTES:]) for row in rows]
            odd = [core.ranks[rank] for rank, text in enumerate(texts) if text]
            if odd:
                problem = draft.lost or f"{next(filter(None, texts))} on {rank_names(odd)}"
                draft.close()
            else:
                digests = [row[:-_NOTE_BYTES].view(np.uint64).tolist() for row in rows]
                data = data_folder(token)
                manifest = manifest_of(
                    plan.shares, plan.kinds, data, digests, flat.structure, values
                )
                end = Background(partial(draft.commit, manifest))
                end.start()
                yield _ended(core, end)
                problem = end.problem and f"{end.problem} on rank {core.ranks[0]}"
            _write_note(answer, problem and _failed(path, problem))
            yield all_done(
                *[communicator.isend(answer, rank, _TAG) for rank in range(1, communicator.size)]
            )
    finally:
        if draft is not None:
            draft.close()
    problem = _note(answer)
    if problem:
        raise on_all_ranks(StoreError(problem))
    return path


def _ended(core: GroupCore, thread: Background) -> Condition:
    """Return the request that is done when a thread is, by which others see that it goes on."""
    nbytes = -1
    others = [one for one in core.progress.background if not one.done]
    core.progress.background = (*others, thread)

    def test() -> bool:
        nonlocal nbytes
        if not thread.done:
            core.communicator.stir()  # a wait of this rank is to look again soon
            if thread.nbytes != nbytes:
                nbytes = thread.nbytes
                if core.progress.current is not None:  # what this rank waits for goes on
                    core.progress.current.since_s = time.monotonic()
        return thread.done

    return Condition(test, thread)


def _row(share: Share) -> HostArray:
    """Return memory for what a rank tells of its writing: the digests, and what went wrong."""
    return np.zeros(8 * sum(len(file.pieces) for file in share) + _NOTE_BYTES, np.uint8)


def _write_note(row: HostArray, text: str) -> None:
    data = np.frombuffer(text.encode(errors="replace")[: len(row)], np.uint8)
    row[: len(data)] = data


def _note(row: HostArray) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")
