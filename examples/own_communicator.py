"""A mesh on a communicator of one's own: four threads that talk over queue.Queue, without MPI.

`mpiexec -n 1 python examples/own_communicator.py`, or without mpiexec, starts the ranks as threads:

          tp=0      tp=1
    dp=0  rank 0 -- rank 1
            |         |
    dp=1  rank 2 -- rank 3

and prints

    all_reduce, all_gather, send, recv and redistribute give what NumPy gives
    4 ranks over queue.Queue; yours may be anything that carries bytes
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import accumulate
from queue import Queue

import numpy as np

import mpimesh as mm
from mpimesh.comm import Communicator
from mpimesh.errors import TransportError

FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Wires:
    """The queues between all ranks: one for each communicator, sender, receiver and tag."""

    def __init__(self):
        self._queues, self._lock = {}, threading.Lock()

    def __getitem__(self, key):
        with self._lock:
            return self._queues.setdefault(key, Queue())


class Pending:
    """An operation that waits for one message from each of some queues, after the one before it."""

    def __init__(self, inbox, finish, before):
        self._inbox, self._finish, self._before = list(inbox), finish, before
        self._parts, self.error, self.cancelled, self.nbytes = [], None, False, 0

    def settled(self):
        if self._before is not None and not self._before.settled():
            return False  # messages of one queue belong to operations in their order
        self._before = None
        while self._inbox and not self.cancelled:
            if self._inbox[0].empty():
                return False
            self._parts.append(self._inbox.pop(0).get())
        if self._finish is not None and not self.cancelled:
            finish, self._finish = self._finish, None
            self.error = finish(self, self._parts)
        return True

    def test(self):
        done = self.settled()
        if self.error is not None:
            raise self.error
        return done

    def received_bytes(self):
        return self.nbytes

    def cancel(self):
        if self.cancelled or self.settled():
            return False
        self.cancelled = True
        return True


class QueueCommunicator(Communicator):
    """Threads that talk over queues. A send copies its buffer and is done at once."""

    kind = "queues"

    def __init__(self, rank, size, wires, name=()):
        self.rank, self.size = rank, size
        self._wires, self._name, self._splits = wires, name, 0
        self._last = {}  # what was started last on each queue

    # Every collective: rank r gets blocks[r] of each rank, and makes its result of what it got.

    def _collective(self, blocks, finish=None):
        for dest, block in enumerate(blocks):
            copy = None if block is None else block.copy()
            self._wires[self._name, self.rank, dest, None].put(copy)
        inbox = [self._wires[self._name, source, self.rank, None] for source in range(self.size)]
        before = self._last.get("collective")
        request = Pending(inbox, finish and (lambda _, parts: finish(parts)), before)
        self._last["collective"] = request
        return request

    def _only(self, root, block):
        return [block if rank == root else None for rank in range(self.size)]

    def all_reduce(self, send, recv, op):
        blocks = [recv if send is None else send] * self.size
        return self._collective(blocks, lambda parts: put(recv, total(parts, op)))

    def reduce(self, send, recv, op, root):
        here = self.rank == root
        finish = (lambda parts: put(recv, total(parts, op))) if here else None
        return self._collective(self._only(root, send), finish)

    def reduce_scatter(self, send, recv, counts, op):
        return self._collective(cut(send, counts), lambda parts: put(recv, total(parts, op)))

    def all_gather(self, send, recv, counts):
        return self._collective([send] * self.size, lambda parts: put(recv, joined(parts)))

    def gather(self, send, recv, counts, root):
        finish = (lambda parts: put(recv, joined(parts))) if self.rank == root else None
        return self._collective(self._only(root, send), finish)

    def scatter(self, send, recv, counts, root):
        blocks = cut(send, counts) if self.rank == root else [None] * self.size
        return self._collective(blocks, lambda parts: put(recv, parts[root]))

    def all_to_all(self, send, recv, send_counts, recv_counts):
        return self._collective(cut(send, send_counts), lambda parts: put(recv, joined(parts)))

    def broadcast(self, buffer, root):
        blocks = [buffer if self.rank == root else None] * self.size
        return self._collective(blocks, lambda parts: put(buffer, parts[root]))

    def barrier(self):
        return self._collective([None] * self.size)

    def isend(self, buffer, dest, tag):
        self._wires[self._name, self.rank, dest, tag].put(buffer.view(np.uint8).copy())
        return Pending((), None, None)

    def irecv(self, buffer, source, tag):
        def finish(request, parts):
            request.nbytes = parts[0].nbytes
            if request.nbytes > buffer.nbytes:
                return TransportError(f"{request.nbytes} bytes came for {buffer.nbytes}")
            return put(buffer.view(np.uint8)[: request.nbytes], parts[0])

        inbox = [self._wires[self._name, source, self.rank, tag]]
        request = Pending(inbox, finish, self._last.get((source, tag)))
        self._last[source, tag] = request
        return request

    def probe(self, tag):
        for source in range(self.size):
            last = self._last.get((source, tag))
            queue = self._wires[self._name, source, self.rank, tag]
            if (last is None or last.settled()) and not queue.empty():
                return source, queue.queue[0].nbytes
        return None

    def wait(self, ready, timeout_s=None, *, what="", idle=None):
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() >= until_s:
                return False
            if idle is not None:
                idle()
            time.sleep(50e-6)
        return True

    def split(self, color, key):
        self._splits += 1
        asked = np.array([color is not None, color or 0, key])
        rows = np.empty(3 * self.size, asked.dtype)
        self.wait(self.all_gather(asked, rows, [3] * self.size).test)
        if color is None:
            return None
        table = enumerate(rows.reshape(-1, 3).tolist())
        members = sorted((k, rank) for rank, (is_in, c, k) in table if is_in and c == color)
        ranks = [rank for _, rank in members]
        name = (*self._name, self._splits, color)
        return type(self)(ranks.index(self.rank), len(ranks), self._wires, name)

    def free(self):
        self._last.clear()

    def abort(self, code):
        os._exit(code)


def put(target, values):
    target[...] = values


def joined(parts):
    return np.concatenate(parts)


def total(parts, op):
    with np.errstate(all="ignore"):
        return reduce(FUNCTIONS[op], parts)


def cut(buffer, counts):
    return [
        buffer[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)
    ]


def main(comm):
    with mm.DeviceMesh("dp=2,tp=2", comm) as mesh:
        rank, n = mesh.rank, mesh.size
        everybody = np.arange(n * 3.0).reshape(n, 3)
        world = mesh.group()
        assert np.array_equal(world.all_reduce(everybody[rank]).resolve(), everybody.sum(axis=0))
        assert np.array_equal(world.all_gather(everybody[rank]).resolve(), everybody.ravel())
        sent = world.send(everybody[rank], (rank + 1) % n)
        assert np.array_equal(world.recv((rank - 1) % n).resolve(), everybody[rank - 1])
        sent.resolve()
        whole = np.arange(35.0).reshape(7, 5)
        x = mm.distribute(whole, mesh, "dp=S0, tp=S1")
        columns = x.redistribute("dp=S1, tp=R").local
        assert np.array_equal(columns, np.array_split(whole, 2, axis=1)[rank // 2])
        assert np.array_equal((x @ x.T).full(), whole @ whole.T)


if __name__ == "__main__":
    wires = Wires()
    with ThreadPoolExecutor(4) as pool:
        everyone = [QueueCommunicator(rank, 4, wires) for rank in range(4)]
        for rank in [pool.submit(main, comm) for comm in everyone]:
            rank.result()
    print("all_reduce, all_gather, send, recv and redistribute give what NumPy gives")
    print("4 ranks over queue.Queue; yours may be anything that carries bytes")
