"""Messages of a node by themselves: random programs of threads and processes, in C; see mail.c.

Each program sends up to 400 messages of three tags between all pairs of ranks, also to oneself, and
receives them in another order: small ones, large ones that are read in place, by calls into the
other process or in pieces; into rooms that are too small, or named only when the message is there.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers.depth import deep

OF_THREADS = (), ("pieces",), ("rendezvous",)
OF_PROCESSES = (), ("pieces",)


@pytest.fixture(scope="module")
def mail(compiled):
    path = compiled("mail.c")

    def run(*arguments, env=None):
        command = [str(path), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, env=env
        )

    return run


@pytest.mark.parametrize("env", [None, {"SLEEPY": "1"}])
@pytest.mark.parametrize("ranks", [2, 3, *deep(1, 5, 8)])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_random_messages(mail, kind, ranks, env):
    for seed, options in enumerate(OF_THREADS if kind == "threads" else OF_PROCESSES):
        done = mail(kind, ranks, seed + 1, 5, *options, env=env)
        assert (done.returncode, done.stdout) == (0, "ok\n"), (options, done.stderr)


@pytest.mark.parametrize("ranks", [2, *deep(3, 5)])
def test_who_waits_for_a_killed_rank_learns_it(mail, ranks):
    lost = 0
    for seed in range(6):
        done = mail("procs", ranks, seed, 2000, "kill")
        assert done.returncode == 0, (seed, done.stdout, done.stderr)
        lost += int(done.stdout.split()[2])
    assert lost, "no rank was lost to another"


@pytest.mark.deep
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(compiled, sanitizer):
    # Of thread's the compiler says that it does not know of fences; they only order more.
    quiet = ["-Wno-tsan"] if sanitizer == "thread" else []
    path = compiled("mail.c", f"-fsanitize={sanitizer}", "-g", "-O1", *quiet)
    for kind in ["threads", *(["procs"] if sanitizer != "thread" else [])]:
        for options in OF_THREADS if kind == "threads" else OF_PROCESSES:
            command = ["setarch", "-R", str(path), kind, "3", "1", "3", *options]
            env = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=100, check=False, env=env
            )
            if "setarch" in done.stderr:
                pytest.skip(f"setarch is not allowed here: {done.stderr}")
            assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
