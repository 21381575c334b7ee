"""Compiles C of this folder, with the headers of mpimesh/core, and runs it."""

from __future__ import annotations

import os
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


class Driver:
    """A program of this folder: it prints "ok", or what is wrong; see `ranks.h`."""

    def __init__(self, *command):
        self.command = command

    def run(self, *arguments, env=None):
        command = [*map(str, self.command), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, env=env
        )

    def succeeds(self, *arguments, env=None):
        done = self.run(*arguments, env=env)
        assert (done.returncode, done.stdout) == (0, "ok\n"), (arguments, done.stderr)

    def loses_some(self, ranks, seeds):
        """Kill one of the processes: the others end, and some have missed it."""
        lost = 0
        for seed in range(seeds):
            done = self.run("procs", ranks, seed, 2000, "kill")
            assert done.returncode == 0, (seed, done.stdout, done.stderr)
            lost += int(done.stdout.split()[2])
        assert lost, "no rank was lost to another"


@pytest.fixture(scope="module")
def driver(compiled):
    """Return a function that compiles a driver and gives it."""
    return lambda name: Driver(compiled(name))


@pytest.fixture(params=["thread", "address,undefined"])
def sanitized(request, compiled):
    """Return a function that runs a driver under a sanitizer, which finds nothing."""

    def run(name, kind, *arguments):
        if (request.param, kind) == ("thread", "procs"):
            return
        # Of thread's the compiler says that it does not know of fences; they only order more.
        quiet = ["-Wno-tsan"] if request.param == "thread" else []
        if name not in paths:
            flags = f"-fsanitize={request.param}", "-g", "-O1", *quiet
            paths[name] = Driver("setarch", "-R", compiled(name, *flags))
        env = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
        done = paths[name].run(kind, *arguments, env=env)
        if "setarch" in done.stderr:
            pytest.skip(f"setarch is not allowed here: {done.stderr}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), arguments

    paths: dict[str, Driver] = {}
    return run
