"""The contract under MPI: checked, unchecked, in pieces, in memory that ranks share."""

from __future__ import annotations

import pytest

from mpimesh.runtime.world import current_world
from tests.contract.mismatches import swapped_calls_on_lines_of_their_own
from tests.contract.shared_memory import node_of
from tests.contract.suite import CHECKS, cases

MODES = {
    "checked": {"MPIMESH_CHECKS": "1"},
    "unchecked": {"MPIMESH_CHECKS": "0"},
    "chunks of 7": {"MPIMESH_CHECKS": "0", "MPIMESH_CHUNK_ELEMENTS": "7"},
    "shared": {
        "MPIMESH_CHECKS": "0",
        "MPIMESH_CHUNK_ELEMENTS": "7",  # which makes the stage as small as it can be
        "MPIMESH_NODE_SHARED": "always",
    },
    "two levels": {
        "MPIMESH_CHECKS": "0",
        "MPIMESH_NODE_SHARED": "always",
        "MPIMESH_NODE_RANKS": "2",
    },
}


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


@pytest.mark.thin(3)
@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize(("name", "mode"), cases("checked"))
def test_checked(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


@pytest.mark.parametrize(("name", "mode"), cases("unchecked", checked=False))
def test_unchecked(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


@pytest.mark.thin(3)
@pytest.mark.nprocs(1, 2, 3, 4)
@pytest.mark.parametrize(("name", "mode"), cases(data_modes=("chunks of 7",), checked=False))
def test_other_modes(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


# Messages between two ranks are the same in these.
@pytest.mark.thin(2)
@pytest.mark.nprocs(2, 4, 8)
@pytest.mark.parametrize(("name", "mode"), collectives("shared"))
def test_shared(name, mode, comm, monkeypatch):
    run(name, mode, comm, monkeypatch)


@pytest.mark.nprocs(3)
@pytest.mark.parametrize(("name", "mode"), collectives("two levels"))
def test_two_levels(name, mode, comm, monkeypatch):
    # Which ranks are a node is found out with the first mesh of a process.
    monkeypatch.setattr(current_world(), "node", node_of(comm.rank // 2))
    run(name, mode, comm, monkeypatch)


def test_lines_are_compared_at_level_two(comm, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
    swapped_calls_on_lines_of_their_own(comm)
