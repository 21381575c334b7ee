"""Device memory through pinned host memory, on virtual ranks with a GPU whose streams are late."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from mpimesh.comm.host_strategies import Staged
from tests.devices.alone import Alone
from tests.devices.operations import check_all, device, finish, nonsense, same
from tests.devices.virtual import on_ranks
from tests.helpers.depth import deep


@pytest.mark.parametrize("size", [1, *deep(2), 3, *deep(4)])
@pytest.mark.parametrize("stage_bytes", [256, 4096])
def test_every_operation(size, stage_bytes):
    def main(comm):
        alone = Alone(comm, Staged(comm, stage_bytes=stage_bytes))
        check_all(alone, comm, dtypes=("f4", "c16", "u1"), sizes=(0, 50))

    on_ranks(size, main)


def test_half_types_and_booleans_move():
    def main(comm):
        alone = Alone(comm, Staged(comm))
        from tests.devices.operations import check_all_gather, check_broadcast

        for dtype in ("f2", "?", "M8[s]"):
            check_all_gather(alone, comm, 5, np.dtype(dtype))
            check_broadcast(alone, comm, 5, np.dtype(dtype))

    on_ranks(2, main)


def test_pinned_memory_lives_until_its_copies_are_done(monkeypatch):
    pinned = []

    def main(comm):
        alone, x = Alone(comm, Staged(comm, stage_bytes=64)), device(np.ones(64, "f4"))
        cuda = sys.modules["cupy"].cuda
        allocate = cuda.alloc_pinned_memory

        def watched(nbytes):
            memory = allocate(nbytes)
            pinned.append(weakref.ref(memory))
            return memory

        monkeypatch.setattr(cuda, "alloc_pinned_memory", watched)
        finish(comm, alone.all_reduce(None, x, "sum"))
        gc.collect()
        first = [*pinned]
        assert len(first) == 2
        assert None not in [one() for one in first], "a copy may still read it"
        alone.strategy.stream.stream.synchronize()
        finish(comm, alone.all_reduce(None, x, "sum"))
        gc.collect()
        assert [one() for one in first] == [None, None]

    on_ranks(1, main)


def test_the_next_part_is_loaded_while_one_is_moved(monkeypatch):
    def main(comm):
        alone = Alone(comm, Staged(comm, stage_bytes=64))
        finish(comm, alone.broadcast(nonsense(4, "f4"), 0))
        happened = []
        copy, all_reduce = alone.strategy.stream.copy, comm.all_reduce
        x = device(np.ones(64, "f4"))
        first = x.data.ptr

        def copying(target, source, nbytes):
            inward = first <= source < first + x.nbytes
            happened.append(("load" if inward else "store", nbytes))
            copy(target, source, nbytes)

        def moving(send, recv, op):
            happened.append(("move", recv.nbytes))
            return all_reduce(send, recv, op)

        monkeypatch.setattr(alone.strategy.stream, "copy", copying)
        monkeypatch.setattr(comm, "all_reduce", moving)
        finish(comm, alone.all_reduce(None, x, "sum"))
        same(x, np.full(64, comm.size, "f4"))
        assert {nbytes for _, nbytes in happened} == {64}
        assert [what for what, _ in happened] == [
            *("load", "load", "move", "store", "load", "move", "store", "load"),
            *("move", "store", "move", "store"),
        ]

    on_ranks(2, main)
