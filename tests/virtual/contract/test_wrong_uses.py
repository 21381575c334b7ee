"""Random wrong uses on virtual ranks: all that can know it are told, and nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, ShapeError
from tests.contract.wrong_uses import case_of, in_a_mesh, is_skipped, wrong
from tests.helpers.depth import deep, examples


@pytest.mark.scaled
@pytest.mark.parametrize("size", [2, 3, *deep(5)])
@pytest.mark.parametrize("checks", ["0", "1"])
def test_random_wrong_uses(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    is_checked = checks == "1"
    for number in range(examples(100)):
        case = case_of(number, size)
        if not is_skipped(case, checks=is_checked):
            outcomes = mm.run_virtual(size, in_a_mesh, None, case)
            assert wrong(case, outcomes, checks=is_checked) is None, case


@pytest.mark.parametrize(
    ("x", "kind"), [(np.full(4, None), DTypeError), ([[1], [2, 3]], ShapeError)]
)
def test_all_ranks_hear_of_what_a_root_cannot_scatter(x, kind):
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group = mesh.group()
            for out in (None, np.empty(2)):
                with pytest.raises(kind):
                    group.scatter(x if mesh.rank == 0 else None, out=out).resolve()
            assert group.all_reduce(np.ones(1)).resolve() == [2]

    mm.run_virtual(2, main)
