"""Inputs that are read-only while an operation reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from mpimesh.runtime.progress import InputLocks
from tests.helpers.raises import raises


def test_a_locked_array_refuses_writes_until_it_is_released():
    locks = InputLocks()
    x = np.zeros(3)
    release: Any = locks.lock(x)
    with raises(ValueError, "read-only"):
        x[0] = 1
    release()
    x[0] = 1


def test_a_read_only_array_stays_so():
    locks = InputLocks()
    x = np.zeros(3)
    x.flags.writeable = False
    assert locks.lock(x) is None
    assert locks.lock(np.broadcast_to(x, (2, 3))) is None


@given(data=st.data())
def test_any_overlapping_arrays_in_any_order(data):
    """In the end, all are writable again."""
    locks = InputLocks()
    base = np.zeros(16)
    part = base[2:14]
    arrays = [base, part, part[1:5], base[::2], np.zeros(4)]
    held: list[Any] = []
    for _ in range(data.draw(st.integers(1, 20))):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))()
        else:
            place = data.draw(st.integers(0, 4))
            held.append(locks.lock(arrays[place]) or (lambda: None))
    for release in held:
        release()
    assert all(x.flags.writeable for x in arrays)
    assert not locks._locked


def test_a_base_that_the_program_locks_itself():
    locks = InputLocks()
    base = np.zeros(4)
    view = base[1:]
    release: Any = locks.lock(view)
    base.flags.writeable = False
    release()
    assert not view.flags.writeable
    base.flags.writeable = True
    view = base[1:]
    release = locks.lock(view)
    release()
    assert view.flags.writeable
