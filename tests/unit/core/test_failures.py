"""What ranks are told when another one has left, and when their memory is theirs again."""

from __future__ import annotations

import subprocess

import pytest


@pytest.mark.parametrize(
    "case", ["pending", "told", "in_place", "both", "probed", "no_memory", "answered"]
)
def test_who_needs_a_rank_that_has_left_learns_it(compiled, case):
    command = [str(compiled("failures.c")), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
