"""The installed package: Python and type checkers find it from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, *arguments: str) -> str:
    """Run this Python in `folder`, with nothing but what is installed; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["above the clone", "above a clone called mpimesh", "empty"])
def test_the_package_is_found_from(folder, tmp_path):
    """A folder of its name, without code in it, would be a package, too, if nothing else were."""
    if folder == "above a clone called mpimesh":
        (tmp_path / "mpimesh").mkdir()
    there = ROOT.parent if folder == "above the clone" else tmp_path
    printed = run(there, "-c", "import mpimesh; print(mpimesh.DeviceMesh.__name__)")
    assert printed.split() == ["DeviceMesh"]


def test_a_type_checker_sees_the_package_from_an_empty_folder(tmp_path):
    (tmp_path / "user.py").write_text(
        "import mpimesh as mm\n\n"
        "reveal_type(mm.MeshTopology.mixed(tp=1, pp=1, dp=1))\nmm.Mesh(3.5)\n"
    )
    printed = run(tmp_path, "-m", "mypy", "user.py")
    assert "mpimesh.mesh.topology.MixedTopology" in printed
    assert "[arg-type]" in printed
    assert "Found 1 error" in printed
