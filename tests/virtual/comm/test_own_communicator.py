"""A communicator of the user's own, that of examples/own_communicator.py, under the contract."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.comm import Communicator
from mpimesh.errors import ClosedError, MeshError, RankError, WorldSizeError
from tests.contract import communicators, suite
from tests.helpers.depth import deep, deep_but
from tests.helpers.raises import raises

PROGRAM = Path(__file__).parents[3] / "examples" / "own_communicator.py"
LIMIT_S = 30
"""What is started there is the process's, and here the ranks are its threads."""


def load():
    spec = importlib.util.spec_from_file_location("own_communicator", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own: Any = load()


def run(size, function, make=None):
    """Run `function` on so many threads, each with its communicator; return what they return."""
    wires = own.Wires()
    results, errors = [None] * size, list[BaseException]()

    def main(rank):
        try:
            results[rank] = function((make or own.QueueCommunicator)(rank, size, wires))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.1 if errors else LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", communicators.CHECKS)
def test_contract_of_the_transport(name, size):
    run(size, communicators.CHECKS[name])


# That of the transport says what is missing; these show that groups work over it.
QUICK = (
    "reductions: all reduce of every dtype and op",
    "movements: uneven all to all",
    "messages: all pairs at once",
    "persistent: every movement can be planned",
    "handles: many under way resolved in any order",
    "barriers: barriers of two groups of the same ranks are told apart",
    "closing: members close alone",
    "mismatches: wrong programs raise the same error everywhere",
)


@pytest.mark.parametrize("size", [3, *deep(1, 2, 4)])
@pytest.mark.parametrize("name", deep_but(suite.CHECKS, *QUICK))
def test_contract(name, size, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    run(size, suite.CHECKS[name])


def test_k5_the_example():
    result = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert result.stdout.strip().splitlines() == [
        line.strip() for line in (own.__doc__ or "").split("and prints")[1].strip().splitlines()
    ]


def test_the_communicator_of_a_mesh():
    def main(comm):
        with mm.DeviceMesh("dp=2", comm) as mesh:
            assert type(mesh.comm) is own.QueueCommunicator
            assert mesh.comm is not comm
            assert mesh.comm is mesh._core.everyone.communicator
            assert (mesh.comm.rank, mesh.comm.size) == (mesh.rank, 2)
            assert mesh.group("dp").backend == "virtual"
            with mm.DeviceMesh("x=2", mesh.comm) as other:
                assert other.group().all_reduce(1).resolve() == 2
            mesh.set_comm(comm)
            assert mesh.group().all_reduce(np.ones(1)).resolve() == 2
        with raises(ClosedError, f"rank {mesh.rank}"):
            _ = mesh.comm

    run(2, main)


def test_what_does_not_fit_is_refused():
    def wrong_size(comm):
        with raises(WorldSizeError, 3, 2):
            mm.DeviceMesh("dp=3", comm)

    run(2, wrong_size)
    for rank, size in ((2, 2), (-1, 2), (0, 0), (None, 2), (0, "2")):
        comm = own.QueueCommunicator(rank, size, own.Wires())
        with raises(MeshError, "QueueCommunicator", "rank", repr(rank), repr(size)):
            mm.DeviceMesh("dp=2", comm)
    for wrong in (own.QueueCommunicator, object(), "world"):
        with raises(MeshError, "comm", "mpi4py", "Communicator"):
            mm.DeviceMesh("dp=2", wrong)


def test_a_split_that_is_wrong_is_refused():
    class Nothing(own.QueueCommunicator):
        def split(self, color, key):
            super().split(color, key)

    class Number(own.QueueCommunicator):
        def split(self, color, key):
            super().split(color, key)
            return 7

    class Turned(own.QueueCommunicator):
        def split(self, color, key):
            return super().split(color, -key)

    for make, error, values in (
        (Nothing, RankError, ("communicator",)),
        (Number, MeshError, ("Number", 7)),
        (Turned, MeshError, ("Turned", "rank")),
    ):

        def main(comm, error=error, values=values):
            with raises(error, *values):
                mm.DeviceMesh("dp=2", comm)

        run(2, main, make)


def test_a_class_without_the_methods_cannot_be_made():
    class Empty(Communicator):
        rank, size = 0, 1

    with pytest.raises(TypeError, match="all_gather"):
        Empty()  # type: ignore[abstract]
