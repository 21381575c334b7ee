"""The costs of `import mpimesh`, and what it does not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NO_MPI_ROOMS = ["errors", "settings", "trace", "mesh", "schedule", "arrays", "nn", "optim"]


def python(text: str) -> subprocess.CompletedProcess[str]:
    """Run `text` in a fresh interpreter that takes the library from this checkout."""
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "module", ["mpimesh", "mpimesh.interop", *(f"mpimesh.{room}" for room in NO_MPI_ROOMS)]
)
def test_importing_starts_no_mpi_and_looks_for_no_gpu(module):
    result = python(
        f"import sys, {module}\n"
        "late = {'mpi4py.MPI', 'cupy', 'ml_dtypes', 'rich', 'typer', 'pytest', 'torch', 'jax'}\n"
        "print(sorted(late & {*sys.modules}))"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"


def test_every_public_name_can_be_had():
    result = python(
        "import mpimesh\n"
        "missing = [name for name in mpimesh.__all__ if not hasattr(mpimesh, name)]\n"
        "print(missing, {*mpimesh.__all__} - {*dir(mpimesh)})"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[] set()\n"


def test_the_library_works_where_mpi4py_and_cupy_are_missing():
    """Meshes and schedules are for a laptop without MPI."""
    result = python(
        "import sys\n"
        "sys.modules['mpi4py'] = sys.modules['cupy'] = None  # an import of them now fails\n"
        "import mpimesh\n"
        "print(mpimesh.Mesh('dp=2,pp=2').size)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "4\n"


@pytest.mark.parametrize(("library", "packages"), [("torch", "torch ml_dtypes"), ("jax", "jax")])
def test_interop_says_how_to_get_what_is_missing(library, packages):
    result = python(
        "import sys\n"
        f"sys.modules[{library!r}] = None  # an import of it now fails\n"
        "from mpimesh.errors import MissingPackageError\n"
        f"try:\n    import mpimesh.interop.{library}\n"
        "except MissingPackageError as error:\n    print(error)"
    )
    assert result.returncode == 0, result.stderr
    assert f"not installed: pip install {packages}\n" in result.stdout


def test_an_unknown_name_is_an_attribute_error():
    result = python("import mpimesh; mpimesh.no_such_name")
    assert result.returncode == 1
    assert "AttributeError" in result.stderr
    assert "no_such_name" in result.stderr
