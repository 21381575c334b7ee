"""Planned collectives when their mesh is left, or another operation has their arrays."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ShapeError
from tests.helpers.raises import raises


class Stop(Exception):
    """Raised by a program to leave its mesh."""


@pytest.mark.filterwarnings("ignore")
def test_what_has_waited_for_others_does_not_start_once_the_mesh_is_left():
    def main():
        x = np.ones(3)
        other = mm.DeviceMesh("dp=2")
        try:
            with mm.DeviceMesh("dp=2") as mesh:
                if mesh.rank == 1:
                    other.barrier()  # rank 0 has left by then, and nothing of its has started
                group = mesh.group("dp")
                handles = [group.shift(np.ones(3), wrap=True), group.all_reduce(x, out=x)]
                raise Stop
        except Stop:
            del handles
        if other.rank == 0:
            other.barrier()
        x[...] = 5.0
        for _ in range(3):
            other.barrier()
        other.close()
        return x.tolist()

    assert mm.run_virtual(2, main) == [[5.0] * 3] * 2


def test_an_output_that_another_operation_uses_is_refused_at_each_start(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.group("dp")
            peer = 1 - mesh.rank
            y = np.zeros(3)
            planned = group.all_reduce_init(np.ones(3), out=y)
            sent = group.send(y, peer)
            with raises(ShapeError, "send"):
                planned.start()
            np.testing.assert_array_equal(group.recv(peer).resolve(), np.zeros(3))
            sent.resolve()
            np.testing.assert_array_equal(planned.start().resolve(), np.full(3, 2.0))

    mm.run_virtual(2, main)
