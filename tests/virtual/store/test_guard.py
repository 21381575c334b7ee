"""A guard on virtual ranks: all stop after the same step, whichever is asked and whenever."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import MeshError
from mpimesh.store import RunGuard, run_guard
from tests.helpers.depth import examples

LAST = 12


@given(
    ranks=st.integers(1, 5),
    asked=st.dictionaries(st.integers(0, 4), st.integers(0, LAST), max_size=3),
    naps=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, LAST)), st.just(2e-3)),
)
@settings(max_examples=examples(60))
def test_all_stop_after_the_same_step(ranks, asked, naps):
    """A rank's note counts from the call after it, and is answered by the next at the latest."""

    def main():
        guard = run_guard(())
        with mm.DeviceMesh("dp=-1") as mesh:
            for step in range(LAST):
                time.sleep(naps.get((mesh.rank, step), 0))
                if asked.get(mesh.rank) == step:
                    guard.stop()
                if guard.stopping(mesh):
                    assert guard.stopping(mesh)
                    assert guard.stopped
                    return step, guard.reason, guard.code
        return None, guard.reason, guard.code

    notes = [step for rank, step in asked.items() if rank < ranks]
    first = min(notes, default=LAST)
    stop = first + 1 if first else 0  # the first call waits for its own answer
    expected = (stop, "the program", 85) if stop < LAST else (None, "", 0)
    assert mm.run_virtual(ranks, main) == [expected] * ranks


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_process_stops_all_its_ranks(number):
    before = signal.getsignal(number)

    def main(guard: RunGuard):
        with mm.DeviceMesh("dp=-1") as mesh:
            for step in range(10**6):
                if step == 20 and mesh.rank == 2:
                    os.kill(os.getpid(), number)
                if guard.stopping(mesh):
                    return step, guard.reason

    with run_guard() as guard:
        results = mm.run_virtual(4, main, guard)
        assert len(set(results)) == 1
        assert results[0][0] >= 20
        assert results[0][1] == number.name
        assert str(guard) == f"<RunGuard of SIGUSR1, SIGTERM, stopped by {number.name}>"
        with pytest.raises(SystemExit) as caught:
            mm.run_virtual(1, guard.exit)
        assert caught.value.code == 85
    assert signal.getsignal(number) == before


def test_a_mesh_may_change_and_close_between_two_calls():
    def main():
        guard = run_guard(())
        answers = []
        with mm.DeviceMesh("dp=-1") as mesh:
            answers += [guard.stopping(mesh), guard.stopping(mesh)]
            mesh.reshape("a=2,b=2")
            answers += [guard.stopping(mesh), guard.stopping(mesh)]
            with mm.DeviceMesh("x=-1", mesh.comm) as other:
                answers += [guard.stopping(other), guard.stopping(mesh)]
            mesh.set_comm(mesh.comm)
            answers += [guard.stopping(mesh), guard.stopping(mesh)]
            guard.stop()
            answers += [guard.stopping(mesh), guard.stopping(mesh)]
        with mm.DeviceMesh("dp=-1") as mesh:
            answers.append(guard.stopping(mesh))
        return answers

    assert mm.run_virtual(4, main) == [[False] * 9 + [True] * 2] * 4


def test_ranks_that_a_mesh_leaves_out_have_no_part():
    def main():
        guard = run_guard(())
        with mm.DeviceMesh(mm.Mesh("dp=2")) as mesh:
            if mesh.rank < 2:
                guard.stop()
                return guard.stopping(mesh)
            with pytest.raises(mm.errors.RankError):
                guard.stopping(mesh)

    assert mm.run_virtual(3, main) == [True, True, None]


def test_an_error_ends_the_mesh_as_ever():
    def main():
        guard = run_guard(())
        with mm.DeviceMesh("dp=-1") as mesh:
            guard.stopping(mesh)
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        mm.run_virtual(2, main)


def test_the_time_runs_out():
    guard = run_guard((), margin_s=10, limit_s=10.2)

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            for step in range(10**6):
                if guard.stopping(mesh):
                    return step, guard.reason

    ((steps, reason),) = set(mm.run_virtual(3, main))
    assert steps > 0
    assert reason == "the time limit"
    assert 0 < guard.time_left_s < 10


def test_the_time_that_slurm_tells(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert 98 < run_guard(()).time_left_s <= 100
    assert run_guard((), limit_s=50).time_left_s <= 50
    assert run_guard((), limit_s=200).time_left_s <= 100
    monkeypatch.setenv("SLURM_JOB_END_TIME", "")
    assert run_guard((), margin_s=5).time_left_s == float("inf")


def test_only_the_main_thread_gets_signals():
    def main():
        run_guard()

    with pytest.raises(MeshError, match="only the main thread gets signals"):
        mm.run_virtual(2, main)
    caught = []

    def attempt():
        try:
            run_guard()
        except MeshError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert caught


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"signals": [signal.SIGKILL]}, "SIGKILL cannot be handled"),
        ({"signals": [10_000]}, "signals must be of this system's, got 10000"),
        ({"signals": ["SIGTERM"]}, "a signal must be a whole number"),
        ({"signals": 15}, "signals must be"),
        ({"margin_s": -1}, "margin_s must be a number of seconds"),
        ({"limit_s": "1h"}, "limit_s must be a number of seconds"),
        ({"code": 0}, "code must be"),
        ({"code": 256}, "code must be from 1 to 255, got 256"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(MeshError, match=said) as caught:
        run_guard(**arguments)
    assert caught.value.agreed
    assert signal.getsignal(signal.SIGTERM) == before


def test_who_has_a_signal_since_keeps_it():
    def mine(number, frame):
        raise AssertionError

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with run_guard([signal.SIGUSR1]):
            signal.signal(signal.SIGUSR1, mine)
        assert signal.getsignal(signal.SIGUSR1) == mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_interrupt_interrupts(monkeypatch):
    """The same one from two sides at once is one; of SIGUSR1 there may be many."""
    # Where tests run side by side, their processes ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with run_guard([signal.SIGINT, signal.SIGUSR1]) as guard:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        later_s = time.monotonic() + 2
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr(time, "monotonic", lambda: later_s)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert (guard.code, guard.stopped) == (0, False)
