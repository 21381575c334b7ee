"""An operation keeps its buffers as long as the transport may use them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from mpimesh.errors import PeerLostError, TransportError
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.work import CollectiveTensor, Operation
from mpimesh.transport import Engine, StagedRequest
from tests.helpers.raises import raises


class Request:
    """A request whose state the test decides."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.done = False
        self.error = None

    def test(self):
        if self.error is not None:
            raise self.error
        return self.done


class Owner:
    """A group in which whatever is waited for is lost."""

    world_rank = 0

    def __init__(self):
        self.progress = Progress()
        self.kept = []

    def wait(self, operation, timeout_s):
        raise PeerLostError("rank 1 left")

    def forget(self, operation):
        pass

    def complete(self, operation):
        operation.settle()

    def abandon(self, *buffers):
        self.kept.append(buffers)


@pytest.mark.parametrize("state", ["under way", "done", "failed"])
def test_buffers_outlive_a_lost_peer(state):
    owner = Owner()
    request = Request(np.ones(3))
    buffer = weakref.ref(request.buffer)
    operation = Operation(owner, Call("all_reduce", "world"), request, None)
    if state == "failed":
        request.error = TransportError("broken")
    handle = CollectiveTensor(operation)
    if state == "done":
        request.done = True
        operation.fail(PeerLostError("rank 1 left"))
    with raises(TransportError, "broken" if state == "failed" else "rank 1"):
        handle.resolve()
    del handle, operation, request
    gc.collect()
    assert (buffer() is not None) == (state == "under way")


class Interrupted(Request):
    """A request during whose first test a handler raises."""

    def __init__(self, *, done):
        super().__init__(None)
        self.settled = done
        self.tests = 0

    def test(self):
        self.tests += 1
        if self.tests == 1:
            raise OSError("of a handler")
        return True


@pytest.mark.parametrize("done", [False, True])
def test_what_a_handler_raises_leaves_the_result_to_be_taken(done):
    """Also if the operation was over by then: a handler may raise between two instructions."""
    call = Call("all_reduce", "world")
    handle = CollectiveTensor(Operation(Owner(), call, Interrupted(done=done), None, value=7))
    with raises(OSError, "of a handler"):
        handle.resolve()
    assert handle.resolve() == 7


def test_an_interrupted_end_is_an_end_the_next_time():
    request = Request(np.ones(3))
    request.done = True
    forgotten = []

    class Busy(Owner):
        def forget(self, operation):
            forgotten.append(operation)
            if len(forgotten) == 1:
                raise KeyboardInterrupt

    call = Call("all_reduce", "world")
    handle = CollectiveTensor(Operation(Busy(), call, request, None, value=7))
    with pytest.raises(KeyboardInterrupt):
        handle.resolve()
    assert handle.resolve() == 7
    assert len(forgotten) == 2


def test_an_error_of_a_step_is_that_of_the_operation():
    def steps():
        first = Request(None)
        first.done = True
        yield first
        raise OSError("of a step")

    request = StagedRequest(steps(), Engine())
    handle = CollectiveTensor(Operation(Owner(), Call("all_reduce", "world"), request, None))
    for _ in range(2):
        with raises(OSError, "of a step"):
            handle.resolve()
    assert handle.done()
