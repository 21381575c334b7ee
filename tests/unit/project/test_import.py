"""What `import mpimesh` loads, and that all its names are there when they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mpimesh as mm
from mpimesh import runtime


def test_importing_mpimesh_loads_little():
    code = "import mpimesh, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"cupy", "mpi4py.MPI", "numpy", "rich", "torch", "typer"} & set(loaded)
    assert len([name for name in loaded if name.startswith("mpimesh.")]) <= 10


@pytest.mark.parametrize("package", [mm, runtime])
def test_every_name_is_there(package):
    assert package.__all__ == dir(package)
    for name in package.__all__:
        assert getattr(package, name) is not None, name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="DevceMesh"):
        getattr(mm, "DevceMesh")  # noqa: B009
    with pytest.raises(ImportError, match="DevceMesh"):
        exec("from mpimesh import DevceMesh")
