"""Naps that another process ends."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

import numpy as np
import pytest

from mpimesh.comm import ProgressEngine
from mpimesh.comm.arena import Arena, bell_of, map_file
from mpimesh.comm.engine import BELL_BYTES, Doorbell, poll

pytestmark = pytest.mark.skipif(not Doorbell.possible(), reason="needs futexes")

LONG_S = 20.0


def bell():
    return Doorbell(np.zeros(BELL_BYTES, np.uint8))


def test_a_bell_that_has_rung_before_lets_nobody_sleep():
    own = bell()
    rung = own.lie_down()
    own.ring()
    start_s = time.perf_counter()
    assert own.sleep(rung, LONG_S)
    assert time.perf_counter() - start_s < LONG_S / 2
    own.get_up()


def test_nobody_rings():
    own = bell()
    start_s = time.perf_counter()
    assert not own.sleep(own.lie_down(), 0.05)
    assert time.perf_counter() - start_s >= 0.045


def test_who_is_awake_is_not_rung():
    own = bell()
    rung = own.lie_down()
    own.get_up()
    own.ring()
    assert not own.sleep(rung, 0.01)


def test_a_count_that_is_full_begins_anew():
    memory = np.zeros(BELL_BYTES, np.uint8)
    memory[:4].view(np.uint32)[0] = (1 << 32) - 1
    own = Doorbell(memory)
    assert own.lie_down() == (1 << 32) - 1
    own.ring()
    assert own.lie_down() == 0


def test_another_thread_wakes_a_wait():
    engine = ProgressEngine()
    engine.bell = own = bell()
    came: list[float] = []

    def come():
        time.sleep(0.2)
        came.append(time.perf_counter())
        own.ring()

    thread = Thread(target=come)
    thread.start()
    assert poll(lambda: bool(came), LONG_S, engine=engine)
    assert time.perf_counter() - came[0] < LONG_S / 4
    thread.join()


def test_a_wait_without_a_ring_ends_all_the_same():
    engine = ProgressEngine()
    engine.bell = bell()
    end_s = time.perf_counter() + 0.05
    assert poll(lambda: time.perf_counter() > end_s, LONG_S, engine=engine)
    assert not poll(lambda: False, 0.05, engine=engine)


def test_another_process_wakes_one():
    arena = Arena()
    own = arena.bell
    assert own is not None
    rung = own.lie_down()
    child = os.fork()
    if not child:
        # As a neighbour does: by its own mapping of the same file.
        other = bell_of(map_file(os.open(f"/proc/{os.getppid()}/fd/{arena.fd}", os.O_RDWR), 4096))
        time.sleep(0.2)
        if other is not None:
            other.ring()
        os._exit(0)
    start_s = time.perf_counter()
    assert own.sleep(rung, LONG_S)
    assert time.perf_counter() - start_s < LONG_S / 2
    os.waitpid(child, 0)


def test_a_signal_ends_a_nap_and_its_handler_may_raise():
    engine = ProgressEngine()
    engine.bell = bell()

    def handle(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            poll(lambda: False, LONG_S, engine=engine)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not engine.bell.sleep(engine.bell.lie_down(), 0.001)
