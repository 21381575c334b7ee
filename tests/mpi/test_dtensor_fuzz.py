"""A sample of the rules of split arrays with random arguments under MPI, held against NumPy."""

from __future__ import annotations

import pytest

import mpimesh as mm
from tests.helpers import warned
from tests.helpers.depth import examples
from tests.helpers.rule_cases import draw_cases
from tests.helpers.rule_fuzz import REFUSED, expected_of, problem_on


@pytest.mark.nprocs(2, 3)
@pytest.mark.limit(120)
@pytest.mark.parametrize("checks", ["0", "1"])
def test_every_rule_is_as_numpy_has_it(comm, checks, monkeypatch):
    """A rank that hangs shows the case: it is the file name of the line that it stands in."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    dims = f"a={comm.size}"
    found = []
    with warned.ignored, mm.DeviceMesh(dims, comm) as mesh:
        cases = draw_cases(100 + int(checks), examples(400), dims)
        for case in cases:
            text = problem_on(mesh, case, expected_of(case))
            if text and not text.startswith(REFUSED):
                found.append(f"{case}  # {text}")
    assert not found, "\n".join(found)
