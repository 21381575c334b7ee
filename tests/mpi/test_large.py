"""Arrays of more than 2^31 bytes, which MPI before version 4 cannot count.

4 to 7 GiB of memory for each rank, so only on request::

    mpiexec -n 2 python -m pytest --with-mpi -m large tests/mpi/test_large.py
"""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm

pytestmark = [pytest.mark.large, pytest.mark.nprocs(2), pytest.mark.limit(300)]

NBYTES = 2**31 + 16


def marked(value):
    """Bytes that are 0 but for some around the places where a count could break."""
    x = np.zeros(NBYTES, np.uint8)
    for place in (0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, NBYTES - 1):
        x[place] = value
    return x


def is_marked(x, value):
    """Whether `x` is `marked(value)`, in little memory."""
    places = (0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, NBYTES - 1)
    return all(x[place] == value for place in places) and np.count_nonzero(x) == len(places)


def test_broadcast(comm):
    with mm.DeviceMesh("x=2", comm) as mesh:
        x = marked(7) if mesh.rank == 0 else np.zeros(NBYTES, np.uint8)
        assert is_marked(mesh.group().broadcast(x, out=x).resolve(), 7)


def test_all_reduce(comm):
    with mm.DeviceMesh("x=2", comm) as mesh:
        x = marked(1 + mesh.rank)
        assert is_marked(mesh.group().all_reduce(x, out=x).resolve(), 3)


def test_send_and_recv(comm):
    with mm.DeviceMesh("x=2", comm) as mesh:
        if mesh.rank == 0:
            mesh.group().send(marked(9), 1).resolve()
        else:
            got = mesh.group().recv(0, out=np.zeros(NBYTES, np.uint8)).resolve()
            assert is_marked(got, 9)


def test_all_gather(comm):
    """The result is more than 2^31, though no block is."""
    with mm.DeviceMesh("x=2", comm) as mesh:
        half = NBYTES // 2
        whole = np.zeros(NBYTES, np.uint8)
        mine = marked(5)[mesh.rank * half : (mesh.rank + 1) * half].copy()
        assert is_marked(mesh.group().all_gather(mine, out=whole).resolve(), 5)
