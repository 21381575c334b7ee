"""Device memory when something fails, comes late, or is done in another order or thread."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpimesh.comm import (
    ProgressEngine,
    VirtualWorld,
    cuda_ipc,
    device_strategy,
    virtual_communicators,
)
from mpimesh.comm.cuda_ipc import CudaIpc, ImportedMemory
from mpimesh.comm.cuda_probe import ProbeResult
from mpimesh.comm.cuda_probe_child import OPERATIONS
from mpimesh.comm.device_communicator import DeviceCommunicator, device_communicator
from mpimesh.comm.device_strategy import CommStream
from mpimesh.comm.host_strategies import MPICuda, Staged
from mpimesh.comm.nccl import Nccl
from mpimesh.errors import TransportError
from tests.devices.alone import Alone
from tests.devices.fake_cuda import address_range, installed
from tests.devices.operations import device, finish, nonsense, numbers, reduced, same
from tests.devices.virtual import on_ranks
from tests.helpers.raises import raises


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "address_range", address_range)


def cuda() -> Any:
    return sys.modules["cupy"].cuda


def strategy_of(comm, steps):
    request = comm.engine.stage("find", steps)
    finish(comm, request)
    strategy, why = request.value
    assert strategy is not None, why
    return Alone(comm, strategy)


def waiting(stream) -> int:
    """Return how much a fake stream has still to do."""
    return len(stream.stream._queue)


# -- streams ---------------------------------------------------------------------------------


def started(engine, stream, steps):
    return engine.stage("a", stream.run(steps))


class Failing:
    """A request that MPI fails."""

    def test(self):
        raise TransportError("no more")


@pytest.mark.parametrize("where", ["step", "test"])
def test_after_an_error_the_stream_of_the_caller_waits_for_what_was_begun(where):
    order = []

    def steps():
        lane.stream.delay(20)
        lane.stream.put(lambda: order.append("lane"))
        if where == "step":
            Failing().test()
        yield Failing()

    with installed():
        (comm,) = virtual_communicators(VirtualWorld(1))
        lane = CommStream(comm)
        with raises(TransportError, "no more"):
            started(ProgressEngine(), lane, steps).test()
        caller = cuda().get_current_stream()
        caller.put(lambda: order.append("caller"))
        caller.synchronize()
    assert order == ["lane", "caller"]


def test_on_the_default_stream_of_a_thread_it_is_done_when_the_device_has_come_to_it():
    """Whichever thread ends the operation has another stream of that name."""
    with installed():
        (comm,) = virtual_communicators(VirtualWorld(1))
        lane, order = CommStream(comm), []

        def steps():
            lane.stream.delay(20)
            lane.stream.put(lambda: order.append("lane"))
            yield from ()

        ordinary = started(ProgressEngine(), lane, steps)
        assert ordinary.test()
        assert order == []
        per_thread = cuda().Stream()
        per_thread.ptr = 2
        with per_thread:
            request = started(ProgressEngine(), lane, steps)
        assert not request.test()
        while not request.test():
            pass
        assert order == ["lane", "lane"]


# -- CUDA-aware MPI --------------------------------------------------------------------------


def test_mpi_is_tested_on_the_device_of_the_operation():
    def main(comm):
        tested = []

        def watched(move):
            def start(array, peer, tag):
                request = move(array.on_host, peer, tag)

                class Watched:
                    def test(self):
                        tested.append(cuda().runtime.getDevice())
                        return request.test()

                return Watched()

            return start

        comm.kind = "mpi"
        comm.isend, comm.irecv = watched(comm.isend), watched(comm.irecv)
        with cuda().Device(1):
            strategy = MPICuda(comm, dict.fromkeys(OPERATIONS, ProbeResult(True, "tried")))
            alone = Alone(comm, strategy)
            x = device(numbers(comm.rank, 5, "f4"))
            request = alone.all_reduce(None, x, "sum")
        with cuda().Device(2):
            finish(comm, request)
        same(x, reduced([numbers(r, 5, "f4") for r in range(comm.size)], "sum"))
        assert set(tested) == {1}

    on_ranks(2, main, devices=3)


# -- through the host ------------------------------------------------------------------------


def test_pinned_memory_of_what_failed_is_not_used_again(monkeypatch):
    def main(comm):
        alone, x = Alone(comm, Staged(comm)), device(np.ones(2000, "f4"))
        pinned = []
        allocate = cuda().alloc_pinned_memory

        def watched(nbytes):
            memory = allocate(nbytes)
            pinned.append(weakref.ref(memory))
            return memory

        with monkeypatch.context() as patch:
            patch.setattr(cuda(), "alloc_pinned_memory", watched)
            patch.setattr(comm, "all_reduce", lambda *_: Failing())
            with raises(TransportError, "no more"):
                finish(comm, alone.all_reduce(None, x, "sum"))
        alone.strategy.stream.stream.synchronize()
        alone.free()
        gc.collect()
        (one,) = pinned
        assert one() is not None, "MPI may still write into it"

    on_ranks(1, main)


# -- memory of others ------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_what_was_opened_is_closed_on_its_device_when_nothing_reads_it():
    def main(comm):
        alone = strategy_of(comm, CudaIpc.find(comm, process=1000 + comm.rank))
        x = device(numbers(comm.rank, 5, "f4"))
        finish(comm, alone.all_reduce(None, x, "sum"))
        finish(comm, comm.barrier())
        imports, closed = alone.strategy._imports, []
        close = imports.close_all

        def closing(opened):
            closed.append((cuda().runtime.getDevice(), waiting(alone.strategy.stream)))
            close(opened)

        imports.close_all = closing
        alone.strategy.stream.stream.delay(30)
        with cuda().Device(2):
            alone.strategy.free()
        assert set(closed) == {(comm.rank, 0)}

    on_ranks(2, main, devices=3)


def test_an_error_of_closing_is_raised():
    with installed() as cupy:
        imports, runtime = ImportedMemory(process=1), cupy.cuda.runtime
        place = np.zeros((), cuda_ipc.DESCRIPTOR)
        place["node"], place["process"], place["nbytes"] = device_strategy.node_key(), 7, 1
        place["lasting"] = True
        place["handle"][:3] = np.frombuffer(b"mem", np.uint8)
        imports.open(place, [])

        def fail(ptr):
            raise runtime.CUDARuntimeError("cudaErrorIllegalAddress")

        runtime.ipcCloseMemHandle = fail
        with raises(TransportError, "close", "cudaErrorIllegalAddress"):
            imports.close()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("size", [2, 3])
def test_memory_that_one_rank_cannot_open_is_an_error_on_all(size):
    def main(comm):
        alone = strategy_of(comm, CudaIpc.find(comm, process=1000 + comm.rank))
        imports = alone.strategy._imports
        able = imports.open

        def unable(descriptor, passing):
            raise TransportError("CUDA cannot open the memory: cudaErrorMapBufferObjectFailed")

        if comm.rank == 1:
            imports.open = unable
        x = device(numbers(comm.rank, 5, "f4"))
        request = alone.all_reduce(None, x, "sum")
        why = "cudaErrorMapBufferObjectFailed" if comm.rank == 1 else "rank 1 cannot open"
        with pytest.raises(TransportError, match=f"on rank {comm.rank}: .*{why}"):
            finish(comm, request)
        # The ranks have met, and so the next operation finds them where they should be.
        imports.open = able
        y = device(numbers(comm.rank, 5, "f4"))
        finish(comm, alone.all_reduce(None, y, "sum"))
        same(y, reduced([numbers(r, 5, "f4") for r in range(comm.size)], "sum"))

    on_ranks(size, main)


@pytest.mark.usefixtures("driver")
def test_memory_of_a_message_is_closed_when_it_is_read_and_before_the_sender_knows():
    size = cuda_ipc.COPIED_BYTES // 4 + 5

    def main(comm):
        dev_comm = DeviceCommunicator(comm, prefer="cuda_ipc")
        messages: Any = dev_comm.messages()
        messages._process = messages._imports._process = 1000 + comm.rank
        pool = sys.modules["cupy"].get_default_memory_pool()
        if comm.rank == 0:
            for tag in range(3):
                x = device(numbers(tag, size, "f4"))
                finish(comm, dev_comm.isend(x, 1, tag))
                del x
                pool.free_all_blocks()
            finish(comm, *[dev_comm.isend(device(numbers(tag, 6, "f4")), 1, tag) for tag in (4, 5)])
            return
        for tag, elements in ((0, size), (1, size), (2, size), (5, 6), (4, 6)):
            messages._stream.stream.delay(30)
            room = nonsense(elements, "f4")
            finish(comm, dev_comm.irecv(room, 0, tag))
            same(room, numbers(tag, elements, "f4"))
        assert cuda().runtime.opened
        dev_comm.free()
        assert not cuda().runtime.open.total()

    on_ranks(2, main)


# -- NCCL ------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Return the ids of the communicators that all-reduce, in the order of the calls of a rank."""
    calls: dict[int, list[bytes]] = {}
    with installed() as cupy:
        kind = type(cupy.cuda.nccl.NcclCommunicator(1, bytes(128), 0))
    real = kind.allReduce

    def all_reduce(self, *arguments):
        calls.setdefault(self._rank, []).append(self._id)
        real(self, *arguments)

    monkeypatch.setattr(kind, "allReduce", all_reduce)
    return calls


