"""What of an all-reduce goes on while a rank computes? Measured here, in three ways.

    mpiexec -n 2 python examples/overlap.py
    python examples/overlap.py                       one rank, which has nothing to wait for

    rank 0   start | products ............ | resolve     the waiting for rank 1 costs nothing,
    rank 1   (late)      start | products  | resolve     the sums are work of these cores

A rank has two costs of an all-reduce: it waits for the others, and it helps to add up. What stands
between start and resolve uses the time of waiting. The sums are made by the ranks' own cores, in
start, in resolve, or in done(), which looks after what is under way; a long call of NumPy does not.
The program times an all-reduce with matrix products, when all ranks come at once and when the last
one comes 20 ms late. It prints something like

    all-reduce of 16 MiB and 60 products on 2 rank(s), in ms:      all at once   one late
      first all-reduce, then products                                     17.0       36.2
      products between start and resolve                                  15.9       24.8
      the same, with done() after each product                            16.8       27.6
    of 10.2 ms of products, 10.2 ms fit into the waiting

out/overlap.svg shows it as bars. Where ranks take turns on a core, waiting gives the core to
another rank, so that nothing is won.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from common.figure import save_figure

import mpimesh as mm

MIB, PRODUCTS, SIZE, REPEATS, LATE_S = 16, 60, 192, 20, 0.02
WAYS = (
    "first all-reduce, then products",
    "products between start and resolve",
    "the same, with done() after each product",
)


def main(mib: int = MIB, repeats: int = REPEATS) -> dict[str, list[float]]:
    """Run on one rank of the world; return rank 0's seconds of each way, at once and late."""
    with mm.DeviceMesh("dp=-1") as mesh:
        group = mesh.group("dp")
        gradient = mesh.shared_empty((mib << 18,), np.float32)  # shared: summed where it is
        gradient[:] = 1.0
        a = np.ones((SIZE, SIZE), np.float32)
        b = np.empty_like(a)

        def products(after_each: Callable[[], object] = bool) -> None:
            for _ in range(PRODUCTS):
                np.matmul(a, a, out=b)
                after_each()

        def both(way: str) -> None:
            work = group.all_reduce(gradient, op="mean", out=gradient)  # starts, and returns
            if way == WAYS[0]:
                work.resolve()
                products()
            else:
                products(work.done if way == WAYS[2] else bool)
                work.resolve()

        def timed(action: Callable[[], object], *, late_s: float = 0.0) -> float:
            seconds = []
            for _ in range(repeats):
                mesh.barrier()
                start_s = time.perf_counter()
                if mesh.rank == mesh.size - 1 and mesh.size > 1:
                    time.sleep(late_s)  # as if it had more to do
                action()
                seconds.append(time.perf_counter() - start_s)
            return median(seconds)

        products_s = timed(products)
        seconds = {
            way: [timed(lambda way=way: both(way), late_s=late_s) for late_s in (0.0, LATE_S)]
            for way in WAYS
        }
        if mesh.rank == 0:
            title = (
                f"all-reduce of {mib} MiB and {PRODUCTS} products on {mesh.size} rank(s), in ms:"
            )
            print(f"{title:62} all at once   one late")
            for way, (at_once_s, late_s) in seconds.items():
                print(f"  {way:60}{at_once_s * 1e3:12.1f}{late_s * 1e3:11.1f}")
            if mesh.size == 1:
                print("one rank waits for nobody: try mpiexec -n 2")
            won_s = max(0.0, seconds[WAYS[0]][1] - seconds[WAYS[1]][1])
            print(
                f"of {products_s * 1e3:.1f} ms of products, {min(won_s, products_s) * 1e3:.1f} ms "
                "fit into the waiting"
            )
            save_figure("overlap.svg", lambda axes: draw(axes, seconds), columns=2)
    return seconds


def draw(axes: Any, seconds: dict[str, list[float]]) -> None:
    """Draw a bar for each way."""
    for place, (title, ax) in enumerate(zip(("all at once", "one late"), axes, strict=True)):
        ax.bar(range(len(WAYS)), [seconds[way][place] * 1e3 for way in WAYS])
        ax.set_xticks(range(len(WAYS)), ["in turn", "between", "with done()"])
        ax.set(title=title, ylabel="ms")


if __name__ == "__main__":
    main()
