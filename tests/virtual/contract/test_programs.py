"""Random programs on virtual ranks against NumPy in one process."""

from __future__ import annotations

import pytest

import mpimesh as mm
from tests.contract.programs import opened, program_of, run, unlike
from tests.helpers.depth import deep, examples


def main(numbers):
    with opened(None) as (mesh, groups):
        return [run(mesh, groups, program_of(number)) for number in numbers]


@pytest.mark.scaled
@pytest.mark.parametrize("size", [1, 2, 3, *deep(4), 5])
@pytest.mark.parametrize("mode", ["buffered", "rendezvous", *deep("unchecked")])
def test_random_programs(size, mode, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0" if mode == "unchecked" else "1")
    first = 10_000 * size + 100_000 * len(mode)
    numbers = range(first, first + examples(60))
    found = mm.run_virtual(size, main, numbers, rendezvous=mode == "rendezvous")
    for of_ranks in zip(*found, strict=True):
        problems = [text for texts, _ in of_ranks for text in texts]
        problems += unlike([digests for _, digests in of_ranks])
        assert not problems, problems[0]
