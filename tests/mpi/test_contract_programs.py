"""Random programs under MPI against NumPy in one process."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.contract.meshes import groups_of
from tests.contract.programs import programs, run
from tests.helpers.depth import deep, examples


@pytest.mark.scaled
@pytest.mark.parametrize("chunk", ["0", *deep("7")])
@pytest.mark.parametrize("checks", ["0", "1"])
def test_random_programs(comm, chunk, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    monkeypatch.setenv("MPIMESH_CHUNK_ELEMENTS", chunk)
    with groups_of(comm, many=True) as groups:

        @given(program=programs, seed=st.integers(0, 99))
        @settings(
            max_examples=examples(12 if comm.size > 4 else 25),
            suppress_health_check=list(HealthCheck),
        )
        def on_all_ranks(program, seed):
            problem = None
            try:
                run(groups, program, seed + comm.rank)
            except AssertionError as error:
                problem = error
            # Hypothesis must see the same outcome on all ranks, or they draw different examples.
            problems = [text for text in comm.allgather(problem and str(problem)) if text]
            assert not problems, problems[0]

        on_all_ranks()
