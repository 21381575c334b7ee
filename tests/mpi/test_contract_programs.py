"""Random programs under MPI against NumPy in one process."""

from __future__ import annotations

import pytest

from tests.contract.programs import opened, program_of, run, unlike
from tests.contract.shared_memory import nodes_of, pieces_of
from tests.helpers.depth import deep_but, examples

MODES = {
    "auto": {},
    "messages": {"MPIMESH_NODE_SHARED": "never"},
    "shared": {"MPIMESH_NODE_SHARED": "always"},
    "checked": {"MPIMESH_NODE_SHARED": "always", "MPIMESH_CHECKS": "1"},
    "pieces of 7": {},
    "shared, pieces of 7": {"MPIMESH_NODE_SHARED": "always"},
    "two levels": {"MPIMESH_NODE_SHARED": "always"},
}


@pytest.mark.scaled
@pytest.mark.parametrize("mode", deep_but(MODES, "auto", "shared", "checked"))
def test_random_programs(comm, mode, monkeypatch):
    for variable, value in MODES[mode].items():
        monkeypatch.setenv(variable, value)
    elements, ranks = 7 * ("pieces" in mode), 2 * (mode == "two levels")
    most_bytes = 2 << 10 if elements else 1 << 20
    count = examples(20 if comm.size > 4 else 60)
    first = 100_000 * [*MODES].index(mode)
    with pieces_of(elements), nodes_of(ranks), opened(comm) as (mesh, groups):
        for number in range(first, first + count):
            found = comm.allgather(run(mesh, groups, program_of(number, most_bytes)))
            problems = [text for texts, _ in found for text in texts]
            problems += unlike([digests for _, digests in found])
            assert not problems, problems[0]
