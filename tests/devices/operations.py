"""Duties of every way to move device memory, against NumPy; on any fake or real CuPy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["CHECKS", "check_all", "finish", "numbers"]

_FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def numbers(rank: int, size: int, dtype: Any) -> np.ndarray:
    """Return values whose sums and products are exact in every type."""
    values = (np.arange(size) * (rank + 3) + rank) % 3 + 1
    if np.dtype(dtype).kind == "c":
        return (values + 1j * (rank + 1)).astype(dtype)
    return values.astype(dtype)


def reduced(inputs: list[np.ndarray], op: str) -> np.ndarray:
    total = inputs[0]
    for one in inputs[1:]:
        total = _FUNCTIONS[op](total, one)
    return total


def finish(communicator: Any, *requests: Any, limit_s: float = 20) -> None:
    """Wait for requests as a rank does: everything unfinished moves along."""
    left = list(requests)

    def over() -> bool:
        communicator.engine.advance()
        left[:] = [request for request in left if not request.test()]
        return not left

    assert communicator.wait(over, limit_s, what="the test")


def device(values: np.ndarray) -> Any:
    return sys.modules["cupy"].asarray(values)


def host(values: Any) -> np.ndarray:
    result: np.ndarray = sys.modules["cupy"].asnumpy(values)
    return result


def nonsense(size: int, dtype: Any) -> Any:
    return device(np.full(size, 99, dtype))


def same(got: Any, expected: np.ndarray) -> None:
    got = host(got)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def check_all_reduce(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    inputs = [numbers(r, size, dtype) for r in range(comm.size)]
    for op in ("sum", "prod", "min", "max"):
        if strategy.cannot("all_reduce", np.dtype(dtype), op) or (
            np.dtype(dtype).kind == "c" and op in ("min", "max")
        ):
            continue
        send, recv = device(inputs[comm.rank]), nonsense(size, dtype)
        in_place = device(inputs[comm.rank])
        requests = strategy.all_reduce(send, recv, op), strategy.all_reduce(None, in_place, op)
        finish(comm, *requests)
        same(recv, reduced(inputs, op))
        same(in_place, reduced(inputs, op))
        same(send, inputs[comm.rank])


def check_reduce(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    inputs = [numbers(r, size, dtype) for r in range(comm.size)]
    if strategy.cannot("reduce", np.dtype(dtype), "sum"):
        return
    for root in {0, comm.size - 1}:
        send = device(inputs[comm.rank])
        recv = nonsense(size, dtype) if comm.rank == root else None
        finish(comm, strategy.reduce(send, recv, "sum", root))
        if recv is not None:
            same(recv, reduced(inputs, "sum"))
        same(send, inputs[comm.rank])


def check_reduce_scatter(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    if strategy.cannot("reduce_scatter", np.dtype(dtype), "sum"):
        return
    for counts in ([size] * comm.size, [size * r for r in range(comm.size)]):
        inputs = [numbers(r, sum(counts), dtype) for r in range(comm.size)]
        start = sum(counts[: comm.rank])
        send, recv = device(inputs[comm.rank]), nonsense(counts[comm.rank], dtype)
        finish(comm, strategy.reduce_scatter(send, recv, counts, "sum"))
        same(recv, reduced(inputs, "sum")[start : start + counts[comm.rank]])
        same(send, inputs[comm.rank])


def check_all_gather(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    for counts in ([size] * comm.size, [size * r for r in range(comm.size)]):
        inputs = [numbers(r, counts[r], dtype) for r in range(comm.size)]
        send, recv = device(inputs[comm.rank]), nonsense(sum(counts), dtype)
        finish(comm, strategy.all_gather(send, recv, counts))
        same(recv, np.concatenate(inputs))


def check_gather_and_scatter(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    counts = [size + r for r in range(comm.size)]
    inputs = [numbers(r, counts[r], dtype) for r in range(comm.size)]
    whole = np.concatenate(inputs)
    for root in {0, comm.size - 1}:
        recv = nonsense(whole.size, dtype) if comm.rank == root else None
        finish(comm, strategy.gather(device(inputs[comm.rank]), recv, counts, root))
        if recv is not None:
            same(recv, whole)
        send = device(whole) if comm.rank == root else None
        part = nonsense(counts[comm.rank], dtype)
        finish(comm, strategy.scatter(send, part, counts, root))
        same(part, inputs[comm.rank])


def check_all_to_all(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    n, me = comm.size, comm.rank
    counts = [[(size * (s + 2 * d)) % (2 * size + 1) for d in range(n)] for s in range(n)]
    inputs = [numbers(s, sum(counts[s]), dtype) for s in range(n)]
    blocks = [np.split(inputs[s], np.cumsum(counts[s])[:-1]) for s in range(n)]
    incoming = [counts[s][me] for s in range(n)]
    recv = nonsense(sum(incoming), dtype)
    finish(comm, strategy.all_to_all(device(inputs[me]), recv, counts[me], incoming))
    same(recv, np.concatenate([blocks[s][me] for s in range(n)]))


def check_broadcast(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    for root in {0, comm.size - 1}:
        values = numbers(root, size, dtype)
        buffer = device(values) if comm.rank == root else nonsense(size, dtype)
        finish(comm, strategy.broadcast(buffer, root))
        same(buffer, values)


def check_order(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    """Inputs are made late, results are used at once, and inputs are written right afterwards."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        values = device(numbers(comm.rank, size, dtype))
        if hasattr(stream, "delay"):
            stream.delay(7 * (comm.rank + 1))
        send, recv = values + values, nonsense(size, dtype)
        finish(
            comm,
            strategy.all_gather(
                send, both := nonsense(size * comm.size, dtype), [size] * comm.size
            ),
        )
        twice = both + both
        send[...] = 0
        again = device(numbers(comm.rank, size, dtype)) + 0
        finish(comm, strategy.all_reduce(again, recv, "sum"))
        again[...] = 0
        third = recv + recv
        inputs = [numbers(r, size, dtype) for r in range(comm.size)]
        same(twice, np.concatenate([4 * one for one in inputs]).astype(dtype))
        same(third, (2 * reduced(inputs, "sum")).astype(dtype))


def check_messages(strategy: Any, comm: Any, size: int, dtype: Any) -> None:
    if comm.size == 1 or strategy.cannot("messages"):
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    send, recv = device(numbers(comm.rank, size, dtype)), nonsense(size, dtype)
    finish(comm, strategy.irecv(recv, before, 5), strategy.isend(send, after, 5))
    same(recv, numbers(before, size, dtype))


CHECKS: list[Callable[[Any, Any, int, Any], None]] = [
    *(check_all_reduce, check_reduce, check_reduce_scatter, check_all_gather),
    *(check_gather_and_scatter, check_all_to_all, check_broadcast, check_messages),
]


def check_all(strategy: Any, comm: Any, *, dtypes: Any, sizes: Any = (1, 13)) -> None:
    for check in CHECKS:
        for dtype in dtypes:
            for size in sizes:
                check(strategy, comm, size, dtype)
    check_order(strategy, comm, 5, np.float32)
