"""A sample of the fault matrix under mpiexec: a case of each fault, and more in a deep run."""

from __future__ import annotations

import pytest

from tests.helpers.depth import deep
from tests.launch.matrix import run, sample


@pytest.mark.parametrize("case", [*sample("mpiexec", 0), *deep(*sample("mpiexec", 3))], ids=str)
def test_the_job_ends_and_tells_the_cause(case, tmp_path):
    outcome = run(case, tmp_path)
    assert not outcome.problems, f"{outcome.problems}\n{outcome.output}"
