"""A rank that is killed while arrays are saved leaves the file before, whole."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import zarr

from mpimesh import save_array

PROGRAM = """
import os, signal, sys
import numpy as np
import mpimesh as mm
from mpimesh.store import arrays, save_array

path, dataset = sys.argv[1], "x" if sys.argv[1].endswith("h5") else None
with mm.DeviceMesh("a=-1") as mesh:
    x = mm.arange(60000, mesh=mesh, placements="S0", dtype=float)
    save_array(path, x, dataset=dataset)
    plain = arrays.view

    def die(*arguments):
        if mesh.rank == mesh.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)

    arrays.view = die
    save_array(path, -x, dataset=dataset)
"""


@pytest.mark.parametrize("name", ["x.npy", "x.zarr", "x.h5"])
def test_a_killed_rank_leaves_the_file_before(name, launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = launch(2, [str(program), str(tmp_path / name)])
    assert result.returncode != 0
    path = tmp_path / name
    if name == "x.npy":
        found = np.load(path)
    elif name == "x.zarr":
        found = np.asarray(zarr.open_array(path, mode="r")[...])
    else:
        with h5py.File(path, "r") as file:
            found = np.asarray(file["x"][...])
    assert np.array_equal(found, np.arange(60000.0))
    others = [one.name for one in tmp_path.iterdir() if one.name.startswith(f".{name}")]
    assert all(one.endswith(".part") for one in others)
    assert others  # what it had written lies beside, hidden, until the next save
    save_array(path, np.arange(3.0), dataset="x" if name == "x.h5" else None)
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]
