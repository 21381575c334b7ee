"""Checkpoints: saving and loading beside plain files, and beside torch.distributed.checkpoint.

A tree of float32 arrays, split by rows over the ranks. `plain files`: each rank writes the same
bytes into one file of its own, from one array, and has it on the disk; or reads them into the
arrays. `a copy`: the same arrays copied into memory that is there. Files that
were just written are in the memory of the system, so reading is without the disk, for all alike.

torch.distributed.checkpoint has the same arrays as DTensors over gloo, in the same processes. It
has no digests, and does not wait for the disk unless told so: both ways are there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks import gloo
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

__all__ = ["run"]

TOTAL_BYTES = 512 << 20
_TINY_BYTES = 1 << 20
ARRAYS = 32
_ROUNDS = 7


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    rounds = min(_ROUNDS, effort.rounds)
    folder = Path(comm.bcast(mkdtemp(prefix="mpimesh-")))
    total = _TINY_BYTES if effort.most_bytes < TOTAL_BYTES else TOTAL_BYTES
    try:
        rows = _beside_files(mesh, comm, folder, total, rounds)
        if not gloo.available():
            with gloo.opened(comm) as (torch, _):
                rows += _beside_torch(mesh, comm, folder, total, rounds, torch)
    finally:
        comm.Barrier()
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def make_tree(mesh: mm.DeviceMesh, total: int) -> dict[str, mm.DTensor]:
    """Return arrays of random numbers, of so many bytes together."""
    columns = 1024
    lines = total // 4 // columns // ARRAYS
    rng = np.random.default_rng(mesh.rank)
    tree = {}
    for number in range(ARRAYS):
        array = mm.empty((lines, columns), mesh, "dp=S0", dtype=np.float32)
        array.local[...] = rng.random(array.local.shape, np.float32)
        tree[f"layer.{number}.weight"] = array
    return tree


def _beside_files(
    mesh: mm.DeviceMesh, comm: Any, folder: Path, total: int, rounds: int
) -> list[dict[str, Any]]:
    tree = make_tree(mesh, total)
    size = sum(array.local.nbytes for array in tree.values())
    flat = np.concatenate([array.local.reshape(-1) for array in tree.values()])
    plain, saved = folder / f"plain-{mesh.rank}", folder / "saved"

    def write_plain() -> None:
        with plain.open("wb", buffering=0) as file:
            at, view = 0, flat.view(np.uint8).data
            while at < size:
                at += file.write(view[at : at + (64 << 20)])
            os.fsync(file.fileno())

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as file:
            for array in tree.values():
                at, view = 0, array.local.reshape(-1).view(np.uint8).data
                while at < len(view):
                    at += file.readinto(view[at:]) or 0

    def remove() -> None:
        plain.unlink(missing_ok=True)
        _removed(mesh, saved)()

    ways: dict[str, Callable[[], object]] = {
        "plain files": write_plain,
        "mm.save": lambda: mm.save(saved, tree, mesh=mesh),
    }
    what = f"save {size_text(total)}"
    between: Any = _Between(comm, remove)
    rows = make_rows(what, in_turns(between, ways, calls=1, rounds=rounds))
    write_plain()
    mm.save(saved, tree, mesh=mesh)
    ways = {
        "plain files": read_plain,
        "mm.load": lambda: mm.load(saved, tree),
        "mm.load, not verified": lambda: mm.load(saved, tree, verify="none"),
        "mm.load, verified first": lambda: mm.load(saved, tree, verify="before"),
    }
    rows += make_rows(f"load {size_text(total)}", in_turns(comm, ways, calls=1, rounds=rounds))
    handles: list[Any] = []

    copies = [array.local.copy() for array in tree.values()]

    def copy() -> None:
        for held, array in zip(copies, tree.values(), strict=True):
            np.copyto(held, array.local)

    def start() -> None:
        handles.append(mm.save(saved, tree, wait=False))

    ways = {"a copy": copy, "mm.save": start}
    between = _Between(comm, lambda: _resolve(handles))
    timings = in_turns(between, ways, calls=1, rounds=rounds)
    _resolve(handles)
    return rows + make_rows(f"delay by wait=False, {size_text(total)}", timings)


class _Between:
    """A communicator that does something before each barrier, outside of the time.

    Args:
        comm: The communicator.
        action: What is done, on each rank.
    """

    def __init__(self, comm: Any, action: Callable[[], None]) -> None:
        self._comm = comm
        self._action = action

    def Barrier(self) -> None:
        self._action()
        self._comm.Barrier()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _removed(mesh: mm.DeviceMesh, *folders: Path) -> Callable[[], None]:
    """Return what removes folders, so that each way begins without."""

    def remove() -> None:
        for folder in folders if mesh.rank == 0 else ():
            shutil.rmtree(folder, ignore_errors=True)

    return remove


def _resolve(handles: list[Any]) -> None:
    while handles:
        handles.pop().resolve()


def _beside_torch(
    mesh: mm.DeviceMesh, comm: Any, folder: Path, total: int, rounds: int, torch: Any
) -> list[dict[str, Any]]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    tree = make_tree(mesh, total)
    ranks = init_device_mesh("cpu", (mesh.size,))
    tensors = {
        name: DTensor.from_local(torch.from_numpy(array.local.copy()), ranks, [Shard(0)])
        for name, array in tree.items()
    }
    ours, theirs = folder / "ours", folder / "theirs"

    def save_theirs(sync: bool) -> Callable[[], None]:
        return lambda: dcp.save(
            tensors, storage_writer=dcp.FileSystemWriter(theirs, sync_files=sync)
        )

    ways: dict[str, Callable[[], object]] = {
        "torch.distributed.checkpoint": save_theirs(True),
        "torch, not on the disk yet": save_theirs(False),
        "mm.save": lambda: mm.save(ours, tree, mesh=mesh),
    }
    between: Any = _Between(comm, _removed(mesh, ours, theirs))
    rows = make_rows(f"save {size_text(total)}", in_turns(between, ways, calls=1, rounds=rounds))
    save_theirs(True)()
    mm.save(ours, tree, mesh=mesh)
    ways = {
        "torch.distributed.checkpoint": lambda: dcp.load(
            tensors, storage_reader=dcp.FileSystemReader(theirs)
        ),
        "mm.load": lambda: mm.load(ours, tree),
    }
    return rows + make_rows(
        f"load {size_text(total)}", in_turns(comm, ways, calls=1, rounds=rounds)
    )
