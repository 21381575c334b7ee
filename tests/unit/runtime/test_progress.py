"""Operations of several steps: their order, their errors, and what is kept of them."""

from __future__ import annotations

import pytest

from mpimesh.runtime.progress import Progress
from mpimesh.runtime.world import solo_communicator
from tests.helpers.raises import raises


class Gate:
    """A request that is done when it is opened."""

    def __init__(self):
        self.open = False

    def test(self):
        return self.open


def steps(log, name, *gates, value=None):
    log.append(f"{name} starts")
    for gate in gates:
        yield gate
        log.append(f"{name} moves")
    return value


def fails(error):
    raise error
    yield


def test_a_request_that_needs_nothing_is_done_at_once():
    progress = Progress()
    request = progress.stage("chain", steps([], "a", value=3))
    assert request.done
    assert request.value == 3
    assert not progress.pending
    assert not progress.busy("chain")


def test_one_chain_runs_in_order_and_others_do_not_wait():
    progress, log = Progress(), list[str]()
    first, second, third = Gate(), Gate(), Gate()
    a = progress.stage("x", steps(log, "a", first))
    b = progress.stage("x", steps(log, "b", second))
    c = progress.stage("y", steps(log, "c", third))
    assert log == ["a starts", "c starts"]
    assert progress.busy("x")
    second.open = third.open = True
    progress.advance()
    assert log == ["a starts", "c starts", "c moves"]
    assert c.done
    first.open = True
    progress.advance()
    assert log[3:] == ["a moves", "b starts", "b moves"]
    assert a.done
    assert b.done
    assert not progress.pending


def test_an_error_stays_with_its_operation_and_the_next_goes_on():
    progress, log = Progress(), list[str]()
    gate = Gate()

    def waits_then_fails():
        yield gate
        raise ZeroDivisionError

    failing = progress.stage("x", waits_then_fails())
    after = progress.stage("x", steps(log, "after"))
    gate.open = True
    progress.advance()
    assert failing.settled
    assert not failing.done
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.test()
    assert after.done
    at_once = progress.stage("x", fails(KeyError("k")))
    with pytest.raises(KeyError):
        at_once.test()
    assert not progress.pending


def test_an_operation_may_stage_others():
    progress, log = Progress(), list[str]()
    gate = Gate()

    def outer():
        inner = progress.stage("inner", steps(log, "inner", gate, value=7))
        yield inner
        return inner.value + 1

    request = progress.stage("outer", outer())
    assert not request.done
    gate.open = True
    progress.advance()
    progress.advance()
    assert request.done
    assert request.value == 8


def test_a_wait_moves_everything_along():
    progress, log = Progress(), list[str]()
    gate, communicator = Gate(), solo_communicator()
    gate.open = True
    late = Gate()
    progress.stage("x", steps(log, "x", late))
    other = progress.stage("y", steps(log, "y", gate))
    late.open = True
    assert progress.wait(communicator, other, what="y")
    assert log[-1].endswith("moves")
    assert progress.current is None
    never = progress.stage("z", steps(log, "z", Gate()))
    assert not progress.wait(communicator, never, what="z", timeout_s=0.01)
    assert progress.current is None


def test_nothing_is_kept_of_what_is_over():
    progress = Progress()
    for number in range(1000):
        progress.stage(object(), steps([], number))
    assert len(progress.tails) == 0
    blocked = Gate()
    progress.stage("blocked", steps([], "b", blocked))
    gates = []
    for _ in range(1000):
        gates.append(Gate())
        progress.stage(object(), steps([], "c", gates[-1]))
        gates[-1].open = True
        progress.advance()
    assert len(progress.tails) < 5
    assert progress.busy("blocked")


class Interrupted(Gate):
    """A request during whose first tests a signal handler raises."""

    def __init__(self, error, times):
        super().__init__()
        self.raised = error
        self.times = times

    def test(self):
        self.times -= 1
        if self.times >= 0:
            raise self.raised
        return self.open


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("of a handler")])
def test_an_interrupt_ends_no_operation(error):
    """Neither the one that was tested nor those whose turn had yet to come."""
    progress, log = Progress(), list[str]()
    door, gate = Gate(), Gate()
    interrupted = Interrupted(error, 2)
    a = progress.stage("a", steps(log, "a", door, interrupted))
    b = progress.stage("b", steps(log, "b", gate))
    gate.open = True
    door.open = True
    for _ in range(2):
        with pytest.raises(type(error)):
            progress.advance()
        assert not a.settled
    interrupted.open = True
    progress.advance()
    assert a.done
    assert b.done
    assert log == ["a starts", "b starts", "a moves", "a moves", "b moves"]


def test_an_error_of_a_step_within_a_step_is_its_own():
    progress = Progress()
    gate = Gate()

    def inner():
        yield gate
        raise OSError("inner")

    a = progress.stage("a", steps([], "a", progress.stage("b", inner())))
    gate.open = True
    progress.advance()
    assert not progress.pending
    with raises(OSError, "inner"):
        a.test()


def test_exceptions_that_are_raised_again_make_no_circle():
    first, second, kept = OSError("first"), ValueError("second"), KeyError("kept")
    first.__context__, second.__context__ = second, first
    with raises(OSError, "first"), Progress().keeping(kept):
        raise first
    last, cause = OSError("last"), ValueError("cause")
    cause.__context__ = last
    with raises(OSError, "last"), Progress().keeping(cause):
        raise last
    assert last.__context__ is None
