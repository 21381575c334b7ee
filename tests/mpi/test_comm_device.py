"""Device memory over real MPI: a fake GPU whose pointers MPI can really read."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mpimesh.comm import ProgressEngine, cuda_probe
from mpimesh.comm.cuda_probe import (
    BETWEEN_NODES,
    IN_NODE,
    PROCESS_PROBE,
    ProbeResult,
    key_facts,
    write_results,
)
from mpimesh.comm.cuda_probe_child import OPERATIONS
from mpimesh.comm.device_communicator import DeviceCommunicator, device_communicator
from mpimesh.comm.device_strategy import PARAMETERS
from mpimesh.errors import TransportError
from tests.devices.alone import Alone
from tests.devices.fake_cuda import installed
from tests.devices.operations import (
    check_all,
    check_all_reduce,
    device,
    finish,
    nonsense,
    numbers,
    same,
)
from tests.helpers.fake_device import FakeDeviceArray
from tests.helpers.raises import raises


@pytest.fixture
def communicator(comm):
    from mpimesh.comm.mpi import MPICommunicator

    with installed():
        communicator = MPICommunicator.duplicate(comm)
        communicator.engine = ProgressEngine()
        yield communicator
        communicator.free()


def test_staged(communicator):
    from mpimesh.comm.host_strategies import Staged

    strategy = Alone(communicator, Staged(communicator, stage_bytes=256))
    check_all(strategy, communicator, dtypes=("f4", "c16"), sizes=(0, 50))


def test_cuda_aware_mpi(communicator):
    from mpimesh.comm.host_strategies import MPICuda

    results = dict.fromkeys(OPERATIONS, ProbeResult(True, "tried here"))

    strategy = Alone(communicator, MPICuda(communicator, results))
    assert strategy.cannot("all_reduce") is None
    check_all(strategy, communicator, dtypes=("f4", "c16"), sizes=(0, 50))
    for size in (20_000, 40_001):
        check_all_reduce(strategy, communicator, size, "f4")  # by the ring


def test_what_mpi_crashes_in_is_made_of_messages(communicator):
    """As the MPIs from PyPI do on a UCX with CUDA: messages move, and some collectives crash."""
    from mpimesh.comm.host_strategies import MPICuda

    results = {name: ProbeResult(name == "messages", f"{name} crashed") for name in OPERATIONS}

    strategy = Alone(communicator, MPICuda(communicator, results))
    assert {strategy.cannot(operation) for operation in PARAMETERS} == {None}
    for name in ("all_gather", "gather", "scatter", "all_to_all", "broadcast"):
        setattr(communicator, name, _never)
    check_all(strategy, communicator, dtypes=("f4", "c16"), sizes=(0, 50))


def _never(*_):
    pytest.fail("MPI was given what it was not proven to take")


def test_nothing_is_given_to_mpi_that_was_not_proven(communicator):
    from mpimesh.comm.host_strategies import MPICuda

    results = {name: ProbeResult(name == "broadcast", f"{name} crashed") for name in OPERATIONS}

    strategy = Alone(communicator, MPICuda(communicator, results))
    assert strategy.cannot("broadcast") is None
    assert strategy.cannot("all_gather") == "all_gather crashed"
    assert strategy.cannot("all_reduce") == "messages crashed"
    assert strategy.cannot("messages") == "messages crashed"


@pytest.mark.parametrize("kind", ["MemoryAsync", "ManagedMemory", "UnownedMemory"])
@pytest.mark.parametrize("proven", ["all", "messages"])
def test_memory_of_a_kind_that_was_not_tried_is_not_given_to_mpi(
    communicator, monkeypatch, kind, proven
):
    """On one rank only: each may have another allocator."""
    from mpimesh.comm.host_strategies import MPICuda

    results = {
        name: ProbeResult(proven == "all" or name == "messages", "tried here")
        for name in OPERATIONS
    }

    kinds: set[str] = set()
    given_kinds(monkeypatch, communicator, kinds)
    strategy = Alone(communicator, MPICuda(communicator, results))
    if communicator.rank == communicator.size - 1:
        vars(sys.modules["cupy"])["library"].identity = kind
    check_all(strategy, communicator, dtypes=("f4", "f2"), sizes=(0, 50))
    check_all_reduce(strategy, communicator, 40_001, "f4")  # by the ring
    assert kinds <= {"Memory"}
    assert kinds or communicator.size == 1


@pytest.mark.parametrize("kind", ["MemoryAsync", "ManagedMemory"])
def test_nor_in_a_message(communicator, monkeypatch, kind):
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", "yes")
    kinds: set[str] = set()
    given_kinds(monkeypatch, communicator, kinds)
    dev_comm = DeviceCommunicator(communicator)
    finish(communicator, dev_comm.prepare())
    n, me = communicator.size, communicator.rank
    vars(sys.modules["cupy"])["library"].identity = kind
    room = nonsense(9, "f8")
    receive = dev_comm.irecv(room, (me - 1) % n, 3)
    finish(communicator, receive, dev_comm.isend(device(numbers(me, 9, "f8")), (me + 1) % n, 3))
    same(room, numbers((me - 1) % n, 9, "f8"))
    assert kinds == {"Memory"}
    dev_comm.free()


def given_kinds(monkeypatch, communicator, kinds):
    """Note the kinds of device memory that MPI is given."""

    def watched(call):
        def start(*arguments, **options):
            cupy = sys.modules["cupy"]
            arrays = [x for x in arguments if isinstance(x, cupy.ndarray) and x.nbytes]
            kinds.update(x.data.mem.identity for x in arrays)
            return call(*arguments, **options)

        return start

    for name in ("isend", "irecv", *PARAMETERS):
        monkeypatch.setattr(communicator, name, watched(getattr(communicator, name)))


@pytest.mark.parametrize("word", ["yes", "no"])
def test_the_choice(communicator, monkeypatch, word):
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", word)
    dev_comm = device_communicator(communicator)
    x = device(numbers(communicator.rank, 50, "f4"))
    finish(communicator, dev_comm.all_reduce(None, x, "sum"))
    same(x, np.sum([numbers(r, 50, "f4") for r in range(communicator.size)], 0))
    if communicator.size > 1:
        (route,) = (r for r in dev_comm.algorithms() if r.operation == "all_reduce")
        assert route.algorithm == ("mpi_cuda" if word == "yes" else "staged")
        assert f"MPIMESH_CUDA_AWARE={word}" in route.reason


@pytest.mark.parametrize("word", ["yes", "no"])
def test_messages(communicator, monkeypatch, word):
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", word)
    dev_comm = DeviceCommunicator(communicator)
    finish(communicator, dev_comm.prepare())
    n, me = communicator.size, communicator.rank
    if n > 1:
        after, before = (me + 1) % n, (me - 1) % n
        sends = [dev_comm.isend(device(numbers(me, 7 + k, "f8")), after, 16383) for k in range(3)]
        rooms = [nonsense(7 + k, "f8") for k in range(3)]
        receives = [dev_comm.irecv(room, before, 16383) for room in rooms]
        finish(communicator, *receives, *sends)
        for k, room in enumerate(rooms):
            same(room, numbers(before, 7 + k, "f8"))
    dev_comm.free()


@pytest.mark.nprocs(2, 3)
@pytest.mark.parametrize("words", [("yes", "yes"), ("yes", "no"), ("no", "yes")])
def test_messages_of_a_group_without_collectives(communicator, monkeypatch, words):
    """Each pair finds out for itself, and what one of the two may not, neither does."""
    kinds: set[str] = set()
    given_kinds(monkeypatch, communicator, kinds)
    n, me = communicator.size, communicator.rank
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", words[min(me, 1)])
    dev_comm = DeviceCommunicator(communicator)
    for turn in range(3):
        if me == 0:
            finish(communicator, dev_comm.isend(device(numbers(turn, 9, "f8")), n - 1, 3))
        elif me == n - 1:
            room = nonsense(9, "f8")
            finish(communicator, dev_comm.irecv(room, 0, 3))
            same(room, numbers(turn, 9, "f8"))
    assert bool(kinds) == (words == ("yes", "yes") and me in (0, n - 1))
    dev_comm.free()


@pytest.mark.nprocs(2)
@pytest.mark.parametrize("way", [IN_NODE, BETWEEN_NODES])
def test_a_pair_uses_what_is_kept_for_its_way_alone(communicator, monkeypatch, tmp_path, way):
    """As after `mpimesh doctor`: nothing is tried for a message."""
    monkeypatch.delenv("MPIMESH_CUDA_AWARE", raising=False)
    monkeypatch.setattr(PROCESS_PROBE, "_folder", tmp_path)
    monkeypatch.setattr(PROCESS_PROBE, "_key", key_facts())
    monkeypatch.setattr(PROCESS_PROBE, "_agreed", {})
    monkeypatch.setattr(cuda_probe, "node_key", lambda: 100 + communicator.rank)  # two nodes
    proof = {"messages": ProbeResult(True, "moved right")}
    write_results(PROCESS_PROBE._key, way, proof, tmp_path)
    kinds: set[str] = set()
    given_kinds(monkeypatch, communicator, kinds)
    dev_comm = DeviceCommunicator(communicator)
    if communicator.rank == 0:
        finish(communicator, dev_comm.isend(device(numbers(0, 9, "f8")), 1, 3))
    else:
        finish(communicator, dev_comm.irecv(room := nonsense(9, "f8"), 0, 3))
        same(room, numbers(0, 9, "f8"))
    assert bool(kinds) == (way == BETWEEN_NODES)
    dev_comm.free()


def test_an_mpi_with_few_tags_has_no_device_messages(communicator, monkeypatch):
    monkeypatch.setattr("mpimesh.comm.device_communicator._LAST_TAG", 1 << 40)
    with raises(TransportError, 1 << 40):
        device_communicator(communicator).isend(nonsense(1, "f4"), 0, 0)


@pytest.mark.parametrize("word", ["yes", "no"])
def test_a_pointer_to_nowhere_never_reaches_mpi(communicator, monkeypatch, word):
    """MPI would crash on it; and what follows works."""
    monkeypatch.setenv("MPIMESH_CUDA_AWARE", word)
    dev_comm = device_communicator(communicator)
    bogus = FakeDeviceArray((6,), np.float32)
    for call in (
        lambda: dev_comm.all_reduce(None, bogus, "sum"),
        lambda: dev_comm.broadcast(bogus, 0),
        lambda: dev_comm.isend(bogus, 0, 0),
    ):
        with raises(TypeError, "CuPy", "FakeDeviceArray"):
            call()
    x = device(numbers(0, 6, "f4")) if communicator.rank == 0 else nonsense(6, "f4")
    finish(communicator, dev_comm.broadcast(x, 0))
    same(x, numbers(0, 6, "f4"))
