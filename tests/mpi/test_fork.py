"""A forked child under MPI gets an error, and its parents go on."""

from __future__ import annotations

import os

import numpy as np
import pytest

import mpimesh as mm
from tests.virtual.runtime.test_fork import in_child, tried

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def test_a_forked_child_is_told(comm):
    with mm.DeviceMesh("a=-1", comm) as mesh:
        x = mm.distribute(np.arange(2.0 * mesh.size), mesh, "S0")
        total = mesh.group().all_reduce(x.local)

        def work():
            said = [
                tried(lambda: mesh.group().all_reduce(np.ones(3))),
                tried(x.full),
                tried(total.resolve),
                tried(lambda: mm.DeviceMesh("a=-1")),
            ]
            mesh.close()
            return "\n".join(said)

        text, status = in_child(work)
        assert status == 0, text
        assert text.count("forked child") == 4, text
        expected = np.arange(2.0 * mesh.size).reshape(-1, 2).sum(axis=0)
        assert total.resolve().tolist() == expected.tolist()
        assert x.full().tolist() == [*range(2 * mesh.size)]
