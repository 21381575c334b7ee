"""Operations of several steps, moved along by whoever waits, and the waits.

Some operations cannot be started at once: a receive of unknown size first needs
the message's header, a checked collective first compares its arguments over the
ranks, a reduction in shared memory first waits for all ranks to come. Such an
operation is a generator that yields one started
:class:`~mpimesh.comm.Request` after the other. Nothing runs in the
background; every wait of the process moves all unfinished operations along, as
MPI itself does.

Operations on one *chain* (the collectives of one group, the messages of one
source and tag) run one after the other, so that their steps meet in the same
order on all ranks. Different chains never wait for each other.

MPI promises progress inside MPI calls only, so a waiting rank has to keep
testing. Doing that in a tight loop is right for the first microseconds and
wrong ever after: with more ranks than cores the spinning rank takes the core
of the one it waits for. So a wait first tests, then tests and yields the core,
then naps, each nap a tenth of the quiet time so far, or until another rank of
the node rings.

Quiet, because a large message may be copied piece by piece inside the tests: a
rank that naps then stops the very transfer it waits for. If the first test after
a nap has copied what came meanwhile, or an operation of several steps is in its
next, the rank stays awake for another while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from itertools import starmap
from threading import RLock
from typing import Any, Self, TypeAlias

from mpimesh.comm.requests import Request
from mpimesh.core.call import State
from mpimesh.core.node import Engine
from mpimesh.errors import MpimeshError

__all__ = [
    "ProgressEngine",
    "StagedRequest",
    "Steps",
    "poll",
    "run_steps",
    "test_often",
]

Steps: TypeAlias = Generator[Request, None, Any]
"""Yields requests, each to be done before the next step; returns the operation's value."""


def run_steps(start: Callable[[], Request | Steps]) -> Steps:
    """Run what `start` starts when its turn has come, be it one request or several steps."""
    started = start()
    if isinstance(started, Generator):
        return (yield from started)
    yield started
    return None


class Moved:
    """A request that does something each time that it is moved along.

    It may begin again once it has settled.

    Args:
        engine: Moves it along until it is settled.
        chain: The operations that are worked one after the other, of which it is one.

    Attributes:
        chain: The engine's chain, on which it is the last one when it begins.
        after: The one before it on its chain, until that has settled.
        done: Whether it is done; False for one that has failed.
    """

    __slots__ = ("_engine", "_error", "_moving", "after", "chain", "done")

    def __init__(self, engine: ProgressEngine, chain: Hashable = None) -> None:
        self._engine = engine
        self._error: BaseException | None = None
        self._moving = False
        self.chain = chain
        self.after: Moved | None = None
        self.done = False

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen, be it done or failed."""
        return self.done or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """The error that it has failed with, if it has; raised at every test."""
        return self._error

    def begin(self) -> Self:
        """Move it along, now and until it is settled, as the last one of its chain."""
        engine = self._engine
        with engine.lock:
            engine.track(self)
            try:  # noqa: SIM105 (a context manager costs more than many an operation's work)
                self.move()
            except MpimeshError:
                pass  # kept by the request, and raised where it is resolved
        return self

    def test(self) -> bool:
        """Do what can be done, and tell whether all is."""
        if self.done:
            return True
        with self._engine.lock:
            if self.after is not None:
                self._engine.move_all()  # those before it, each in its turn
            return self.move()

    def move(self) -> bool:
        """Do the same, by the thread that holds the engine's lock."""
        if self._error is not None:
            raise self._error
        if self._moving:
            return False  # a signal handler came in between, and waits for something else
        try:
            self._moving = True
            # Another thread may have come first.
            if self.after is not None and self.after.settled:
                self.after = None
            self.done = self.done or (self.after is None and self._move())
        except MpimeshError as error:
            self._error = error
            raise
        finally:
            self._moving = False
            if self.done or self._error is not None:
                # At once: it holds arrays, and what starts next is to find nothing unfinished.
                self._engine.untrack(self)
        return self.done

    def _move(self) -> bool:
        """Do what can be done, and tell whether all is."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Move it no more, if it is not settled: it failed with `error`. Its memory is kept."""
        with self._engine.lock:
            if not self.settled:
                self._error = error
                self._engine.given_up.append(self)  # others may yet write into its arrays
                self._engine.untrack(self)


class StagedRequest(Moved):
    """The request for an operation of several steps."""

    __slots__ = ("_current", "_steps", "value")

    def __init__(self, steps: Steps, engine: ProgressEngine, chain: Hashable = None) -> None:
        super().__init__(engine, chain)
        self._steps = steps
        self._current: Request | None = None
        self.value: Any = None

    def give_up(self, error: BaseException) -> None:
        """Move it no more, nor the request of its step."""
        super().give_up(error)
        if isinstance(self._current, Moved):
            self._current.give_up(error)

    def _move(self) -> bool:
        """Run all steps that can run, and tell whether the last one is done."""
        while not self.done:
            if self._current is not None and not self._test(self._current):
                return False
            self._engine.steps += 1
            try:
                self._current = next(self._steps)
            except StopIteration as stop:
                self.value = stop.value
                self.done = True
                self._current = None
            except BaseException as error:
                self._error = error
                raise
        return True

    def _test(self, current: Request) -> bool:
        """Test the request of this step; what a signal handler raises is no error of it."""
        try:
            return current.test()
        except BaseException as error:
            # A request that keeps the error raises it for ever.
            if isinstance(error, MpimeshError) or getattr(current, "error", None) is error:
                self._error = error
            raise


