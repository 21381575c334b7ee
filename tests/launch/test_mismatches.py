"""The catalogue of mismatches under mpiexec: most in one job, those that part the ranks alone."""

from __future__ import annotations

import json

import pytest

from tests.contract.mismatch_catalogue import CASES
from tests.helpers.depth import deep_but

ALONE = [name for name, case in CASES.items() if case.leaves_ranks_apart]


def outcomes(launch, folder, nprocs, names, timeout_s):
    """Run cases, and return for each what came of it on every rank."""
    command = ["-m", "tests.contract.mismatch_catalogue", str(folder), *names]
    environment = {"MPIMESH_CHECKS": "1", "MPIMESH_TIMEOUT_S": "30"}
    result = launch(nprocs, command, env=environment, timeout_s=timeout_s)
    told = [folder / f"rank-{rank}.json" for rank in range(nprocs)]
    assert all(one.exists() for one in told), str(result)
    ranks = [json.loads(one.read_text()) for one in told]
    return {name: [rank.get(name) for rank in ranks] for name in names or ranks[0]}


def check(case, told):
    assert None not in told, case.name
    kinds = {kind for kind, _ in told}
    if case.found == "any":
        assert kinds <= {"mismatch", "deadlock", "error"}, told
    else:
        assert kinds == {case.found}, told
    assert any(case.said in text for _, text in told), told


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_mismatches_that_leave_the_ranks_together(launch, tmp_path):
    told = outcomes(launch, tmp_path, 4, [], timeout_s=300)
    for name, case in CASES.items():
        if not case.leaves_ranks_apart:
            check(case, told[name])


@pytest.mark.parametrize("name", deep_but(ALONE, "message: tag"))
def test_mismatches_that_part_the_ranks(launch, tmp_path, name):
    case = CASES[name]
    told = outcomes(launch, tmp_path, case.ranks, [name], timeout_s=60)
    check(case, told[name])
