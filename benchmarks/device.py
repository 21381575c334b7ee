"""Device memory: all-reduce of 1 KiB to 1 GiB and hand-over of 8 and 64 MiB, way by way.

Beside each figure stands the limit: the time in which this GPU reads and writes each rank's bytes
once, at the copy bandwidth measured in the same run. Ranks that share a GPU share its bandwidth.
Rows need CuPy and a GPU; without, there are none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mpimesh as mm
from benchmarks.measure import FULL, Effort

__all__ = ["available", "run"]

SIZES_BYTES = tuple(1 << power for power in range(10, 31, 2))
HAND_OVER_BYTES = (8 << 20, 64 << 20)
WAYS = ("cuda_ipc", "nccl", "mpi_cuda", "staged")
_ROUNDS = 7
_LIMIT_BYTES = 1 << 28
"""Larger arrays are left out where memory for them and their copies is short."""


def available() -> str:
    """Return why there is nothing to be measured, or nothing."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"no CuPy: {error}"
    except Exception as error:  # CuPy's own class, which needs CuPy
        return f"no GPU: {error}"
    return "" if count else "no GPU"


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way and size; none without a GPU."""
    if available():
        return []
    import cupy

    device = cupy.cuda.Device(mesh.rank % cupy.cuda.runtime.getDeviceCount())
    with device:
        return [*_all_reduce(mesh, cupy, effort), *_hand_over(mesh, cupy, effort)]


def _all_reduce(mesh: mm.DeviceMesh, cupy: Any, effort: Effort) -> list[dict[str, Any]]:
    from mpimesh.comm.device_communicator import DeviceCommunicator
    from mpimesh.errors import GroupError

    communicator = mesh.group().communicator
    free_bytes = _least(mesh, cupy.cuda.runtime.memGetInfo()[0]) // communicator.size
    rows = []
    for nbytes in effort.sizes(SIZES_BYTES):
        if nbytes > _LIMIT_BYTES and 4 * nbytes > free_bytes:
            continue
        x, y = cupy.ones(nbytes // 4, cupy.float32), cupy.empty(nbytes // 4, cupy.float32)
        # Each rank's bytes are read once and written once.
        limit_s = _time(mesh, cupy, partial(cupy.copyto, y, x))
        rows.append(_row(f"limit, {nbytes:,} B", limit_s, limit_s))
        for way in WAYS:
            dev_comm = DeviceCommunicator(communicator, prefer=way)

            def call(dev_comm: DeviceCommunicator = dev_comm, x: Any = x, y: Any = y) -> None:
                _wait(mesh, dev_comm.all_reduce(x, y, "sum"))

            try:
                spent_s = _time(mesh, cupy, call)
            except GroupError as error:
                if mesh.rank == 0:
                    print(f"{way}: {error}", file=sys.stderr)
                continue
            finally:
                dev_comm.free()
            rows.append(_row(f"all_reduce by {way}, {nbytes:,} B", spent_s, limit_s))
    return rows


def _hand_over(mesh: mm.DeviceMesh, cupy: Any, effort: Effort) -> list[dict[str, Any]]:
    from mpimesh.comm.device_communicator import DeviceCommunicator

    communicator = mesh.group().communicator
    if communicator.size == 1:
        return []
    rows = []
    for nbytes in effort.sizes(HAND_OVER_BYTES):
        x, y = cupy.ones(nbytes // 4, cupy.float32), cupy.empty(nbytes // 4, cupy.float32)
        limit_s = _time(mesh, cupy, partial(cupy.copyto, y, x))
        rows.append(_row(f"limit, {nbytes:,} B", limit_s, limit_s))
        for way in ("cuda_ipc", "mpi_cuda", "staged"):
            dev_comm = DeviceCommunicator(communicator, prefer=way)
            _wait(mesh, dev_comm.prepare())
            if not any(row.algorithm == way for row in dev_comm.algorithms()[:1]):
                dev_comm.free()  # messages would go another way
                continue

            def call(dev_comm: DeviceCommunicator = dev_comm, x: Any = x, y: Any = y) -> None:
                if mesh.rank == 0:
                    _wait(mesh, dev_comm.isend(x, 1, 0))
                elif mesh.rank == 1:
                    _wait(mesh, dev_comm.irecv(y, 0, 0))

            rows.append(_row(f"hand-over by {way}, {nbytes:,} B", _time(mesh, cupy, call), limit_s))
            dev_comm.free()
    return rows


def _wait(mesh: mm.DeviceMesh, request: Any) -> None:
    mesh.group()._core.wait_for(request, what="the benchmark")


def _time(mesh: mm.DeviceMesh, cupy: Any, call: Callable[[], object]) -> float:
    """Return the median over rounds of the slowest rank's seconds, the device's work included."""
    stream = cupy.cuda.get_current_stream()
    seconds = []
    for number in range(_ROUNDS + 1):
        stream.synchronize()
        mesh.barrier()
        start_s = time.perf_counter()
        call()
        stream.synchronize()
        spent_s = _most(mesh, time.perf_counter() - start_s)
        if number:  # the first one warms up
            seconds.append(spent_s)
    return sorted(seconds)[len(seconds) // 2]


def _most(mesh: mm.DeviceMesh, value: float) -> float:
    return float(mesh.group().all_reduce([value], "max").resolve()[0])


def _least(mesh: mm.DeviceMesh, value: int) -> int:
    return int(mesh.group().all_reduce([value], "min").resolve()[0])


def _row(what: str, spent_s: float, limit_s: float) -> dict[str, Any]:
    return {
        "what": what,
        "us": spent_s * 1e6,
        "ratio": spent_s / limit_s,
        "over_us": (spent_s - limit_s) * 1e6,
    }