def test_operations_of_two_groups_are_started_in_the_order_of_the_calls(launched):
    """Also where the second group knows already how it moves bytes, and the first does not yet."""

    def main(comm):
        other = comm.split(0, comm.rank)
        first, second = (DeviceCommunicator(c, prefer="nccl") for c in (comm, other))
        finish(comm, second.prepare())
        x, y = device(numbers(comm.rank, 5, "f4")), device(numbers(comm.rank, 5, "f4"))
        requests = [first.all_reduce(None, x, "sum"), second.all_reduce(None, y, "sum")]
        finish(comm, *requests[::-1])
        strategies: list[Any] = [c._strategies[0] for c in (first, second)]
        ids = [strategy._comm._id for strategy in strategies]
        assert launched[comm.rank] == ids
        finish(comm, first.all_reduce(None, x, "sum"), second.all_reduce(None, y, "sum"))
        assert launched[comm.rank] == ids * 2

    on_ranks(2, main, devices=2)


@pytest.mark.usefixtures("driver")
def test_an_operation_waits_for_no_other_strategy_on_the_host(launched):
    here = threading.Event()

    def main(comm):
        dev_comm = device_communicator(comm)
        finish(comm, dev_comm.prepare())
        small, large = (device(np.ones(size, "f4")) for size in (9, 140_000))
        if comm.rank > 0:
            assert here.wait(20)
        requests = [dev_comm.all_reduce(None, x, "sum") for x in (small, large)]
        assert len(launched[comm.rank]) == 1
        here.set()
        finish(comm, *requests)
        same(large, np.full(140_000, 3, "f4"))

    on_ranks(3, main, devices=3)


