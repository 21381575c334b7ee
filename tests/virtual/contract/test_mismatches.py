"""Every kind of mismatch of the catalogue on virtual ranks."""

from __future__ import annotations

import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError
from tests.contract.mismatch_cases import COLLECTIVES, differences, plannings
from tests.contract.mismatch_catalogue import CASES, outcome_of, run_case
from tests.contract.mismatches import swapped_calls_through_one_helper
from tests.helpers.depth import deep, deep_but

SILENT = {"split: a block that the user writes", "model: lr of the last step"}


def found(case, size):
    try:
        mm.run_virtual(size, run_case, case, rendezvous=case.rendezvous)
    except Exception as error:
        return error
    return None


def test_two_kinds_stay_silent():
    assert len(CASES) > 200  # as docs/explanation/promises.md says
    assert len(SILENT) == 2
    assert {case.name for case in CASES.values() if case.found == "silent"} == SILENT


@pytest.mark.parametrize("more", [0, *deep(1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_mismatch(name, more, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    case = CASES[name]
    error = found(case, case.ranks + more)
    outcome = outcome_of(error)
    if case.found == "any":
        assert outcome in ("mismatch", "deadlock", "error"), error
    else:
        assert outcome == case.found, error
    assert case.said in str(error)


def start_unlike(odd, rest, odd_plans, rest_plans):
    with mm.DeviceMesh("dp=-1") as mesh:
        group = mesh.group()
        is_odd = mesh.rank == mesh.size - 1
        (odd(group, odd_plans) if is_odd else rest(group, rest_plans)).resolve()


@pytest.mark.parametrize("name", deep_but(COLLECTIVES, "all_reduce", "shift"))
def test_each_collective_plain_and_planned_without_checks(name, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    for what, (odd, rest) in differences(name).items():
        for plans in plannings(name, what):
            with pytest.raises(MismatchError):
                mm.run_virtual(3, start_unlike, odd, rest, *plans)


RIGHT = [
    name
    for name in CASES
    if name.split(":")[0] not in ("group", "message", "wait")
    and name != "model: rows of each rank's own"
]
"""Programs that are right where no rank is odd; the others leave something open, or wait."""


@pytest.mark.parametrize("checks", ["1", *deep("0")])
@pytest.mark.parametrize("name", RIGHT)
def test_no_alarm_where_no_rank_is_odd(name, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def program():
        with mm.DeviceMesh("dp=-1") as mesh:
            CASES[name].body(mesh, False)

    mm.run_virtual(CASES[name].ranks, program)


def test_a_deadlock_is_shown_as_a_circle(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    text = str(found(CASES["wait: three groups in a ring"], 3))
    for rank, other, group in ((0, 1, "ab"), (1, 2, "bc"), (2, 0, "ca")):
        row = next(line for line in text.splitlines() if f"rank {rank} waits for" in line)
        assert f"waits for rank {other}" in row
        assert repr(group) in row


@pytest.mark.parametrize("size", [2, *deep(3)])
def test_stacks_are_compared_at_level_two(size, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
    mm.run_virtual(size, swapped_calls_through_one_helper, None)
