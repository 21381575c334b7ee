"""Duties of a communicator alone: messages, probes, cancelled receives, splits, waits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from mpimesh.comm import MAX_USER_TAG, WHOLE_MESSAGE_BYTES
from mpimesh.errors import TransportError

__all__ = ["CHECKS"]


def done(communicator, *requests):
    """Wait for requests."""
    left = list(requests)

    def over():
        left[:] = [request for request in left if not request.test()]
        return not left

    assert communicator.wait(over, 30)


def check_split_orders_by_key_and_then_by_rank(communicator):
    rank, n = communicator.rank, communicator.size
    turned = communicator.split(0, -rank)
    assert (turned.rank, turned.size) == (n - 1 - rank, n)
    tied = communicator.split(7, 3)
    assert (tied.rank, tied.size) == (rank, n)
    some = communicator.split(None if rank == 0 else rank % 2, rank)
    assert (some is None) == (rank == 0)
    if some is not None:
        members = [other for other in range(1, n) if other % 2 == rank % 2]
        assert (some.rank, some.size) == (members.index(rank), len(members))
        ranks = np.empty(len(members), np.int64)
        done(some, some.all_gather(np.array([rank]), ranks, [1] * len(members)))
        assert ranks.tolist() == members
        some.free()
    for one in (tied, turned):
        one.free()
        one.free()


def check_messages_of_one_tag_arrive_in_order(communicator):
    rank, n = communicator.rank, communicator.size
    after, before = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        return
    data = [np.array([rank, tag, number]) for number in range(5) for tag in (0, 1, MAX_USER_TAG)]
    sends = [communicator.isend(row, after, int(row[1])) for row in data]
    for tag in (MAX_USER_TAG, 0, 1):
        rows = [np.zeros(3, np.int64) for _ in range(5)]
        receives = [communicator.irecv(row, before, tag) for row in rows]
        done(communicator, *receives[::-1])
        assert [row.tolist() for row in rows] == [[before, tag, k] for k in range(5)]
        assert [receive.received_bytes() for receive in receives] == [24] * 5
    done(communicator, *sends)


def check_messages_to_oneself(communicator):
    """Also large ones, the send and the receive first in turn; what does not fit is an error."""
    rank = communicator.rank
    for size in (0, 1, 100_000):
        data = np.arange(size) + rank
        for first in ("send", "receive"):
            rows = [np.zeros(size, np.int64) for _ in range(3)]
            if first == "send":
                sends = [communicator.isend(data + k, rank, k) for k in range(3)]
                assert communicator.probe(2) == (rank, data.nbytes)
            receives = [communicator.irecv(rows[k], rank, k) for k in (2, 0, 1)]
            if first == "receive":
                assert communicator.probe(2) is None
                sends = [communicator.isend(data + k, rank, k) for k in range(3)]
            done(communicator, *receives, *sends)
            assert [receive.received_bytes() for receive in receives] == [data.nbytes] * 3
            for k in range(3):
                np.testing.assert_array_equal(rows[k], data + k)
    unwanted = communicator.irecv(np.zeros(1), rank, 9)
    assert unwanted.cancel()
    receive = communicator.irecv(np.zeros(1), rank, 9)
    done(communicator, communicator.isend(np.ones(2), rank, 9))
    with pytest.raises(TransportError):
        receive.test()
    assert not receive.cancel()


def check_communicators_keep_their_messages_apart(communicator):
    if communicator.size == 1:
        return
    rank = communicator.rank
    other = communicator.split(0, rank)
    if rank == 0:
        done(
            communicator, communicator.isend(np.array([1]), 1, 0), other.isend(np.array([2]), 1, 0)
        )
    elif rank == 1:
        first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
        requests = other.irecv(first, 0, 0), communicator.irecv(second, 0, 0)
        done(communicator, *requests)
        assert (first[0], second[0]) == (2, 1)
    other.free()


def check_a_receive_may_have_more_room(communicator):
    if communicator.size == 1:
        return
    if communicator.rank == 0:
        for size in (0, 1, WHOLE_MESSAGE_BYTES):
            done(communicator, communicator.isend(np.full(size, 7, np.uint8), 1, 3))
    elif communicator.rank == 1:
        for size in (0, 1, WHOLE_MESSAGE_BYTES):
            room = np.zeros(WHOLE_MESSAGE_BYTES, np.uint8)
            receive = communicator.irecv(room, 0, 3)
            done(communicator, receive)
            assert receive.received_bytes() == size
            assert room.sum() == 7 * size


def check_a_message_larger_than_its_room_is_an_error(communicator):
    if communicator.size == 1:
        return
    if communicator.rank == 0:
        done(communicator, communicator.isend(np.ones(64, np.uint8), 1, 3))
        done(communicator, communicator.isend(np.ones(8, np.uint8), 1, 3))
    elif communicator.rank == 1:
        room = np.zeros(8, np.uint8)
        receive = communicator.irecv(room, 0, 3)
        with pytest.raises(TransportError):
            done(communicator, receive)
        done(communicator, communicator.irecv(room, 0, 3))
        assert room.tolist() == [1] * 8


def check_probe_sees_a_message_without_taking_it(communicator):
    if communicator.size == 1:
        assert communicator.probe(5) is None
        return
    last = communicator.size - 1
    if communicator.rank == last:
        done(communicator, communicator.isend(np.zeros(11, np.uint8), 0, 5))
    elif communicator.rank == 0:
        assert communicator.wait(lambda: communicator.probe(5) is not None, 30)
        assert communicator.probe(5) == (last, 11)
        assert communicator.probe(6) is None
        done(communicator, communicator.irecv(np.zeros(11, np.uint8), last, 5))
        assert communicator.probe(5) is None
    done(communicator, communicator.barrier())


def check_a_cancelled_receive_takes_no_message(communicator):
    if communicator.size == 1:
        return
    rank = communicator.rank
    if rank == 1:
        wrong, right = np.zeros(1, np.int64), np.zeros(1, np.int64)
        receive = communicator.irecv(wrong, 0, 2)
        assert not receive.test()
        assert receive.cancel()
    done(communicator, communicator.barrier())
    if rank == 0:
        done(communicator, communicator.isend(np.array([9]), 1, 2))
    elif rank == 1:
        receive = communicator.irecv(right, 0, 2)
        done(communicator, receive)
        assert (wrong[0], right[0]) == (0, 9)
        assert not receive.cancel()
        assert receive.test()


def check_a_wait_ends_at_its_limit(communicator):
    start_s = time.monotonic()
    assert not communicator.wait(lambda: False, 0.02)
    assert 0.015 < time.monotonic() - start_s < 5
    assert communicator.wait(lambda: True, 0)
    assert communicator.wait(lambda: True)
    if communicator.rank == 0:
        request = communicator.barrier()
        if communicator.size > 1:
            assert not communicator.wait(request.test, 0.02)
            send = communicator.isend(np.zeros(1), 1, 0)
            done(communicator, send)
    else:
        if communicator.rank == 1:
            done(communicator, communicator.irecv(np.zeros(1), 0, 0))
        request = communicator.barrier()
    done(communicator, request)
    assert request.test()


def check_collectives_under_way_together(communicator):
    rank, n = communicator.rank, communicator.size
    requests, expected = [], list[Any]()
    for number in range(20):
        total, sizes = np.empty(3), [number % 3] * n
        requests.append(communicator.all_reduce(np.full(3, float(rank + number)), total, "sum"))
        expected.append((total, np.full(3, float(sum(range(n)) + number * n))))
        rows = np.empty(sum(sizes), np.uint8)
        requests.append(communicator.all_gather(np.full(sizes[0], rank, np.uint8), rows, sizes))
        expected.append((rows, np.repeat(np.arange(n, dtype=np.uint8), sizes[0])))
        mine = np.full(2, number if rank == number % n else -1)
        requests.append(communicator.broadcast(mine, number % n))
        expected.append((mine, np.full(2, number)))
    done(communicator, *requests[::-1])
    for got, right in expected:
        assert np.array_equal(got, right)


def check_a_reduction_in_place(communicator):
    n = communicator.size
    for op, right in (("sum", n * (n - 1) / 2), ("max", n - 1), ("min", 0.0)):
        x = np.full(4, float(communicator.rank))
        done(communicator, communicator.all_reduce(None, x, op))
        assert x.tolist() == [right] * 4


CHECKS = {
    name.removeprefix("check_").replace("_", " "): value
    for name, value in dict(vars()).items()
    if name.startswith("check_")
}
