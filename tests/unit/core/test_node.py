"""The window of a node's ranks by itself: random programs of threads and processes, in C.

Each program starts up to 40 operations of all kinds at a time, on four overlapping windows, of
ordinary, shared and foreign memory, and resolves them in an order of its own on each rank; values
are compared with closed formulas: see driver.c.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers.depth import deep


@pytest.fixture(scope="module")
def driver(compiled):
    path = compiled("driver.c")

    def run(*arguments, env=None):
        command = [str(path), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, env=env
        )

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3, *deep(4, 6, 9)])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_random_programs(driver, kind, ranks):
    for seed in range(5):
        done = driver(kind, ranks, seed, 10, *(["late"] if seed % 2 else []))
        assert (done.returncode, done.stdout) == (0, "ok\n"), (seed, done.stderr)


@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_waits_that_sleep_at_once(driver, kind):
    for seed in range(5):
        done = driver(kind, 3, seed, 5, "late", env={"SLEEPY": "1"})
        assert (done.returncode, done.stdout) == (0, "ok\n"), (seed, done.stderr)


def test_ranks_that_are_stopped_for_a_while(driver):
    for seed in range(5):
        done = driver("procs", 3, seed, 10, "stop")
        assert (done.returncode, done.stdout) == (0, "ok\n"), (seed, done.stderr)


@pytest.mark.parametrize("ranks", [2, 3, *deep(5)])
def test_who_needs_a_killed_rank_learns_it(driver, ranks):
    lost = 0
    for seed in range(8):
        done = driver("procs", ranks, seed, 2000, "kill")
        assert done.returncode == 0, (seed, done.stdout, done.stderr)
        lost += int(done.stdout.split()[2])
    assert lost, "no rank was lost to another"


def test_a_mismatch_is_seen_by_every_rank(driver):
    for kind in ("threads", "procs"):
        done = driver(kind, 3, 1, 1, "mismatch")
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("env", [None, {"SLEEPY": "1"}])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_two_threads_of_each_rank(driver, kind, env):
    for seed in range(4):
        done = driver(kind, 2, seed, 5, "pairs", *(["late"] if seed % 2 else []), env=env)
        assert (done.returncode, done.stdout) == (0, "ok\n"), (seed, done.stderr)


@pytest.mark.parametrize("program", ["bells", "texts"])
def test_no_bell_is_lost_and_no_text_torn(driver, program):
    for kind in ("threads", "procs"):
        done = driver(kind, 2, 1, 1, program)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(compiled, sanitizer):
    # Of thread's the compiler says that it does not know of fences; they only order more.
    quiet = ["-Wno-tsan"] if sanitizer == "thread" else []
    path = compiled("driver.c", f"-fsanitize={sanitizer}", "-g", "-O1", *quiet)
    for kind in ["threads", *(["procs"] if sanitizer != "thread" else [])]:
        for arguments in (
            ["3", "1", "2", "late"],
            ["2", "1", "2", "pairs"],
            ["2", "1", "1", "texts"],
        ):
            command = ["setarch", "-R", str(path), kind, *arguments]
            env = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=100, check=False, env=env
            )
            if "setarch" in done.stderr:
                pytest.skip(f"setarch is not allowed here: {done.stderr}")
            assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
