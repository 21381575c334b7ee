"""What `import mpimesh` loads, and that all its names are there when they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mpimesh as mm
from mpimesh import layout, runtime, trace


def test_importing_mpimesh_loads_little():
    code = "import mpimesh, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"cupy", "mpi4py.MPI", "numpy", "rich", "torch", "typer"} & set(loaded)
    assert len([name for name in loaded if name.startswith("mpimesh.")]) <= 10


def test_the_first_mesh_loads_little():
    code = "import numpy, sys, json; from mpi4py import MPI; before = set(sys.modules); "
    code += "import mpimesh as mm; mm.DeviceMesh('a=1').close(); "
    code += "print(json.dumps(sorted({*sys.modules} - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    heavy = {"hashlib", "logging", "pathlib", "secrets", "shutil", "socket", "subprocess"}
    assert not (heavy | {"numpy.typing"}) & loaded
    assert not {f"mpimesh.{name}" for name in ("dtensor", "layout.layout", "trace.svg")} & loaded


@pytest.mark.parametrize("package", [mm, runtime, layout, trace])
def test_every_name_is_there(package):
    assert package.__all__ == dir(package)
    for name in package.__all__:
        assert getattr(package, name) is not None, name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="DevceMesh"):
        getattr(mm, "DevceMesh")  # noqa: B009
    with pytest.raises(ImportError, match="DevceMesh"):
        exec("from mpimesh import DevceMesh")