def test_groups_are_made_whose_ranks_come_to_them_in_another_order():
    """NCCL's own start waits for all ranks: it must not keep a rank from another one."""

    def main(comm):
        other = comm.split(0, comm.rank)
        both = [DeviceCommunicator(c, prefer="nccl") for c in (comm, other)]
        both = both[:: -1 if comm.rank else 1]
        finish(comm, *[dev_comm.prepare() for dev_comm in both])
        for dev_comm in both[:: -1 if comm.rank else 1]:
            x = device(numbers(comm.rank, 5, "f4"))
            finish(comm, dev_comm.all_reduce(None, x, "sum"))
            same(x, reduced([numbers(r, 5, "f4") for r in range(comm.size)], "sum"))

    on_ranks(2, main, devices=2)


def test_it_is_done_when_the_device_has_done_it():
    here = threading.Event()

    def main(comm):
        alone = strategy_of(comm, Nccl.find(comm))
        x = device(numbers(comm.rank, 5, "f4"))
        if comm.rank == 0:
            request = alone.all_reduce(None, x, "sum")
            assert not any(request.test() for _ in range(50))
            here.set()
        else:
            assert here.wait(20)
            request = alone.all_reduce(None, x, "sum")
        finish(comm, request)
        alone.free()
        assert alone.strategy._comm is None

    on_ranks(2, main, devices=2)


def test_an_error_that_nccl_finds_later_is_raised_and_ends_its_kernels():
    def main(comm):
        alone = strategy_of(comm, Nccl.find(comm))
        inner = alone.strategy._comm
        if comm.rank == 0:
            request = alone.all_reduce(None, device(numbers(0, 5, "f4")), "sum")
            assert not request.test()
            inner.failure = cuda().nccl.NcclError("NCCL_ERROR_REMOTE_ERROR")
            with raises(TransportError, "rank 0", "aborted", "NCCL_ERROR_REMOTE_ERROR"):
                finish(comm, request)
            assert inner.aborted
        alone.strategy.free()

    on_ranks(2, main, devices=2)


def test_what_is_still_under_way_is_aborted_and_not_waited_for():
    def main(comm):
        alone = strategy_of(comm, Nccl.find(comm))
        inner = alone.strategy._comm
        if comm.rank == 0:
            request = alone.all_reduce(None, device(numbers(0, 5, "f4")), "sum")
            assert not request.test()
        alone.strategy.free()
        assert (inner.aborted, inner.destroyed) == (comm.rank == 0, comm.rank == 1)

    on_ranks(2, main, devices=2)


# -- the end ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("unended", [False, True])
def test_what_may_be_under_way_keeps_its_communicator_and_memory(unended, monkeypatch):
    def main(comm):
        dev_comm = device_communicator(comm)
        x = device(numbers(comm.rank, 5, "f4"))
        finish(comm, dev_comm.all_reduce(None, x, "sum"))
        finish(comm, comm.barrier())
        host: Any = dev_comm._host
        freed: list[str] = []
        for strategy in dev_comm._strategies:
            monkeypatch.setattr(strategy, "free", partial(freed.append, strategy.name))
        left: list[str] = []
        monkeypatch.setattr(host, "abandon", partial(left.append, "host"))
        dev_comm.free(unended=unended)
        assert bool(left) == unended
        assert ("cuda_ipc" in freed) != unended
        assert "nccl" in freed

    on_ranks(2, main, devices=2)
