"""Programs on CuPy arrays, from end to end: `mpiexec -n 2 python -m tests.gpu.programs`."""

from __future__ import annotations

import sys
import time

import cupy as cp
import numpy as np

import mpimesh as mm

_SIZES = (8, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
_TURNS = 20


class Report:
    """What was right, as rank 0 prints it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wrong: list[str] = []

    def check(self, name: str, got: object, want: np.ndarray) -> None:
        right = np.allclose(cp.asnumpy(got), want, rtol=1e-6, atol=1e-6)
        if not right:
            self.wrong.append(name)
        if not right or self.rank == 0:
            print(name, "is right" if right else f"is WRONG on rank {self.rank}", flush=True)


def sums(group: mm.ProcessGroup, report: Report, kind: str) -> None:
    """All-reduce and messages of small arrays and of some that are read where they lie."""
    n, total = group.size, np.asarray(group.size * (group.size + 1) // 2)
    mine = report.rank + 1
    for size in (1, 1003, 1 << 20):
        for dtype in ("f4", "f8", "i8", "c16"):
            x = cp.full(size, mine, dtype)
            report.check(f"{size} {dtype} of {kind}", group.all_reduce(x).resolve(), total)
            group.all_reduce(x, out=x).resolve()
            report.check(f"{size} {dtype} of {kind}, in place", x, total)
        if n > 1:
            got = group.shift(cp.full(size, mine, "f4"), 1, wrap=True).resolve()
            report.check(f"a shift of {size} f4 of {kind}", got, np.asarray((mine - 2) % n + 1))


def times(mesh: mm.DeviceMesh, group: mm.ProcessGroup) -> None:
    """Print the time of an all-reduce from a plan."""
    for nbytes in _SIZES:
        x = cp.ones(nbytes // 8)
        planned = group.all_reduce_init(x, out=x)
        planned.start().resolve()
        cp.cuda.get_current_stream().synchronize()
        mesh.barrier()
        start_s = time.perf_counter()
        for _ in range(_TURNS):
            planned.start().resolve()
        cp.cuda.get_current_stream().synchronize()
        each_us = (time.perf_counter() - start_s) / _TURNS * 1e6
        if mesh.rank == 0:
            print(f"all_reduce of {nbytes} B from a plan: {each_us:.1f} us", flush=True)


def main() -> int:
    with mm.DeviceMesh("dp=-1") as mesh:
        cp.cuda.Device(mesh.rank % cp.cuda.runtime.getDeviceCount()).use()
        group, report = mesh.group("dp"), Report(mesh.rank)
        sums(group, report, "the default pool")
        pools = {
            "the asynchronous pool": cp.cuda.MemoryAsyncPool(),
            "managed memory": cp.cuda.MemoryPool(cp.cuda.malloc_managed),
        }
        for kind, pool in pools.items():
            with cp.cuda.using_allocator(pool.malloc):
                sums(group, report, kind)
        # Nothing of the program may be open elsewhere now.
        cp.get_default_memory_pool().free_all_blocks()
        sums(group, report, "the default pool, given back before")
        times(mesh, group)
        if mesh.rank == 0:
            print(group.algorithms())
        return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
