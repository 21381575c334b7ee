"""Arrays in files: saved and read in each format, against the same bytes in plain files.

The first way is each rank writing (reading) a plain file of its bytes, with fsync, under another
name first, as the file before stays until then: what the disk and the system can do. All ways end
with the bytes on the disk: else the next one would wait for them. The others are `mm.save_array`
and `open_array`, one rank that gathers and calls NumPy, and h5py and zarr in one process. Reading
finds the file in the system's cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import Effort, in_turns
from benchmarks.rows import make_rows, size_text
from mpimesh.store import open_array, save_array

__all__ = ["run"]

SIZE_BYTES = 256 << 20
_ROUNDS = 5
_COLUMNS = 4096


def run(mesh: mm.DeviceMesh, effort: Effort) -> list[dict[str, Any]]:
    """Return a row for each way. Collective."""
    import h5py
    import zarr

    comm: MPI.Intracomm = mesh.group().communicator.native
    nbytes = min(SIZE_BYTES, effort.most_bytes)
    rows = max(mesh.size, nbytes // (4 * _COLUMNS))
    folder = Path(comm.bcast(tempfile.mkdtemp(dir=Path.cwd()) if comm.rank == 0 else None))
    x = mm.Random(0).uniform((rows, _COLUMNS), mesh, "S0", dtype=np.float32)
    mine = folder / f"rank{comm.rank}.bin"

    def write_plain() -> None:
        fresh = mine.with_suffix(".part")
        with fresh.open("wb") as file:
            file.write(x.local.data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(mine)

    def read_plain() -> None:
        with mine.open("rb") as file:
            file.readinto(np.empty_like(x.local).data)

    def gather_and_save() -> None:
        whole = x.full(root=0)
        if whole is not None:
            with (folder / "plain.npy").open("wb") as file:
                np.save(file, whole)
                file.flush()
                os.fsync(file.fileno())

    def write_alone(name: str) -> None:
        whole = x.full(root=0)
        if whole is None:
            return
        if name == "h5py":
            with h5py.File(folder / "plain.h5", "w") as file:
                file["x"] = whole
            with (folder / "plain.h5").open("rb") as file:
                os.fsync(file.fileno())
        else:
            shutil.rmtree(folder / "plain.zarr", ignore_errors=True)
            array = zarr.create_array(
                folder / "plain.zarr",
                shape=whole.shape,
                dtype=whole.dtype,
                chunks=(max(1, rows // 16), _COLUMNS),
            )
            array[...] = whole
            os.sync()  # as there are many files

    def read_alone(name: str) -> None:
        if comm.rank == 0 and name == "NumPy":
            np.load(folder / "plain.npy")
        elif comm.rank == 0 and name == "h5py":
            with h5py.File(folder / "plain.h5", "r") as file:
                file["x"][...]
        elif comm.rank == 0:
            zarr.open_array(folder / "plain.zarr", mode="r")[...]

    def read(name: str, placements: str) -> None:
        with open_array(folder / name, mesh, dataset="x" if name.endswith("h5") else None) as a:
            a.read(placements)

    writes: dict[str, Callable[[], object]] = {
        "plain files": write_plain,
        "save_array, .npy": lambda: save_array(folder / "x.npy", x),
        "save_array, HDF5": lambda: save_array(folder / "x.h5", x, dataset="x"),
        "save_array, Zarr": lambda: save_array(folder / "x.zarr", x),
        "gathered, np.save": gather_and_save,
        "gathered, h5py": lambda: write_alone("h5py"),
        "gathered, zarr": lambda: write_alone("zarr"),
    }
    reads: dict[str, Callable[[], object]] = {
        "plain files": read_plain,
        "open_array, .npy, S0": lambda: read("x.npy", "S0"),
        "open_array, .npy, S1": lambda: read("x.npy", "S1"),
        "open_array, HDF5, S0": lambda: read("x.h5", "S0"),
        "open_array, Zarr, S0": lambda: read("x.zarr", "S0"),
        "np.load, one process": lambda: read_alone("NumPy"),
        "h5py, one process": lambda: read_alone("h5py"),
        "zarr, one process": lambda: read_alone("zarr"),
    }
    try:
        found = []
        for what, ways in (("save", writes), ("read", reads)):
            timings = in_turns(comm, ways, calls=1, rounds=min(_ROUNDS, effort.rounds))
            found += make_rows(f"{what} {size_text(x.nbytes)} of float32", timings)
        return found
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
