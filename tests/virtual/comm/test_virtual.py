"""Virtual ranks: the transport's contract, and that nothing waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.comm import VirtualWorld
from mpimesh.errors import (
    DeadlockError,
    MismatchError,
    MpimeshError,
    RankError,
    RemoteError,
    TransportError,
)
from mpimesh.runtime.world import current_world
from tests.contract.communicators import CHECKS, done
from tests.helpers.raises import names, raises


def communicator():
    """This virtual rank's view of all ranks."""
    return current_world().virtual


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_contract(name, size, rendezvous):
    mm.run_virtual(size, lambda: CHECKS[name](communicator()), rendezvous=rendezvous)


def test_results_come_in_rank_order():
    assert mm.run_virtual(5, lambda x, *, y: (communicator().rank, x, y), 1, y=2) == [
        (rank, 1, 2) for rank in range(5)
    ]
    for size in (0, -1):
        with raises(RankError, "size", size):
            mm.run_virtual(size, lambda: None)


def test_worlds_inside_each_other():
    """A virtual rank may start virtual ranks of its own."""

    def main():
        inner = mm.run_virtual(2, lambda: communicator().size)
        return communicator().size, inner

    assert mm.run_virtual(3, main) == [(3, [2, 2])] * 3


def test_what_the_last_look_before_a_sleep_moved_on_is_no_deadlock():
    """A root tells what it scatters between the look of a rank's steps and of what it waits for."""
    waits, told = threading.Event(), threading.Event()

    def main():
        mesh = mm.DeviceMesh("dp=2")
        group = mesh.group()
        if mesh.rank == 0:
            assert waits.wait(10)
            handle = group.scatter(np.arange(2.0), root=0)
            told.set()
            group.barrier()
            return handle.resolve().tolist()
        handle = group.scatter(None, root=0)
        world = communicator().world

        def over():
            if not waits.is_set():
                waits.set()
                assert told.wait(10)
                world.engines[1].advance()
                return False
            return handle.done()

        assert group.communicator.wait(over)
        group.barrier()
        return handle.resolve().tolist()

    assert mm.run_virtual(2, main) == [[0.0], [1.0]]


def test_the_calling_thread_is_no_virtual_rank_afterwards():
    mm.run_virtual(2, lambda: None)
    assert current_world().virtual is None


def test_two_ranks_that_both_receive():
    def main():
        with mm.DeviceMesh("a=-1") as mesh:
            mesh.group().recv(1 - mesh.rank, label=f"mine {mesh.rank}").resolve()

    with pytest.raises(DeadlockError) as caught:
        mm.run_virtual(2, main)
    assert caught.value.agreed
    _, *lines, _, first, second = str(caught.value).splitlines()
    for rank, line in enumerate(lines):
        names(line, f"rank {rank}", f"recv(source {1 - rank}", f"'mine {rank}'", __file__)
    assert len(lines) == 2
    for rank, line in enumerate((first, second)):
        names(line, f"rank {rank} waits for rank {1 - rank}", "recv")


def test_a_rank_that_returns_early():
    def main():
        mesh = mm.DeviceMesh("a=-1")
        if mesh.rank == 1:
            return
        mesh.group().all_reduce(np.ones(1)).resolve()

    with raises(DeadlockError, "ranks [1]") as caught:
        mm.run_virtual(3, main)
    _, first, second, _ = str(caught.value).splitlines()
    names(first, "rank 0", "all_reduce(shape (1,)")
    names(second, "rank 2", "all_reduce(shape (1,)")


def test_sends_before_receives_lean_on_buffering():
    def main():
        with mm.DeviceMesh("a=-1") as mesh:
            group, peer = mesh.group(), 1 - mesh.rank
            group.send(np.ones(2), peer).resolve()
            return group.recv(peer).resolve().tolist()

    assert mm.run_virtual(2, main) == [[1, 1], [1, 1]]
    with raises(DeadlockError, "rank 0", "send(shape (2,)"):
        mm.run_virtual(2, main, rendezvous=True)


