"""Times of messages between two ranks, there and back.

Short measurements: they tell the order of magnitude, not the last tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpimesh.arrays.types import HostArray

__all__ = ["SMALL_BYTES", "best_s", "ping_pong"]

SMALL_BYTES = 8

_SMALL_TIMES = 100
_LARGE_TIMES = 4

Pass = Callable[[HostArray], object]
"""Sends a buffer to the other rank, or receives one from there, and waits until it is done."""


def ping_pong(send: Pass, receive: Pass, *, first: bool, large_bytes: int) -> tuple[float, float]:
    """Send to another rank and back. Both do it.

    Args:
        send: Sends to the other one.
        receive: Receives from it.
        first: Whether this rank begins; the other one does not.
        large_bytes: The size of a message by which the speed is told.

    Returns:
        The seconds of 8 bytes one way, and the bytes per second of large ones.
    """
    small, large = np.zeros(SMALL_BYTES, np.uint8), np.zeros(large_bytes, np.uint8)
    there, back = (send, receive) if first else (receive, send)

    def step(buffer: HostArray) -> None:
        there(buffer)
        back(buffer)

    times = []
    for _ in range(_SMALL_TIMES):
        start_s = time.perf_counter()
        step(small)
        times.append(time.perf_counter() - start_s)
    round_s = best_s(lambda: step(large))
    return float(np.median(times)) / 2, 2 * large_bytes / round_s


def best_s(step: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few steps; the first, which warms up, does not count.

    Of several, the fastest is least disturbed by others on the machine.
    """
    step()
    times = []
    for _ in range(_LARGE_TIMES):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return max(min(times), 1e-9)
