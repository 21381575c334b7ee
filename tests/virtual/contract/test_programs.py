"""Random programs on virtual ranks against NumPy in one process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from tests.contract.meshes import groups_of
from tests.contract.programs import programs, run
from tests.helpers.depth import examples


def main(program, seed):
    with groups_of(None, many=True) as groups:
        run(groups, program, seed + groups[0].world_rank)


@pytest.mark.parametrize("checks", ["0", "1"])
@given(
    size=st.integers(1, 5),
    program=programs,
    seed=st.integers(0, 99),
    rendezvous=st.booleans(),
)
@settings(max_examples=examples(60))
def test_random_programs(checks, size, program, seed, rendezvous):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIMESH_CHECKS", checks)
        mm.run_virtual(size, main, program, seed, rendezvous=rendezvous)