def test_groups_in_a_circle():
    """Each pair of ranks shares a group, and each rank waits for another pair first."""

    def main():
        with mm.DeviceMesh("a=-1") as mesh:
            pairs = [mesh.add_group(f"{k}", sorted({k, (k + 1) % 3})) for k in range(3)]
            mine, next_one = pairs[mesh.rank], pairs[(mesh.rank - 1) % 3]
            mine.barrier()
            next_one.barrier()

    with raises(DeadlockError) as caught:
        mm.run_virtual(3, main)
    _, *lines, head, first, second, third = str(caught.value).splitlines()
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        names(line, f"rank {rank}", "barrier()", f"'{rank}'")
    names(head, "circle")
    for rank, line in enumerate((first, second, third)):
        names(line, f"rank {rank} waits for rank {(rank + 1) % 3}", "barrier()")
    assert len(lines) == 3


def test_a_rank_that_fails_ends_the_others_waits():
    seen = {}

    def main():
        rank = communicator().rank
        if rank == 1:
            raise ZeroDivisionError("my own fault")
        try:
            mm.DeviceMesh("a=-1").group().barrier()
        except RemoteError as error:
            seen[rank] = str(error)
            raise

    with raises(ZeroDivisionError, "my own fault", "virtual rank 1 of 3"):
        mm.run_virtual(3, main)
    for rank in (0, 2):
        names(seen[rank], "rank 1", f"rank {rank}", "ZeroDivisionError", "my own fault")


def test_an_error_on_all_ranks_has_no_rank():
    def main():
        mm.DeviceMesh("a=7")

    with raises(MpimeshError, "a=7", 7, 2) as caught:
        mm.run_virtual(2, main)
    assert not getattr(caught.value, "__notes__", [])


def test_abort_ends_all_waits():
    def main():
        if communicator().rank == 0:
            communicator().abort(3)
        else:
            communicator().wait(lambda: False)

    with pytest.raises(SystemExit) as caught:
        mm.run_virtual(3, main)
    assert caught.value.code == 3


def test_ranks_that_start_different_collectives():
    def main():
        comm = communicator()
        x = np.ones(2)
        request = comm.broadcast(x, 0) if comm.rank else comm.all_reduce(None, x, "sum")
        with raises(MismatchError, "different collectives"):
            done(comm, request)
        with raises(MismatchError, "different collectives"):
            done(comm, comm.barrier())

    mm.run_virtual(3, main)


def test_blocks_that_do_not_fit():
    def main():
        comm = communicator()
        room = np.empty(5, np.uint8)
        with raises(TransportError, "for each of 3 ranks", "got 2"):
            comm.all_gather(np.ones(1 + comm.rank, np.uint8), room, [2, 3])
        with raises(TransportError, "sends 2 bytes", f"has {3 + comm.rank}"):
            comm.all_gather(np.ones(3 + comm.rank, np.uint8), room, [2, 2, 2])
        with raises(TransportError, "receives into 6 bytes", "has 5"):
            comm.all_gather(np.ones(2, np.uint8), room, [2, 2, 2])
        done(comm, comm.barrier())

    mm.run_virtual(3, main)


def test_blocks_for_each_other_that_do_not_fit():
    def main():
        comm = communicator()
        send, room = np.ones(3), np.empty(3)
        with raises(TransportError, "sends 32 bytes", "has 24"):
            comm.all_to_all(send, room, [1, 2, 1], [1, 1, 1])
        with raises(TransportError, "receives into 32 bytes", "has 24"):
            comm.all_to_all(send, room, [1, 1, 1], [1, 1, 2])

    mm.run_virtual(3, main)


def test_reductions_of_different_sizes_are_no_broadcasting():
    def main():
        comm = communicator()
        x = np.ones(1 if comm.rank else 4)
        with raises(MismatchError, "different arrays"):
            done(comm, comm.all_reduce(None, x, "sum"))

    mm.run_virtual(2, main)


def test_a_buffered_send_may_be_written_at_once():
    def main():
        comm = communicator()
        x = np.full(3, comm.rank)
        if comm.rank == 0:
            done(comm, comm.isend(x, 1, 0))
            x[...] = -1
            done(comm, comm.barrier())
        else:
            done(comm, comm.barrier())
            done(comm, comm.irecv(x, 0, 0))
            assert x.tolist() == [0, 0, 0]

    mm.run_virtual(2, main)


