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
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from mpimesh.arguments import as_flag, as_int, digest_bits, rank_names, shown, size_text
from mpimesh.arrays import Array, DType, HostArray, namespace, to_numpy
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.comm import MAX_USER_TAG, Steps
from mpimesh.comm.requests import Condition, Request, all_done
from mpimesh.errors import DTypeError, MismatchError, MpimeshError, StoreError, on_all_ranks
from mpimesh.layout.boxes import Box, extent, local_box, slices, volume
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.store.files import as_folder, new_token, temporary_beside
from mpimesh.store.format import Manifest, missing_in
from mpimesh.store.parts import Parts, Value
from mpimesh.store.together import as_store_error, ranks_of_job
from mpimesh.store.trees import Flat, flatten, leaf_names, mesh_of
from mpimesh.store.writing import (
    Commit,
    DataFile,
    Kinds,
    Share,
    Writer,
    check_target,
    data_folder,
    discard,
    manifest_of,
    num_pieces,
)
from mpimesh.trace.tracer import log

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
        path: The folder, which all ranks can see. It may hold a checkpoint, which is replaced.
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
        DTypeError: On every rank, if an array has a dtype that files do not know; without a mesh
            it is the cause of a StoreError.

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
    ranks = mesh_of(tree) if mesh is None else mesh
    if ranks is None:
        count = ranks_of_job()
        if count > 1:
            raise StoreError(
                f"nothing in the tree says which of the {count} ranks of this job save it "
                "together: give mesh="
            )
        if not wait:
            raise StoreError("wait=False needs a mesh: give mesh=")
        try:
            _save_alone(where, flatten(tree), size)
        except OSError as error:
            raise as_store_error(error, f"save to {where}") from None
        return None
    if not isinstance(ranks, DeviceMesh):
        raise StoreError(f"mesh must be a DeviceMesh, got {shown(ranks)}")
    handle = _start(ranks.group()._core, where, tree, size, copy=not wait)
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
        MismatchError: If ranks have different arrays under one name.
        DTypeError: If files do not know the dtype of one.
    """
    arrays: dict[str, tuple[tuple[int, ...], DType]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, row in enumerate(rows):
        for name, shape, dtype, boxes in row:
            kind = tuple(shape), dtype_from_json(dtype)
            if arrays.setdefault(name, kind) != kind:
                raise MismatchError(
                    f"ranks have different arrays of the name {name!r}: rank {rank} one of shape "
                    f"{kind[0]} and {kind[1]}, and another one {arrays[name][0]} and "
                    f"{arrays[name][1]}"
                )
            for box in boxes:
                key = name, tuple(map(tuple, box))
                if volume(key[1]) or not prod(kind[0]):
                    holders.setdefault(key, []).append(rank)
    pieces: list[tuple[int, str, Box, list[int]]] = []
    for (name, box), ranks in holders.items():
        nbytes = arrays[name][1].itemsize
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


def _part(parts: Parts, box: Box) -> Array:
    """Return the values of a box that lies in one of the boxes of a rank."""
    for outer, array in parts.parts:
        if all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True)):
            return array[slices(local_box(box, outer))] if array.shape else array
    raise StoreError(f"box {box} is in none of this rank's boxes")


# -- alone ----------------------------------------------------------------------------------------


def _save_alone(path: Path, flat: Flat, file_bytes: int) -> None:
    """Save what one process has, without MPI."""
    check_target(path)
    try:
        shares, kinds = plan_shares([_described(flat)], file_bytes)
    except DTypeError as error:
        raise StoreError(f"cannot save to {path}: {error}") from error
    token = new_token()
    fresh, data = temporary_beside(path, token), data_folder(token)
    discard(path)
    writer = Writer(fresh / data, shares[0], lambda name, box: _part(flat.arrays[name], box))
    writer.run()
    problem = writer.problem
    if problem:
        shutil.rmtree(fresh, ignore_errors=True)
    else:
        digests = [writer.digests]
        manifest = manifest_of(shares, kinds, data, digests, flat.structure, flat.values)
        commit = Commit(manifest, fresh, path, token)
        commit.run()
        problem = commit.problem
    if problem:
        raise StoreError(f"cannot save to {path}: {problem}; what was there before is as it was")


def _check_whole(manifest: Manifest) -> None:
    """Refuse a manifest of which an array is not whole.

    Raises:
        StoreError: If so.
    """
    for name, entry in manifest.arrays.items():
        gap = missing_in(entry)
        if gap is not None:
            raise StoreError(
                f"no rank has box {gap} of {name}, of shape {entry.shape}: all ranks that have a "
                "part of the tree must save it together"
            )


# -- together -------------------------------------------------------------------------------------

_plans: WeakKeyDictionary[GroupCore, dict[int, SavePlan]] = WeakKeyDictionary()
_under_way: WeakKeyDictionary[GroupCore, CollectiveTensor] = WeakKeyDictionary()
_MOST_PLANS = 4


def settle(core: GroupCore) -> None:
    """Wait for the save that is under way among some ranks, if there is one. Collective.

    Raises:
        StoreError: On every rank, if it has failed and nobody has been told so.
    """
    handle = _under_way.pop(core, None)
    if handle is not None and not handle._resolved:
        handle.resolve()


def _start(
    core: GroupCore, path: Path, tree: Any, file_bytes: int, *, copy: bool
) -> CollectiveTensor:
    core.member("save")
    settle(core)
    what = f"save to {path}"
    flat = Flat()
    problem: Exception | None = None
    own = common = token = ""
    copies: dict[str, str] = {}
    try:
        flat = flatten(tree)
        own = _digest([_described(flat), file_bytes])
        copies = copies_of(flat, whole=bool(core.context.settings.checks))
        common = _digest([flat.structure, sorted(flat.values.items()), copies])
        if core.rank == 0:
            check_target(path)
            token = new_token()
    except Exception as error:  # such as of a state_dict(): the other ranks are to know
        problem = as_store_error(error, what)
    rows = agree(core, what, [own, common, token], problem=problem)
    token = rows[0][2]
    key = digest_bits(json.dumps([row[0] for row in rows]).encode(), 63)
    plans = _plans.setdefault(core, {})
    plan = plans.get(key)
    if plan is None:
        plan = _plan(core, what, flat, file_bytes)
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    values = _union(core, what, flat, copies, alike=len({row[1] for row in rows}) == 1)
    fresh = temporary_beside(path, token)

    def live(name: str, box: Box) -> Array:
        return _part(flat.arrays[name], box)

    source: Callable[[str, Box], Array] = live
    problem = None
    if copy:
        try:
            memory = _copied(plan, live)

            def source(name: str, box: Box) -> Array:
                return memory[name, box]

        except MemoryError:
            problem = StoreError(
                f"rank {core.world_rank} has no memory for a copy of what it saves: save with "
                "wait=True"
            )
    if core.rank == 0:
        discard(path)
    # Others may change what this rank reads, where they see the same memory.
    agree(core, what, problem=problem)
    writer = Writer(fresh / data_folder(token), plan.mine, source)
    writer.start()
    steps = _steps(core, plan, writer, flat, values, path, token)
    nbytes = sum(file.nbytes for file in plan.mine)
    log(logging.INFO, core.world_rank, "saving %s, of it %s", path, size_text(nbytes))
    call = Call("save", core.name, rule=str(path))
    handle = CollectiveTensor(core, call, core.stage(object(), steps), nbytes=nbytes)
    _under_way[core] = handle
    return handle


def _digest(value: Any) -> str:
    return f"{digest_bits(json.dumps(value).encode(), 63):x}"


def _copied(
    plan: SavePlan, source: Callable[[str, Box], Array]
) -> dict[tuple[str, Box], HostArray]:
    """Copy what this rank is to write, into the memory of the last such save."""
    memory = plan.memory
    for file in plan.mine:
        for name, box, _ in file.pieces:
            values = source(name, box)
            copied = memory.get((name, box))
            if copied is None:
                copied = memory[name, box] = np.empty(values.shape, values.dtype)
            copied[...] = values if isinstance(values, np.ndarray) else to_numpy(values)
    return memory


def _plan(core: GroupCore, what: str, flat: Flat, file_bytes: int) -> SavePlan:
    """Plan the files of all ranks, which describe what they have to the first one. Collective."""
    rows = _gathered(core, what, _described(flat))
    problem: MpimeshError | None = None
    plans: list[Any] = []
    shares: list[Share] = []
    kinds: Kinds = {}
    if rows is not None:
        try:
            shares, kinds = plan_shares(rows, file_bytes)
            nothing = [[0] * num_pieces(share) for share in shares]
            _check_whole(manifest_of(shares, kinds, "", nothing, None, {}))
            plans = [
                [[file.name, [piece[:2] for piece in file.pieces]] for file in share]
                for share in shares
            ]
        except MpimeshError as error:
            problem = error
    agree(core, what, problem=problem)
    mine = _scattered(core, what, plans)
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


def _union(
    core: GroupCore, what: str, flat: Flat, copies: Mapping[str, str], *, alike: bool
) -> dict[str, Value]:
    """Return the values of all ranks by name, on the first one. Collective unless all are alike.

    Raises:
        MismatchError: On every rank, if one name has several values, or trees differ.
    """
    if alike:
        return flat.values
    rows = _gathered(core, what, [flat.structure, flat.values, copies])
    problem: MpimeshError | None = None
    union: dict[str, Value] = {}
    first: dict[str, int] = {}
    digests: dict[str, str] = {}
    for rank, (structure, values, own) in enumerate(rows or []):
        if json.dumps(structure) != json.dumps(rows[0][0]):  # type: ignore[index]
            theirs, first_ones = ({*leaf_names(each[0])} for each in (rows[rank], rows[0]))  # type: ignore[index]
            odd = sorted(theirs ^ first_ones)
            problem = problem or MismatchError(
                f"all ranks save trees that are built alike, but that of rank {rank} is not as "
                f"that of rank 0: {', '.join(odd[:4]) or 'leaves are of other kinds'}"
            )
        for name, digest in own.items():
            if digests.setdefault(name, digest) != digest:
                problem = problem or MismatchError(
                    f"array {name} has other values on rank {rank} than on rank 0: what is not "
                    "split is saved once, so ranks must have the same; save a list of all, or "
                    "mm.DTensor.from_local(...)"
                )
        for name, value in values.items():
            if name in union and json.dumps(union[name]) != json.dumps(value):
                problem = problem or MismatchError(
                    f"{name} has different values on {rank_names([first[name], rank])}: "
                    f"{shown(union[name])} and {shown(value)}; save what is the same on all ranks, "
                    "or a list of all, which all have"
                )
            first.setdefault(name, rank)
            union.setdefault(name, value)
    agree(core, what, problem=problem)
    return union


def _gathered(core: GroupCore, what: str, value: Any) -> list[Any] | None:
    """Return the JSON values of all ranks on the first one, None elsewhere. Collective."""
    text = np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)
    sizes = [row[0] for row in agree(core, what, [text.size])]
    if core.rank:
        request = core.communicator.isend(text, 0, _TAG)
        core.wait_for(request, what=what, peers=(0,))
        return None
    rows = [text] + [np.empty(size, np.uint8) for size in sizes[1:]]
    requests = [
        core.communicator.irecv(row, rank, _TAG) for rank, row in islice(enumerate(rows), 1, None)
    ]
    core.wait_for(all_done(*requests), what=what)
    return [json.loads(zlib.decompress(row.tobytes())) for row in rows]


def _scattered(core: GroupCore, what: str, values: Sequence[Any]) -> Any:
    """Return to each rank its own of the JSON values that the first one has. Collective."""
    texts = [
        np.frombuffer(zlib.compress(json.dumps(each).encode(), 1), np.uint8) for each in values
    ]
    sizes = agree(core, what, [text.size for text in texts])[0]
    communicator = core.communicator
    if core.rank:
        mine = np.empty(sizes[core.rank], np.uint8)
        core.wait_for(communicator.irecv(mine, 0, _TAG), what=what, peers=(0,))
        return json.loads(zlib.decompress(mine.tobytes()))
    requests = [
        communicator.isend(text, rank, _TAG) for rank, text in islice(enumerate(texts), 1, None)
    ]
    core.wait_for(all_done(*requests), what=what)
    return json.loads(json.dumps(values[0]))


def _steps(
    core: GroupCore,
    plan: SavePlan,
    writer: Writer,
    flat: Flat,
    values: Mapping[str, Value],
    path: Path,
    token: str,
) -> Steps:
    """Wait for the writers of all ranks, commit, and learn how it went."""
    communicator = core.communicator
    yield _ended(core, writer)
    fresh, answer = temporary_beside(path, token), np.zeros(_NOTE_BYTES, np.uint8)
    problem = ""
    if core.rank:
        row = _row(writer)
        yield communicator.isend(row, 0, _TAG)
        yield _from_others(core, communicator.irecv(answer, 0, _TAG))
        problem = _note(answer)
    else:
        rows = [np.zeros(8 * num_pieces(share) + _NOTE_BYTES, np.uint8) for share in plan.shares]
        rows[0][...] = _row(writer)
        others = islice(enumerate(rows), 1, None)
        receives = [communicator.irecv(row, rank, _TAG) for rank, row in others]
        yield _from_others(core, all_done(*receives))
        notes = {rank: note for rank, row in enumerate(rows) if (note := _note(row[-_NOTE_BYTES:]))}
        if notes:
            note = next(iter(notes.values()))
            problem = f"{note} on {rank_names([core.ranks[each] for each in notes])}"
            shutil.rmtree(fresh, ignore_errors=True)
        else:
            digests = [row[:-_NOTE_BYTES].view(np.uint64).tolist() for row in rows]
            manifest = manifest_of(
                plan.shares, plan.kinds, data_folder(token), digests, flat.structure, values
            )
            commit = Commit(manifest, fresh, path, token)
            commit.start()
            yield _ended(core, commit)
            problem = commit.problem and f"{commit.problem} on rank {core.ranks[0]}"
        _write_note(answer, problem)
        yield all_done(
            *[communicator.isend(answer, rank, _TAG) for rank in range(1, communicator.size)]
        )
    if problem:
        raise on_all_ranks(
            StoreError(f"cannot save to {path}: {problem}; what was there before is as it was")
        )
    return path


def _ended(core: GroupCore, thread: Writer | Commit) -> Condition:
    """Return the request that is done when a thread is."""
    nbytes = -1

    def test() -> bool:
        nonlocal nbytes
        if not thread.done:
            core.communicator.stir()  # a wait of this rank is to look again soon
            if thread.nbytes != nbytes:
                nbytes = thread.nbytes
                _is_no_hang(core)
        return thread.done

    return Condition(test, thread)


def _from_others(core: GroupCore, request: Request) -> Condition:
    """Return a request that ends when other ranks have written, however long that takes.

    They look themselves whether their writing goes on.
    """

    def test() -> bool:
        _is_no_hang(core)
        return request.test()

    return Condition(test, request)


def _is_no_hang(core: GroupCore) -> None:
    """Tell the watchdog that the wait of this rank goes on well."""
    wait = core.progress.current
    if wait is not None:
        wait.since_s = time.monotonic()


def _row(writer: Writer) -> HostArray:
    """Return what a rank tells of its writing: the digests, and what went wrong."""
    row = np.zeros(8 * num_pieces(writer.share) + _NOTE_BYTES, np.uint8)
    digests = np.array(writer.digests, np.uint64)
    row[: 8 * len(digests)] = digests.view(np.uint8)
    _write_note(row[-_NOTE_BYTES:], writer.problem)
    return row


def _write_note(row: HostArray, text: str) -> None:
    data = np.frombuffer(text.encode(errors="replace")[: len(row)], np.uint8)
    row[: len(data)] = data


def _note(row: HostArray) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")
