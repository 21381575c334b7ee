"""Unfinished operations, who moves them along, and how long a rank tests before it waits."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from mpimesh.comm.engine import Moved, ProgressEngine, StagedRequest, poll, test_often as often
from mpimesh.errors import TransportError


class Counted(Moved):
    """Done at the test with a given number; moves along one step each time."""

    def __init__(self, engine, at, failure=None):
        super().__init__(engine, "chain")
        self.at, self.failure, self.moves = at, failure, 0

    def _move(self):
        self.moves += 1
        if self.failure is not None:
            raise self.failure
        return self.moves >= self.at


@pytest.mark.parametrize("at", [1, 2])
def test_what_begins_moves_at_once_and_goes_when_it_is_done(at):
    engine = ProgressEngine()
    request = Counted(engine, at)
    request.begin()
    assert request.moves == 1
    assert (not engine.pending) == engine_is_free(engine) == (at == 1)
    engine.advance()
    assert not engine.pending
    assert engine_is_free(engine)
    assert request.moves == at


def engine_is_free(engine):
    return not engine.busy("chain")


def test_an_error_stays_with_its_operation():
    engine = ProgressEngine()
    request = Counted(engine, 1, TransportError("lost"))
    request.begin()  # does not raise
    assert request.moves == 1


def test_an_interrupted_begin_is_moved_along_all_the_same():
    """The other ranks count on it, though its caller has no handle."""
    engine = ProgressEngine()
    request = Counted(engine, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        request.begin()
    assert engine.busy("chain")
    request.failure = None
    engine.advance()
    assert request.done
    assert not engine.pending


def test_what_has_ended_unseen_holds_nothing_up():
    engine = ProgressEngine()
    request = Counted(engine, 2)
    request.begin()
    assert engine.pending
    request.test()
    assert not engine.pending


@pytest.mark.parametrize(
    ("groups", "own"),
    [([], False), ([(2, 2)], True), ([(3, 2)], False), ([(4, 2), (2, 2)], False), ([(1, 8)], True)],
)
def test_a_core_of_its_own(groups, own):
    engine = ProgressEngine()
    for ranks, cores in groups:
        engine.share_cores(ranks, cores)
    assert engine.has_core is own


@pytest.mark.parametrize("own", [False, True])
def test_the_first_tests_end_with_the_first_that_is_done(own):
    engine = ProgressEngine()
    engine.has_core = own
    for at in (1, 2, 9):
        request = Counted(engine, at)
        assert often(request.test, engine)
        assert request.moves == at
    endless = Counted(engine, 1 << 30)
    assert not often(endless.test, engine)
    assert 5 <= endless.moves <= 50


def test_a_signal_handler_inside_a_step_may_wait_for_something_else():
    """Its wait comes upon the operation that it has interrupted, and leaves it alone."""
    engine = ProgressEngine()
    found: list[bool] = []

    def steps():
        engine.advance()  # as a wait does
        found.append(request.test())
        return 5
        yield

    request = StagedRequest(steps(), engine)
    engine.pending.append(request)
    assert request.test()
    assert found == [False]
    assert request.value == 5


def test_a_request_begins_again_after_what_its_chain_has_under_way():
    engine = ProgressEngine()
    first, second = Counted(engine, 2), Counted(engine, 1)
    for _ in range(2):
        first.moves = second.moves = 0
        first.begin()
        second.begin()
        assert not first.done
        assert not second.done  # it waits for the first
        assert second.test()
        assert first.done
        assert not engine.pending


class Tick(Exception):
    """What a signal handler raises."""


def interrupted(call, at):
    """Raise a Tick as function number `at` is entered in a call; False if it enters fewer.

    There Python looks for signals.
    """
    calls = 0

    def look(frame, event, _):
        nonlocal calls
        calls += 1
        if calls == at:
            raise Tick

    gc.disable()  # in a collection Hypothesis measures the time: its function would count
    sys.settrace(look)
    try:
        call()
    except Tick:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


def test_an_exception_anywhere_in_the_engine_loses_no_operation():
    for at in range(1, 1000):
        engine = ProgressEngine()
        requests = [Counted(engine, 3) for _ in range(3)]
        for request in requests:
            request.begin()
        hit = interrupted(engine.advance, at)
        for _ in range(5):
            engine.advance()
        assert all(request.test() for request in requests), at
        assert not engine.pending
        if not hit:
            break
    assert at > 8


class Failed:
    """A request that keeps its error, and raises it at each test."""

    def __init__(self, error):
        self.error = error

    def test(self):
        raise self.error


@pytest.mark.parametrize("error", [BufferError("read-only"), KeyboardInterrupt()])
def test_a_step_that_failed_ends_its_operation_and_no_other(error):
    engine = ProgressEngine()

    def steps():
        yield Failed(error)

    request = engine.stage("chain", steps()) if isinstance(error, Exception) else None
    if request is None:
        with pytest.raises(KeyboardInterrupt):
            engine.stage("chain", steps())
    engine.advance()
    assert not engine.pending
    assert engine_is_free(engine)
    if request is not None:
        with pytest.raises(type(error)):
            request.test()


def test_what_takes_many_tests_does_not_take_many_naps(monkeypatch):
    """MPICH moves each collective under way by one step in a test, with 1,000 of them, too."""
    tests, naps, sleep = 0, 0, time.sleep

    def ready():
        nonlocal tests
        tests += 1
        if tests == 1:
            sleep(2e-3)  # past the time without naps
        return tests > 3000

    def nap(seconds):
        nonlocal naps
        naps += 1
        sleep(min(seconds, 1e-4))

    monkeypatch.setattr("mpimesh.comm.engine.time.sleep", nap)
    assert poll(ready)
    assert 0 < naps < 300
