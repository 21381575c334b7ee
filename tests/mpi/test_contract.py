"""The contract under MPI: checked, unchecked, in pieces, in memory that ranks share."""

from __future__ import annotations

import pytest

from tests.contract.mismatches import swapped_calls_on_lines_of_their_own
from tests.contract.shared_memory import nodes_of, pieces_of
from tests.contract.suite import CHECKS, cases, cases_of_checks
from tests.helpers.depth import deep_but

MODES = {
    "checked": {"MPIMESH_CHECKS": "1"},
    "unchecked": {"MPIMESH_CHECKS": "0"},
    "chunks of 7": {"MPIMESH_CHECKS": "0"},
    "shared": {"MPIMESH_CHECKS": "0", "MPIMESH_NODE_SHARED": "always"},
    "two levels": {"MPIMESH_CHECKS": "0", "MPIMESH_NODE_SHARED": "always"},
}

MOVING = (
    "reductions: all reduce of every dtype and op",
    "reductions: reductions of scalars and empty arrays",
    "reductions: reductions in place",
    "movements: uneven all to all",
    "movements: movements into every output",
    "persistent: every movement can be planned",
    "persistent: a halo is exchanged again and again",
    "algorithms: all ranks have the same bits",
)
"""What a quick run has of the modes that change how bytes are moved: each kind of operation."""


UNCHECKED = cases("unchecked", checked=False)
# What is refused, named or closed is the same code on virtual ranks.
OF_MPI = ("reductions", "movements:", "messages", "persistent", "algorithms", "handles", "barriers")
QUICK = [case for case in UNCHECKED if case[0].startswith(OF_MPI)]


def moving(mode):
    return [(name, mode) for name in MOVING]


def collectives(mode):
    return [
        case
        for case in cases(data_modes=(mode,), checked=False)
        if not case[0].startswith("messages: ")
    ]


def run(name, mode, comm, monkeypatch):
    for variable, value in MODES[mode].items():
        monkeypatch.setenv(variable, value)
    CHECKS[name](comm)


@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize(("name", "mode"), deep_but(cases("checked"), *cases_of_checks("checked")))
def test_checked(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


@pytest.mark.parametrize(("name", "mode"), deep_but(UNCHECKED, *QUICK))
def test_unchecked(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("name", "mode"),
    deep_but(cases(data_modes=("chunks of 7",), checked=False), *moving("chunks of 7")),
)
def test_other_modes(name, mode, comm, monkeypatch):
    with pieces_of(7):
        run(name, mode, comm, monkeypatch)


# Messages between two ranks are the same in these.
@pytest.mark.nprocs(2, 4, 8)
@pytest.mark.parametrize(("name", "mode"), deep_but(collectives("shared"), *moving("shared")))
def test_shared(name, mode, comm, monkeypatch):
    with pieces_of(7):
        run(name, mode, comm, monkeypatch)


@pytest.mark.nprocs(3)
@pytest.mark.parametrize(("name", "mode"), collectives("two levels"))
def test_two_levels(name, mode, comm, monkeypatch):
    with nodes_of(2):
        run(name, mode, comm, monkeypatch)


def test_lines_are_compared_at_level_two(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
    swapped_calls_on_lines_of_their_own(comm)
