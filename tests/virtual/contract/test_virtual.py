"""The contract on virtual ranks: sends that are buffered, and sends that wait for receives."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.mismatches import swapped_calls_on_lines_of_their_own
from tests.contract.suite import CHECKS, cases, cases_of_checks
from tests.helpers.depth import deep, deep_but

MODES = {
    "buffered": ({"MPIMESH_CHECKS": "1"}, False),
    "rendezvous": ({"MPIMESH_CHECKS": "1"}, True),
    "unchecked": ({"MPIMESH_CHECKS": "0"}, True),
}


def run(name, size, mode, monkeypatch):
    environment, rendezvous = MODES[mode]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    mm.run_virtual(size, CHECKS[name], None, rendezvous=rendezvous)


@pytest.mark.parametrize("size", [*deep(2), 3, *deep(1, 4)])
@pytest.mark.parametrize(("name", "mode"), cases("unchecked", checked=False))
def test_contract(name, size, mode, monkeypatch):
    run(name, size, mode, monkeypatch)


@pytest.mark.parametrize("size", [3, *deep(1, 2, 4)])
@pytest.mark.parametrize(
    ("name", "mode"), deep_but(cases("rendezvous"), *cases_of_checks("rendezvous"))
)
def test_checked(name, size, mode, monkeypatch):
    run(name, size, mode, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize(("name", "mode"), cases("buffered"))
def test_buffered(name, size, mode, monkeypatch):
    run(name, size, mode, monkeypatch)


def test_lines_are_compared_at_level_two(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
    for size in (1, 2, 3):
        mm.run_virtual(size, swapped_calls_on_lines_of_their_own, None)


def test_at_level_two_the_line_of_a_call_does_not_depend_on_who_waits(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            group, x = mesh.group("dp"), np.ones(3)
            for _ in range(20):
                first, second = group.all_reduce(x), group.all_reduce(2 * x)
                if mesh.rank:
                    first.resolve()
                second.resolve()
                assert (second.resolve() == 2 * first.resolve()).all()

    mm.run_virtual(3, main)
