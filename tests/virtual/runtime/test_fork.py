"""A forked child has a copy of its parent's meshes, and no part in them."""

from __future__ import annotations

import os
import traceback

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_child(work):
    """Run `work` in a forked child; return what it wrote and how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, work().encode())
            os._exit(0)
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    return text, os.waitpid(pid, 0)[1]


def tried(function):
    """Return what a call raises."""
    try:
        function()
    except ClosedError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_is_told(ranks):
    def main():
        with mm.DeviceMesh("a=-1") as mesh:
            x = mm.distribute(np.arange(6.0), mesh, "S0")
            handle = mesh.group().all_reduce(np.ones(3))

            def work():
                calls = [
                    lambda: mesh.group().all_reduce(np.ones(3)),
                    lambda: mesh.group("a"),
                    mesh.barrier,
                    lambda: x.full(),
                    handle.resolve,
                ]
                said = [tried(call) for call in calls]
                assert (x + 1).shape == (6,)  # what is local goes on
                mesh.close()
                with mesh:
                    pass
                return "\n".join(said)

            text, status = in_child(work) if mesh.rank == 0 else ("", 0)
            assert status == 0, text
            assert mesh.rank or text.count("a forked child has no part in it") == 5, text
            # The parent's mesh is as it was.
            assert handle.resolve().tolist() == [ranks] * 3
            assert x.full().tolist() == [*range(6)]

    mm.run_virtual(ranks, main)
