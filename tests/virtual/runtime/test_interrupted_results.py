"""An exception anywhere in `resolve()`: the result is made once, or said to be lost."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import TransportError


class Bang(BaseException):
    """What a signal handler raises."""


def interrupted(call, at):
    """Raise a Bang as function number `at` of mpimesh is entered in a call; False if it has fewer.

    There Python looks for signals.
    """
    calls = 0

    def look(frame, *_):
        nonlocal calls
        calls += frame.f_globals.get("__name__", "").startswith("mpimesh.")
        if calls == at:
            raise Bang

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except Bang:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", ["mean", "half", "blocks", "joined", "mapped", "nothing"])
def test_a_result_is_made_once(name):
    def start(group, made):
        x = np.arange(12.0).reshape(3, 4) + group.rank
        if name == "mean":
            return group.all_reduce(x.astype("D"), "mean")
        if name == "half":
            return group.all_reduce(x.astype("f2"), "mean")
        if name == "blocks":
            return group.reduce_scatter(x.astype("f2"), "mean", axis=1)
        if name == "joined":
            return group.all_gather(x, axis=1)
        return group.all_reduce(x).map(
            lambda y: made.append(1) or (y if name == "mapped" else None)
        )

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group, at, goes_on, lost = mesh.group(), 0, True, 0
            expected = start(group, []).resolve()
            while goes_on:
                made: list[int] = []
                at += 1
                handle = start(group, made)
                if mesh.rank == 0:
                    goes_on = interrupted(handle.resolve, at)
                try:
                    got = handle.resolve()
                    assert len(made) == (name in ("mapped", "nothing")), at
                    np.testing.assert_array_equal(got, expected)
                    assert handle.resolve() is got
                except TransportError as error:
                    if "is lost" not in str(error):
                        raise
                    lost += 1
                goes_on = bool(group.broadcast(np.array(goes_on)).resolve())
            return at, lost

    calls, lost = mm.run_virtual(2, main)[0]
    assert lost < calls - 5
