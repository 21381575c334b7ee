"""Arrays in files, written and read by the ranks of MPI; full disks, and memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpimesh as mm
from mpimesh.errors import StoreError
from mpimesh.store import arrays, open_array, save_array
from tests.helpers.array_files import ENDS, options, plain_read
from tests.helpers.depth import deep
from tests.helpers.dtensor_oracle import split
from tests.helpers.raises import raises

RANKS = MPI.COMM_WORLD.size


@pytest.fixture
def folder(comm):
    """One folder for all ranks."""
    name = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    yield Path(name)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(name)


@pytest.mark.parametrize("small", [False, *deep(True)])
@pytest.mark.parametrize("kind", ENDS)
def test_any_layout_is_saved_and_read_in_any_other(kind, small, folder, monkeypatch):
    if small:
        monkeypatch.setattr(arrays, "SLAB_BYTES", 256)
        monkeypatch.setattr(arrays, "_FREE_BYTES", 0)
    x = np.arange(9 * 7 * 4.0).reshape(9, 7, 4)
    path = folder / ENDS[kind]
    chunks = None if kind == "npy" else (4, 2, 3)
    layouts = ["S0", "S2", "R", "P"]
    with mm.DeviceMesh("a=-1") as mesh:
        for number, source in enumerate(layouts):
            save_array(path, split(x, mesh, [source]), chunks=chunks, **options(kind))
            assert np.array_equal(plain_read(kind, path), x)
            mesh.barrier()
            with open_array(path, mesh, mode="r+", **options(kind)) as a:
                assert np.array_equal(a.read(layouts[number - 1]).full(), x)
                assert np.array_equal(a.read("S1", index=np.s_[2:8, ::-2]).full(), x[2:8, ::-2])
                mesh.barrier()
                a.write(split(-x[1:5, :, 2], mesh, ["S1"]), index=np.s_[1:5, :, 2])
                expected = x.copy()
                expected[1:5, :, 2] *= -1
                assert np.array_equal(a[...], expected)
            mesh.barrier()
    assert [one.name for one in folder.iterdir()] == [path.name]


@pytest.mark.nprocs(4)
@pytest.mark.parametrize("layout", ["S0", "S1", "P"])
@pytest.mark.parametrize("kind", ENDS)
def test_no_rank_ever_has_the_whole(kind, layout, folder, monkeypatch):
    """Beside its block a rank takes less than half of the array, also where blocks move.

    By messages: what it reads of another's memory counts as its own, too.
    """
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "never")
    rows = 8192
    path = folder / ENDS[kind]
    chunks = None if kind == "npy" else (256, 256)
    most = (rows * 1024 * 8 // 2) if layout != "P" else 40 << 20
    with mm.DeviceMesh("a=-1") as mesh:
        if layout == "P":
            rows //= 4  # every rank has a summand of that size: the array is smaller
        x = mm.ones((rows, 1024), mesh, layout)
        small = mm.ones((64, 64), mesh, layout)  # what is imported and made ready with the first
        save_array(path, small, chunks=chunks and (16, 16), **options(kind))
        before = peak_bytes(reset=True)
        save_array(path, x, chunks=chunks, **options(kind))
        took = peak_bytes() - before
        assert took < most, (took >> 20, most >> 20)
        with open_array(path, mesh, **options(kind)) as a:
            before = peak_bytes(reset=True)
            y = a.read("S0" if layout == "S1" else "S1")
            took = peak_bytes() - before
            assert took < most, (took >> 20, most >> 20, "read")
            assert (y.local == 1).all()


def peak_bytes(*, reset=False):
    """The most memory that this process has had since the last reset."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the system does not tell the peak of memory anew")
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM")]
    return int(peak.split()[1]) << 10


@pytest.mark.parametrize("kind", ENDS)
def test_a_full_disk_leaves_the_file_before(kind, comm, folder):
    disk = folder / "disk"
    mounted = 0
    if comm.rank == 0 and os.geteuid() == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
        mounted = not subprocess.run(command, capture_output=True).returncode
    if not comm.bcast(mounted):
        pytest.skip("needs a small disk, which only root may mount")
    path = disk / ENDS[kind]
    old = np.arange(1000.0)
    chunks = None if kind == "npy" else (9000,)
    new = np.random.default_rng(0).normal(size=300_000)  # nothing to compress
    try:
        with mm.DeviceMesh("a=-1") as mesh:
            save_array(path, old, mesh=mesh, **options(kind))
            for extents in (None, chunks):
                with raises(StoreError, path) as caught:
                    x = mm.distribute(new, mesh, "S0")
                    save_array(path, x, chunks=extents, **options(kind))
                assert caught.value.agreed
                assert np.array_equal(plain_read(kind, path), old)
                mesh.barrier()
                assert [one.name for one in disk.iterdir()] == [path.name]
            save_array(path, -old, mesh=mesh, **options(kind))
            assert np.array_equal(plain_read(kind, path), -old)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            subprocess.run(["umount", str(disk)], check=True)
