"""Calls of NumPy that give no warnings, and change nothing for others."""

from __future__ import annotations

import threading
import warnings

import numpy as np

from mpimesh.comm.shared_window import quiet_calls
from tests.helpers.raises import raises


def test_it_is_silent_and_only_inside():
    quietly = quiet_calls()
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.array([1e308, np.inf, 1.0])
        got = quietly(np.add, x, np.array([1e308, -np.inf, 1.0]), out=np.empty(3))
        assert np.isinf(got[0])
        assert np.isnan(got[1])
        assert got[2] == 2
        with raises(RuntimeWarning, "overflow"):
            np.add(x, x)
    assert np.geterr() == before


def test_the_callers_own_rule_does_not_come_in():
    with np.errstate(all="raise"):
        assert np.isinf(quiet_calls()(np.multiply, np.float64(1e308), 10.0))


def test_errors_come_through_and_it_can_be_used_again():
    quietly = quiet_calls()
    with raises(ValueError, (2,), (3,)):
        quietly(np.add, np.ones(2), np.ones(3))
    assert quietly(np.add, 1, 2) == 3


def test_each_thread_has_its_own():
    found: list[int] = []

    def work():
        quietly = quiet_calls()
        found.extend(quietly(np.add, 1, 2) for _ in range(2000))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 6000
