"""Random programs under MPI against NumPy in one process."""

from __future__ import annotations

import pytest

from mpimesh.runtime.world import current_world
from tests.contract.programs import opened, program_of, run, unlike
from tests.contract.shared_memory import node_of
from tests.helpers.depth import deep_but, examples

MODES = {
    "auto": {},
    "messages": {"MPIMESH_NODE_SHARED": "never"},
    "shared": {"MPIMESH_NODE_SHARED": "always"},
    "checked": {"MPIMESH_NODE_SHARED": "always", "MPIMESH_CHECKS": "1"},
    "pieces of 7": {"MPIMESH_CHUNK_ELEMENTS": "7"},
    "shared, a small stage": {"MPIMESH_NODE_SHARED": "always", "MPIMESH_CHUNK_ELEMENTS": "7"},
    "two levels": {"MPIMESH_NODE_SHARED": "always", "MPIMESH_NODE_RANKS": "2"},
}


@pytest.mark.scaled
@pytest.mark.parametrize("mode", deep_but(MODES, "auto", "shared", "checked"))
def test_random_programs(comm, mode, monkeypatch):
    for variable, value in MODES[mode].items():
        monkeypatch.setenv(variable, value)
    if mode == "two levels":
        # Which ranks are a node is found out with the first mesh of a process.
        monkeypatch.setattr(current_world(), "node", node_of(comm.rank // 2))
    most_bytes = 2 << 10 if "MPIMESH_CHUNK_ELEMENTS" in MODES[mode] else 1 << 20
    count = examples(20 if comm.size > 4 else 60)
    first = 100_000 * [*MODES].index(mode)
    with opened(comm) as (mesh, groups):
        for number in range(first, first + count):
            found = comm.allgather(run(mesh, groups, program_of(number, most_bytes)))
            problems = [text for texts, _ in found for text in texts]
            problems += unlike([digests for _, digests in found])
            assert not problems, problems[0]
