"""The watchdog of virtual ranks: who waits where, who is missing, and an end in time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import CollectiveTimeoutError
from tests.helpers.raises import names


def test_the_missing_rank_is_named_and_the_wait_ends(monkeypatch):
    monkeypatch.setenv("MPIMESH_TIMEOUT_S", "0.3")
    release = threading.Event()
    told: list[str] = []

    def main() -> None:
        with mm.DeviceMesh("dp=3") as mesh:
            if mesh.rank == 1:
                release.wait(60)
            try:
                mesh.group().all_reduce(np.ones(2), label="the sum").resolve()
            except CollectiveTimeoutError as error:
                told.append(str(error))
                raise

    start_s = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        mm.run_virtual(3, main)
    assert time.monotonic() - start_s < 10
    release.set()
    text = str(caught.value)
    names(text, "MPIMESH_TIMEOUT_S=0.3", "all_reduce(shape (2,)", "'the sum'")
    assert "missing: rank 1\n" in text
    assert "ranks 0, 2: in all_reduce" in text
    assert "rank 1: in no operation of mpimesh" in text
    assert f"on group 'world' at {__file__}:" in text
    assert told == [text, text]


def test_short_waits_are_no_reason(monkeypatch):
    monkeypatch.setenv("MPIMESH_TIMEOUT_S", "0.4")

    def main() -> float:
        with mm.DeviceMesh("dp=2") as mesh:
            total = 0.0
            for _ in range(4):  # longer than the limit together, but not one by one
                if mesh.rank == 1:
                    time.sleep(0.15)
                total += float(mesh.group().all_reduce(np.ones(1)).resolve()[0])
            return total

    assert mm.run_virtual(2, main) == [8.0, 8.0]


def test_a_deadlock_is_still_told_at_once(monkeypatch):
    monkeypatch.setenv("MPIMESH_TIMEOUT_S", "30")

    def main() -> None:
        mesh = mm.DeviceMesh("dp=2")
        mesh.group().recv(1 - mesh.rank).resolve()

    start_s = time.monotonic()
    with pytest.raises(mm.errors.DeadlockError):
        mm.run_virtual(2, main)
    assert time.monotonic() - start_s < 10