def test_a_rendezvous_waits_for_its_receive():
    def main():
        comm = communicator()
        x = np.full(3, comm.rank)
        if comm.rank == 0:
            request = comm.isend(x, 1, 0)
            assert not comm.wait(request.test, 0.02)
            done(comm, comm.barrier())
            done(comm, request)
        else:
            done(comm, comm.barrier())
            done(comm, comm.irecv(x, 0, 0))

    mm.run_virtual(2, main, rendezvous=True)


def test_a_limited_wait_is_no_deadlock():
    def main():
        comm = communicator()
        if comm.rank == 0:
            assert not comm.wait(lambda: False, 0.05)
            done(comm, comm.isend(np.zeros(1), 1, 0))
        else:
            done(comm, comm.irecv(np.zeros(1), 0, 0))

    mm.run_virtual(2, main)


def test_no_thread_is_left():
    before = threading.active_count()
    for _ in range(3):
        mm.run_virtual(4, lambda: None)
        with pytest.raises(DeadlockError):
            mm.run_virtual(2, lambda: communicator().wait(lambda: False))
    assert threading.active_count() == before


class _LateEngine:
    """An engine whose first sleeper comes back only when the second one sleeps again."""

    def __init__(self, engine):
        self._engine = engine
        self._sleepers = []
        self.both_asleep = threading.Event()
        self._again = threading.Event()

    def bell(self):
        return self._engine.bell()

    def sleep(self, bell, longest_s):
        me = threading.get_ident()
        if not longest_s:
            return self._engine.sleep(bell, 0)
        self._sleepers.append(me)
        if len(self._sleepers) == 2:
            self.both_asleep.set()
        if self._sleepers.count(me) == 2:
            self._again.set()
        rung = self._engine.sleep(bell, longest_s)
        if me == self._sleepers[0]:
            self._again.wait(10)
        return rung


def test_a_deadlock_is_seen_though_another_thread_of_a_rank_has_gone():
    world = VirtualWorld(2)
    late: Any = _LateEngine(world.engines[0])
    world.engines[0] = late
    is_here: list[bool] = []
    ended: list[str] = []

    def wait(rank, ready, what):
        try:
            world.sleep(rank, ready, float("inf"), what, None)
        except DeadlockError as error:
            ended.append(str(error))

    def begin(*arguments):
        thread = threading.Thread(target=wait, args=arguments, daemon=True)
        thread.start()
        return thread

    helper = begin(0, lambda: bool(is_here), "a message that comes")
    end_s = time.monotonic() + 10
    while not late._sleepers:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    main = begin(0, lambda: False, "a message that never comes")
    assert late.both_asleep.wait(10)
    is_here.append(True)
    world.ring()
    helper.join(10)
    other = begin(1, lambda: False, "one more")
    for thread in (main, other):
        thread.join(10)
        assert not thread.is_alive()
    assert len(ended) == 2
    assert "rank 0 waits in a message that never comes" in ended[0]


def test_ranks_that_wait_for_one_whose_own_thread_works_are_no_deadlock():
    """Its other thread sleeps in an all-reduce that comes when it has sent something."""

    def main():
        with mm.DeviceMesh("a=-1") as mesh:
            group = mesh.group()
            if group.rank:
                group.recv(0).resolve()
                return group.all_reduce(np.ones(5)).resolve().tolist()
            handle = group.all_reduce(np.ones(5))
            found = []
            helper = threading.Thread(target=lambda: found.append(handle.resolve().tolist()))
            helper.start()
            time.sleep(0.1)
            group.send(np.ones(3), 1).resolve()
            helper.join()
            return found[0]

    assert mm.run_virtual(2, main) == [[2.0] * 5] * 2


def test_an_interrupt_ends_all_ranks(request):
    """Python gives it to the main thread, and the ranks are others."""
    # A shell starts what runs in its background with the signal ignored, this test run too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ended = []

    def main():
        with mm.DeviceMesh("x=-1") as mesh:
            try:
                while True:
                    mesh.group().barrier()
                    time.sleep(0.01)
            finally:
                ended.append(mesh.rank)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        mm.run_virtual(3, main)
    end_s = time.monotonic() + 10
    while len(ended) < 3:
        assert time.monotonic() < end_s
        time.sleep(0.01)
