"""When a wait naps, and when it stays awake."""

from __future__ import annotations

import time

import pytest

from mpimesh.comm.engine import poll

WAIT_S = 0.3


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


@pytest.fixture
def naps(monkeypatch):
    slept: list[float] = []
    sleep = time.sleep

    def nap(nap_s: float) -> None:
        slept.append(nap_s)
        sleep(nap_s)

    monkeypatch.setattr(time, "sleep", nap)
    return slept


@pytest.mark.parametrize("test_s", [0.0, 20e-6, 100e-6, 1e-3])
def test_a_wait_naps_however_long_a_test_takes(naps, test_s):
    def ready() -> bool:
        work(test_s)
        return False

    looks: list[float] = []
    start_s = time.thread_time()
    assert not poll(ready, WAIT_S, lambda: looks.append(time.perf_counter()))
    awake_s = time.thread_time() - start_s
    # A third of the time, not counting that in which other processes had the core.
    assert sum(naps) > (sum(naps) + awake_s) / 3
    assert len(looks) >= len(naps)
    assert max(naps) <= 5e-3


def test_a_wait_stays_awake_while_tests_after_naps_copy_what_came_but_looks_around(naps):
    state = {"naps": 0}

    def ready() -> bool:
        if len(naps) > state["naps"]:
            state["naps"] = len(naps)
            work(1e-3)
        return False

    looks: list[float] = []
    assert not poll(ready, WAIT_S, lambda: looks.append(time.perf_counter()))
    assert sum(naps) < WAIT_S / 2
    # A test during which another process had the core seems to take long, and is napped after.
    assert max(naps) <= 5e-3
    assert len(looks) > 1


def test_the_first_true_answer_ends_it():
    answers = iter([False] * 100 + [True])
    assert poll(lambda: next(answers))
    assert not list(answers)
