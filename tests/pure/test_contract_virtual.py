"""The contract on virtual ranks: sends that are buffered, and sends that wait for receives."""

from __future__ import annotations

import pytest

import mpimesh as mm
from tests.contract.mismatches import swapped_calls_on_lines_of_their_own
from tests.contract.suite import CHECKS, cases, runs

MODES = {
    "buffered": ({"MPIMESH_CHECKS": "1"}, False),
    "rendezvous": ({"MPIMESH_CHECKS": "1"}, True),
    "unchecked": ({"MPIMESH_CHECKS": "0"}, True),
}


def run(name, size, mode, monkeypatch):
    environment, rendezvous = MODES[mode]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    if runs(name, checked=environment["MPIMESH_CHECKS"] == "1"):
        mm.run_virtual(size, CHECKS[name], None, rendezvous=rendezvous)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "mode"), cases("rendezvous"))
def test_contract(name, size, mode, monkeypatch):
    run(name, size, mode, monkeypatch)


@pytest.mark.parametrize(("name", "mode"), cases("buffered", "unchecked"))
def test_other_modes_on_three_ranks(name, mode, monkeypatch):
    run(name, 3, mode, monkeypatch)


@pytest.mark.parametrize(("name", "mode"), cases("buffered"))
def test_contract_on_eight_ranks(name, mode, monkeypatch):
    run(name, 8, mode, monkeypatch)


def test_lines_are_compared_at_level_two(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
    for size in (1, 2, 3):
        mm.run_virtual(size, swapped_calls_on_lines_of_their_own, None)