class ProgressEngine(State):
    """All unfinished multi-step operations of one rank.

    Several threads of a rank may start and wait for operations: one at a time moves them along.

    Attributes:
        lock: Held by the thread that moves operations along.
        steps: How many steps have begun so far. A wait during which it grows is a busy one.
        has_core: Whether this rank has a core that no other rank of the job needs.
        core: What it has started in memory that its node shares; None if there is none.
        given_up: The operations that will never end.
        pending: The unfinished operations, in the order of their start.
    """

    __slots__ = ("_crowd", "core", "given_up", "has_core", "lock", "pending", "steps")

    def __init__(self) -> None:
        self.lock = RLock()
        self.steps = 0
        self.has_core = False
        self.core: Engine | None = None
        self.given_up: list[Moved] = []
        self._crowd = 0
        self.pending: list[Moved] = []

    def share_cores(self, ranks: int, cores: int) -> None:
        """Take note that so many ranks have so many cores between them."""
        self._crowd = max(self._crowd, ranks)
        self.has_core = self._crowd <= cores
        if self.core is not None:
            self.core.share_cores(self.has_core)

    def busy(self, chain: Hashable) -> bool:
        """Tell whether an operation of `chain` is unfinished, so that the next must queue."""
        tail = self.tails.get(chain)
        return tail is not None and not tail.settled

    def begin_decided(
        self, chain: Hashable, begin: Callable[..., Request], *arguments: Any
    ) -> Request:
        """Begin a collective of MPI's, once none of `chain` is under way that may start another.

        Such a one may turn to MPI when it finds ordinary arrays, on one rank earlier than on
        another; but MPI's collectives must begin in the same order on all.
        """
        if not self.busy(chain):
            return begin(*arguments)
        return self.stage(chain, run_steps(lambda: begin(*arguments)))

    def stage(self, chain: Hashable, steps: Steps) -> StagedRequest:
        """Start `steps`, at once or after the unfinished operations of `chain`."""
        request = StagedRequest(steps, self, chain)
        with self.lock:
            self.track(request)
            with suppress(Exception):  # kept by the request, and raised where it is resolved
                request.move()
        return request

    def track(self, request: Moved) -> None:
        """Move a request along until it is settled. For the thread that holds the lock.

        Before it does anything: what a signal handler raises may end its start, but then the other
        ranks count on this one all the same.
        """
        request.done = False
        request._error = None
        tails, chain = self.tails, request.chain
        tail = tails.get(chain)
        if tail is not None and not tail.settled:
            request.after = tail
        self.pending.append(request)
        tails[chain] = request

    def untrack(self, request: Moved) -> None:
        """Forget a request that is settled. For the thread that holds the lock."""
        pending, tails, chain = self.pending, self.tails, request.chain
        if pending and pending[-1] is request:
            pending.pop()
        elif request in pending:
            pending.remove(request)
            for later in pending:
                if later.after is request:
                    later.after = None  # it may begin again, and then comes after that one
        if tails.get(chain) is request:
            # A signal handler that waits for something else may have done it meanwhile.
            tails.pop(chain, None)

    def advance(self) -> None:
        """Move every unfinished operation along. An error stays with its operation."""
        if self.core is not None:
            self.core.advance()
        if not self.lock.acquire(blocking=False):
            return  # another thread does it
        try:
            self.move_all()
        finally:
            self.lock.release()

    def move_all(self) -> None:
        """Do the same, by the thread that holds the lock."""
        # A signal handler may end this anywhere: nothing is taken out before it has settled.
        for request in tuple(self.pending):
            if request.settled:
                self.untrack(request)  # its own call was ended
                continue
            try:
                request.move()
            except Exception:
                if not request.settled:
                    raise  # no error of the operation, which goes on


# -- waits ---------------------------------------------------------------------------------------

_EAGER_TESTS = 1
_ALONE: Sequence[tuple[()]] = ((),) * 30
"""So many first tests, some 20 us; empty tuples, as there is nothing to say to a test."""

_SHARING = 10
_ONCE: Sequence[tuple[()]] = ((),)
_OFTEN: Sequence[tuple[()]] = ((),) * 6
_AWAKE: Sequence[tuple[()]] = ((),) * 20
"""So many more tests after a nap: MPICH moves collectives that are under way by a step in each."""
_QUICK_S = 2e-4
"""A test that takes longer is done once after a nap, so that a wait sleeps a third of its time."""

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
    if engine.core is not None and engine.core.is_thread:
        return False  # its wait yields without Python's lock, which the others need
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
        if asleep_s and shortest_s < _QUICK_S and any(starmap(ready, _AWAKE)):
            return True
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
        core = None if engine is None else engine.core
        if core is None:
            time.sleep(nap_s)
            continue
        # The bell is looked at before the rest: what comes after that look ends the nap.
        bell = core.bell()
        if ready():
            return True
        if core.sleep(bell, nap_s):
            quiet_since_s = time.perf_counter()
