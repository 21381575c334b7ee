"""Where there is no memory for a copy or a result, an error says so, on all ranks or on one."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, OutOfMemoryError
from mpimesh.runtime.group_core import GroupCore
from tests.helpers.raises import names

SHAPE = (1 << 24, 1 << 23)  # more than there are addresses, so that no machine gives it

CALLS = {
    "all_reduce": lambda m, x: m.group().all_reduce(x),
    "all_reduce_init": lambda m, x: m.group().all_reduce_init(x),
    "all_gather": lambda m, x: m.group().all_gather(x),
    "reduce_scatter": lambda m, x: m.group().reduce_scatter(x),
    "all_to_all": lambda m, x: m.group().all_to_all(x),
    "reduce": lambda m, x: m.group().reduce(x, root=0),
    "gather": lambda m, x: m.group().gather(x, root=0),
    "scatter": lambda m, x: m.group().scatter(x, root=0).resolve(),
    "broadcast": lambda m, x: m.group().broadcast(x, root=0),
    "send": lambda m, x: m.group().send(x, 1 - m.rank),
    "shift": lambda m, x: m.group().shift(x),
    "distribute": lambda m, x: mm.distribute(x, m, "dp=S0"),
    "distribute, copied": lambda m, x: mm.distribute(x, m, "dp=R"),
    "from_local": lambda m, x: mm.DTensor.from_local(x, m, "dp=S0"),
    "zeros": lambda m, x: mm.zeros(x.shape, m, "dp=S0"),
    "arange": lambda m, x: mm.arange(1 << 50, mesh=m, placements="dp=S0"),
    "shared_empty": lambda m, x: m.shared_empty(x.shape),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_broadcast_view_that_no_memory_can_hold(call):
    x = np.broadcast_to(np.float64(1), SHAPE)

    def main():
        with mm.DeviceMesh("dp=-1") as mesh, pytest.raises(OutOfMemoryError, match="iB"):
            CALLS[call](mesh, x)

    mm.run_virtual(2, main)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
def test_memory_that_one_rank_lacks(call, checks, monkeypatch):
    """It raises, and so do the others, with checks on; else its error ends the job."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    empty = GroupCore.empty

    def lacking(group, *args):
        if group.rank == 1:
            raise MemoryError("none is left")
        return empty(group, *args)

    monkeypatch.setattr(GroupCore, "empty", lacking)
    told = {}

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            try:
                CALLS[call](mesh, np.ones((3, 4)).T[:3]).resolve()
            except (MismatchError, OutOfMemoryError) as error:
                told[mesh.rank] = error
                raise

    with pytest.raises((MismatchError, OutOfMemoryError)):
        mm.run_virtual(3, main)
    assert isinstance(told[1], OutOfMemoryError)
    names(str(told[1]), call, "rank 1", "none is left", "in parts")
    if checks == "1":
        assert all("raised OutOfMemoryError" in str(told[rank]) for rank in (0, 2))
