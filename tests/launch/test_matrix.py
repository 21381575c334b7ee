"""A sample of the fault matrix under mpiexec: each kind of end, and all faults in a deep run."""

from __future__ import annotations

import pytest

from tests.helpers.depth import deep
from tests.launch.matrix import run, sample

QUICK = {"raise", "os._exit", "SIGSTOP", "raise in backward"}
"""An error, an end without a word, none at all, and an error within a training step."""
CASES = [case if case.fault in QUICK else deep(case)[0] for case in sample("mpiexec", 0)]


@pytest.mark.parametrize("case", [*CASES, *deep(*sample("mpiexec", 3))], ids=str)
def test_the_job_ends_and_tells_the_cause(case, tmp_path):
    outcome = run(case, tmp_path)
    assert not outcome.problems, f"{outcome.problems}\n{outcome.output}"
