"""Work keeps its buffers as long as the transport may use them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpimesh.comm import ProgressEngine, StagedRequest
from mpimesh.core.call import Ring
from mpimesh.errors import PeerLostError, TransportError, UnresolvedWarning
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress
from mpimesh.runtime.work import CollectiveTensor, OpenWork
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
    name = "world"
    ranks = (0, 1)
    communicator: Any = SimpleNamespace(node=None)

    def __init__(self):
        self.progress = Progress()
        self.open_work = OpenWork()
        self.kept = []

    def wait(self, work, timeout_s):
        raise PeerLostError("rank 1 left")

    def abandon(self, *buffers):
        self.kept.append(buffers)


@pytest.mark.parametrize("state", ["under way", "done", "failed"])
def test_buffers_outlive_a_lost_peer(state):
    owner = Owner()
    request = Request(np.ones(3))
    buffer = weakref.ref(request.buffer)
    handle = CollectiveTensor(owner, Call("all_reduce", "world"), request)
    if state == "failed":
        request.error = TransportError("broken")
    if state == "done":
        request.done = True
        handle._fail(PeerLostError("rank 1 left"))
    with raises(TransportError, "broken" if state == "failed" else "rank 1"):
        handle.resolve()
    del handle, request
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
    handle = CollectiveTensor(Owner(), call, Interrupted(done=done), value=7)
    with raises(OSError, "of a handler"):
        handle.resolve()
    assert handle.resolve() == 7


def test_an_interrupted_end_is_an_end_the_next_time():
    request = Request(np.ones(3))
    request.done = True
    ended = []

    class Recorder(Ring):
        def start(self, group, call, nbytes):
            pass

        def end(self, call, failed):
            ended.append(call)
            if len(ended) == 1:
                raise KeyboardInterrupt

    owner = Owner()
    owner.progress.recorder = Recorder(np.zeros(64, np.uint8), 1)
    handle = CollectiveTensor(owner, Call("all_reduce", "world"), request, value=7)
    with pytest.raises(KeyboardInterrupt):
        handle.resolve()
    assert handle.resolve() == 7
    assert len(ended) == 2


def test_an_error_of_a_step_is_that_of_the_operation():
    def steps():
        first = Request(None)
        first.done = True
        yield first
        raise OSError("of a step")

    request = StagedRequest(steps(), ProgressEngine())
    handle = CollectiveTensor(Owner(), Call("all_reduce", "world"), request)
    for _ in range(2):
        with raises(OSError, "of a step"):
            handle.resolve()
    assert handle.done()


@pytest.mark.parametrize("error", [ValueError("bang"), KeyboardInterrupt()])
def test_what_a_handler_raises_before_a_result_is_made_costs_nothing(error):
    class Interrupted(CollectiveTensor):
        def _compare(self):
            nonlocal error
            if error is not None:
                raised, error = error, None
                raise raised

    request = Request(None)
    request.done = True
    handle = Interrupted(Owner(), Call("all_reduce", "world"), request, lambda: 7)
    with pytest.raises(type(error)):
        handle.resolve()
    assert handle.resolve() == handle.resolve() == 7


def test_a_dropped_handle_stays_until_it_is_resolved():
    owner, request = Owner(), Request(np.ones(3))
    buffer = weakref.ref(request.buffer)
    handle = CollectiveTensor(owner, Call("all_reduce", "world"), request, value=7)
    last = [handle]
    del handle, request
    with pytest.warns(UnresolvedWarning, match="dropped"):
        last.clear()
    assert buffer() is not None
    (kept,) = owner.open_work.all()
    kept._request.done = True
    assert kept.resolve() == 7
    del kept
    assert not owner.open_work
    gc.collect()
    assert buffer() is None


def test_a_handle_in_a_dropped_circle_stays_too():
    owner = Owner()
    handle = CollectiveTensor(owner, Call("all_reduce", "world"), Request(None), value=7)
    circle: list[object] = [handle]
    circle.append(circle)
    del handle, circle
    with pytest.warns(UnresolvedWarning, match="dropped"):
        gc.collect()
    (kept,) = owner.open_work.all()
    kept._request.done = True
    assert kept.resolve() == 7


def test_what_arrays_have_a_handle_refuses_and_says_where_it_is():
    request = Request(None)
    request.done = True
    handle: Any = CollectiveTensor(Owner(), Call("all_reduce", "world"), request, value=np.ones(2))
    for name in ("T", "shape", "sum"):
        with raises(AttributeError, "CollectiveTensor", name, f"handle.resolve().{name}"):
            getattr(handle, name)
        assert not hasattr(handle, name)
    with pytest.raises(AttributeError):
        handle.of_nobody  # noqa: B018
    assert handle.resolve().sum() == 2
