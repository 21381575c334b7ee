"""Naps that another process ends."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

import numpy as np
import pytest

from mpimesh.comm import ProgressEngine
from mpimesh.comm.arena import Arena, door_of, map_file
from mpimesh.comm.engine import poll
from mpimesh.core.node import DOOR_BYTES, Door, Engine

LONG_S = 20.0


@pytest.fixture
def core():
    return Engine(Door(np.zeros(DOOR_BYTES, np.uint8)))


def test_a_bell_that_has_rung_before_lets_nobody_sleep(core):
    bell = core.bell()
    core.door.ring()
    start_s = time.perf_counter()
    assert core.sleep(bell, LONG_S)
    assert time.perf_counter() - start_s < LONG_S / 2
    assert core.door.asleep == 0


def test_nobody_rings(core):
    start_s = time.perf_counter()
    assert not core.sleep(core.bell(), 0.05)
    assert time.perf_counter() - start_s >= 0.045


def test_a_count_that_is_full_begins_anew():
    memory = np.zeros(DOOR_BYTES, np.uint8)
    memory[:4].view(np.uint32)[0] = (1 << 32) - 1
    core = Engine(Door(memory))
    bell = core.bell()
    assert bell == (1 << 32) - 1
    core.door.ring()
    assert core.bell() == 0
    assert core.sleep(bell, LONG_S)


def test_too_little_memory_is_no_door():
    with pytest.raises(ValueError, match=f"takes {DOOR_BYTES} bytes"):
        Door(np.zeros(DOOR_BYTES - 1, np.uint8))


def test_another_thread_wakes_a_wait(core):
    engine = ProgressEngine()
    engine.core = core
    came: list[float] = []

    def come():
        time.sleep(0.2)
        came.append(time.perf_counter())
        core.door.ring()

    thread = Thread(target=come)
    thread.start()
    assert poll(lambda: bool(came), LONG_S, engine=engine)
    assert time.perf_counter() - came[0] < LONG_S / 4
    thread.join()


def test_a_wait_without_a_ring_ends_all_the_same(core):
    engine = ProgressEngine()
    engine.core = core
    end_s = time.perf_counter() + 0.05
    assert poll(lambda: time.perf_counter() > end_s, LONG_S, engine=engine)
    assert not poll(lambda: False, 0.05, engine=engine)


def test_another_process_wakes_one():
    arena = Arena()
    core = Engine(arena.door)
    bell = core.bell()
    child = os.fork()
    if not child:
        # As a neighbour does: by its own mapping of the same file.
        other = door_of(map_file(os.open(f"/proc/{os.getppid()}/fd/{arena.fd}", os.O_RDWR), 4096))
        time.sleep(0.2)
        other.ring()
        os._exit(0)
    start_s = time.perf_counter()
    assert core.sleep(bell, LONG_S)
    assert time.perf_counter() - start_s < LONG_S / 2
    os.waitpid(child, 0)


def test_a_signal_ends_a_nap_and_its_handler_may_raise(core):
    engine = ProgressEngine()
    engine.core = core

    def handle(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            poll(lambda: False, LONG_S, engine=engine)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not core.sleep(core.bell(), 0.001)
