"""Received bytes that each operation of a group must count; not run as a check of the suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.contract.meshes import mesh_of

__all__ = ["OPERATIONS", "check_operation"]

Expected = dict[int, tuple[int, int]]
"""Bytes and messages from each other rank."""


def blocks_of(nbytes: int, n: int) -> list[int]:
    return [nbytes // n + (place < nbytes % n) for place in range(n)]


def from_others(rank: int, n: int, nbytes: Callable[[int], int]) -> Expected:
    """One message from each other rank that gives anything."""
    return {peer: (nbytes(peer), 1) for peer in range(n) if peer != rank and nbytes(peer)}


def all_reduce(group: Any, rank: int, n: int, *, elements: int, dtype: str) -> Expected:
    x = np.ones(elements, dtype)
    group.all_reduce(x).resolve()
    blocks = blocks_of(x.nbytes, n)
    found = {
        peer: (blocks[rank] + blocks[peer], (blocks[rank] > 0) + (blocks[peer] > 0))
        for peer in range(n)
        if peer != rank
    }
    return {peer: counts for peer, counts in found.items() if counts[1]}


def reduce(group: Any, rank: int, n: int, *, root: int) -> Expected:
    root %= n
    group.reduce(np.ones(5, "f4"), root=root).resolve()
    return from_others(rank, n, lambda _: 20) if rank == root else {}


def reduce_scatter(group: Any, rank: int, n: int) -> Expected:
    sizes = list(range(n))
    group.reduce_scatter(np.ones((sum(sizes), 2)), sizes=sizes).resolve()
    return from_others(rank, n, lambda _: 16 * rank)


def all_gather(group: Any, rank: int, n: int, *, axis: int) -> Expected:
    sizes = [3 * place for place in range(n)]
    shape = [2, 2]
    shape[axis] = sizes[rank]
    group.all_gather(np.ones(shape, "i2"), axis=axis, sizes=sizes).resolve()
    return from_others(rank, n, lambda peer: 4 * sizes[peer])


def gather(group: Any, rank: int, n: int, *, root: int) -> Expected:
    root %= n
    group.gather(np.ones(7, "i1"), root=root).resolve()
    return from_others(rank, n, lambda _: 7) if rank == root else {}


def all_to_all(group: Any, rank: int, n: int) -> Expected:
    # Rank r gives rank d r * d elements.
    sizes = [rank * peer for peer in range(n)]
    group.all_to_all(np.ones(sum(sizes)), sizes=sizes, recv_sizes=sizes).resolve()
    return from_others(rank, n, lambda peer: 8 * sizes[peer])


def from_root(rank: int, root: int, nbytes: int) -> Expected:
    return {root: (nbytes, 1)} if rank != root and nbytes else {}


def broadcast(group: Any, rank: int, n: int, *, root: int, elements: int) -> Expected:
    root %= n
    group.broadcast(np.ones(elements), root=root).resolve()
    return from_root(rank, root, 8 * elements)


def broadcast_from_whom(group: Any, rank: int, n: int, *, root: int) -> Expected:
    root %= n
    group.broadcast(np.ones(6, "f4") if rank == root else None, root=None).resolve()
    return from_root(rank, root, 24)


def scatter(group: Any, rank: int, n: int, *, root: int) -> Expected:
    root %= n
    sizes = list(range(n))
    x = np.ones((2, sum(sizes))) if rank == root else None
    group.scatter(x, root=root, axis=1, sizes=sizes).resolve()
    return from_root(rank, root, 16 * rank)


def ring(group: Any, rank: int, n: int, *, elements: int, told: bool) -> Expected:
    if n == 1:
        return {}
    before = (rank - 1) % n
    sent = group.send(np.ones((elements, before + 2), "f4"), (rank + 1) % n)
    shape = (elements, (before - 1) % n + 2)
    expected = {"shape": shape, "dtype": "f4"} if told else {}
    group.recv(before, **expected).resolve()
    sent.resolve()
    return {before: (4 * math.prod(shape), 1)}


def shift(group: Any, rank: int, n: int, *, offset: int, wrap: bool) -> Expected:
    group.shift(np.ones(rank + 1), offset, wrap=wrap).resolve()
    source = rank - offset
    if wrap:
        source %= n
    return {source: (8 * (source + 1), 1)} if 0 <= source < n and source != rank else {}


def barrier(group: Any, rank: int, n: int, *, timeout_s: float | None) -> Expected:
    group.barrier(timeout_s=timeout_s)
    return {} if timeout_s is None else from_others(rank, n, lambda _: 8)


OPERATIONS: dict[str, tuple[str, Callable[[Any, int, int], Expected]]] = {
    "all_reduce": ("all_reduce", partial(all_reduce, elements=100, dtype="f8")),
    "all_reduce of one byte": ("all_reduce", partial(all_reduce, elements=1, dtype="u1")),
    "all_reduce of nothing": ("all_reduce", partial(all_reduce, elements=0, dtype="f8")),
    "all_reduce of halves": ("all_reduce", partial(all_reduce, elements=7, dtype="f2")),
    "reduce to the first": ("reduce", partial(reduce, root=0)),
    "reduce to the last": ("reduce", partial(reduce, root=-1)),
    "reduce_scatter": ("reduce_scatter", reduce_scatter),
    "all_gather": ("all_gather", partial(all_gather, axis=0)),
    "all_gather along axis 1": ("all_gather", partial(all_gather, axis=1)),
    "gather": ("gather", partial(gather, root=-1)),
    "all_to_all": ("all_to_all", all_to_all),
    "broadcast": ("broadcast", partial(broadcast, root=-1, elements=11)),
    "broadcast of nothing": ("broadcast", partial(broadcast, root=0, elements=0)),
    "broadcast from whom": ("broadcast", partial(broadcast_from_whom, root=-1)),
    "scatter": ("scatter", partial(scatter, root=-1)),
    "recv": ("recv", partial(ring, elements=9, told=False)),
    "recv of much": ("recv", partial(ring, elements=5000, told=False)),
    "recv of what is told": ("recv", partial(ring, elements=9, told=True)),
    "recv of nothing": ("recv", partial(ring, elements=0, told=False)),
    "shift": ("shift", partial(shift, offset=1, wrap=False)),
    "shift back around": ("shift", partial(shift, offset=-1, wrap=True)),
    "barrier": ("barrier", partial(barrier, timeout_s=None)),
    "barrier with a limit": ("barrier", partial(barrier, timeout_s=30)),
}
"""The operation that counts, and what calls it and tells what it must receive."""


def check_operation(comm: Any, title: str) -> None:
    """Compare what an operation counts with what it must, and with what a budget counts."""
    name, operation = OPERATIONS[title]
    with mesh_of(comm) as mesh:
        group = mesh.group()
        rank, n = group.rank, group.size
        operation(group, rank, n)
        before = mesh.traffic().snapshot()
        with mesh.budget() as budget:
            expected = operation(group, rank, n)
        traffic = mesh.traffic() - before
        found = {
            peer: (one.received_bytes, one.received_messages)
            for peer, one in traffic.by_peer(name).items()
        }
        assert found == expected
        nbytes = sum(one for one, _ in expected.values())
        messages = sum(one for _, one in expected.values())
        assert (traffic.received_bytes, traffic.received_messages) == (nbytes, messages)
        assert (budget.used_bytes, budget.used_messages) == (nbytes, messages)
        assert budget.used_by.get(name, (0, 0)) == (nbytes, messages)
        if n > 1 or name != "recv":
            one = traffic.by_operation()[name]
            assert (one.received_bytes, one.received_messages) == (nbytes, messages)
            assert one.calls == 1
            assert one.bytes == traffic.bytes[name]
