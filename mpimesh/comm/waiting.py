"""Wait for an operation that only moves on while somebody asks for it.

MPI promises progress inside MPI calls only, so a waiting rank has to keep
testing. Doing that in a tight loop is right for the first microseconds and
wrong ever after: with more ranks than cores the spinning rank takes the core
of the one it waits for. So a wait first tests, then tests and yields the core,
then naps, each nap a tenth of the quiet time so far, or until another rank of
the node rings (`doorbell.py`).

Quiet, because a large message may be copied piece by piece inside the tests: a
rank that naps then stops the very transfer it waits for. If the first test after
a nap has copied what came meanwhile, or an operation of several steps is in its
next, the rank stays awake for another while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import starmap

from mpimesh.comm.engine import ProgressEngine

__all__ = ["poll", "test_often"]

_EAGER_TESTS = 1
_ALONE: Sequence[tuple[()]] = ((),) * 30
"""So many first tests, some 20 us; empty tuples, as there is nothing to say to a test."""

_SHARING = 10
_ONCE: Sequence[tuple[()]] = ((),)
_OFTEN: Sequence[tuple[()]] = ((),) * 6
_YIELD_S = 1e-3
_NAP_SHARE = 0.1
_LONGEST_NAP_S = 5e-3
_COPYING_S = 200e-6
"""Processor time above that of the shortest test of the same wait. A test that copies nothing takes
up to 100 us after a nap, for its memory is cold; one that does finds all that came in the nap."""


def test_often(test: Callable[[], bool], engine: ProgressEngine) -> bool:
    """Test a few times in a row, and tell whether it was over by then.

    Setting up a wait takes 10 us. Where each rank has a core of its own, most small operations are
    over by then. Where ranks share cores, who is waited for may need this one.
    """
    if test():
        return True
    if engine.has_core:
        return any(starmap(test, _ALONE))
    for _ in range(_SHARING):
        os.sched_yield()
        if test():
            return True
    return False


def poll(
    ready: Callable[[], bool],
    timeout_s: float | None = None,
    idle: Callable[[], None] | None = None,
    engine: ProgressEngine | None = None,
) -> bool:
    """Call `ready` until it is True or `timeout_s` has passed; return its last answer.

    Args:
        ready: Tells whether the wait is over.
        timeout_s: Longest wait; None waits as long as it takes.
        idle: Called before each nap.
        engine: What `ready` moves along.

    Cost:
        A wait of t seconds ends at most ``min(0.1 t, 5 ms)`` late, and one shorter than a
        millisecond not late at all; nor one that a rank of the same node ends, for it rings.
    """
    for _ in range(_EAGER_TESTS):
        if ready():
            return True
    start_s = quiet_since_s = time.perf_counter()
    limit_s = float("inf") if timeout_s is None else timeout_s
    steps = 0 if engine is None else engine.steps
    shortest_s = float("inf")
    often = _OFTEN if engine is not None and engine.has_core else _ONCE
    asleep_s = 0.0  # processor time at which a nap began
    while True:
        os.sched_yield()
        begin_s = time.perf_counter()
        # MPI moves a large message only while it is asked: where that takes time from no other
        # rank, it is asked more often than the clock is looked at.
        if any(starmap(ready, often)):
            return True
        now_s = time.perf_counter()
        shortest_s = min(shortest_s, now_s - begin_s)
        if asleep_s and time.thread_time() - asleep_s > shortest_s + _COPYING_S:
            quiet_since_s = now_s
        asleep_s = 0.0
        if now_s - start_s >= limit_s:
            return False
        if engine is not None and engine.steps != steps:
            steps, quiet_since_s = engine.steps, now_s
        quiet_s = now_s - quiet_since_s
        if quiet_s < _YIELD_S:
            continue
        if idle is not None:
            idle()
        asleep_s = time.thread_time()
        nap_s = min(_NAP_SHARE * quiet_s, _LONGEST_NAP_S, limit_s - (now_s - start_s))
        bell = None if engine is None else engine.bell
        if bell is None:
            time.sleep(nap_s)
            continue
        rung = bell.lie_down()
        try:
            if ready():
                return True
            if bell.sleep(rung, nap_s):
                quiet_since_s = time.perf_counter()
        finally:
            bell.get_up()
