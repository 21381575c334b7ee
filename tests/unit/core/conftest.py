"""Compiles C of this folder, with the headers of mpimesh/core."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FLAGS = ["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that compiles a file of this folder, with flags, and gives the result."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def compile_file(name, *flags):
        target = tmp_path_factory.mktemp("core") / Path(name).with_suffix(".out").name
        quiet = "-Wno-unused-function"  # each file takes what it needs of the headers
        options = [*FLAGS, quiet, f"-I{ROOT / 'mpimesh/core'}", *flags]
        command = [compiler, *options, str(HERE / name), "-o", str(target), "-lpthread", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return target

    return compile_file
