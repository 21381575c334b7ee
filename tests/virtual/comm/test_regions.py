"""Regions exchanged between virtual ranks, in their memory and by messages."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mpimesh as mm
from mpimesh.comm import region_messages
from mpimesh.comm.engine import ProgressEngine
from mpimesh.comm.region_messages import exchange_by_messages
from mpimesh.comm.regions import check_regions
from mpimesh.errors import DTypeError, MismatchError, RankError, ShapeError
from mpimesh.layout import Give, Part, Regions, Take
from mpimesh.layout.boxes import view
from mpimesh.runtime.world import current_world
from tests.contract.regions import DTYPES, gives_of, make, ring, rows_to_columns
from tests.helpers.raises import raises


def virtual() -> Any:
    """This virtual rank's view of all ranks."""
    return current_world().virtual


def by_messages(communicator, source, target, regions, max_bytes=0):
    """Exchange regions as ranks do that share no memory."""
    check_regions(regions, communicator.rank, communicator.size, source, target)
    return exchange_by_messages(communicator, source, target, regions, max_bytes=max_bytes)


def in_memory(communicator, source, target, regions, max_bytes=0):
    """Exchange regions as virtual ranks do."""
    return communicator.exchange_regions(source, target, regions, max_bytes=max_bytes)


WAYS = {"in memory": in_memory, "by messages": by_messages}


def finish(communicator, *started):
    """Run exchanges to their end, those of several steps one after the other."""
    engine = ProgressEngine()
    left = [one if hasattr(one, "test") else engine.stage(communicator, one) for one in started]

    def over():
        engine.advance()
        left[:] = [request for request in left if not request.test()]
        return not left

    assert communicator.wait(over, 30)


def exchange(case, way, max_bytes=0, times=1):
    """Run a case on virtual ranks; return their targets."""

    def main():
        communicator = virtual()
        me = communicator.rank
        source, kept = case.sources[me].copy(), case.sources[me]
        targets = [case.before[me].copy() for _ in range(times)]
        finish(
            communicator,
            *[
                WAYS[way](communicator, source, target, case.regions[me], max_bytes)
                for target in targets
            ],
        )
        assert source.tobytes() == kept.tobytes()
        return targets

    return main


@given(
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([0, 1, 50, 200, 1000]),
    st.booleans(),
    st.sampled_from(list(WAYS)),
)
def test_any_exchange(seed, ranks, dtype, max_bytes, rendezvous, way):
    case = make(seed, ranks, dtype)
    results = mm.run_virtual(ranks, exchange(case, way, max_bytes, 2), rendezvous=rendezvous)
    for got, after in zip(results, case.after, strict=True):
        for target in got:
            assert target.tobytes() == after.tobytes()


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(
    ("way", "max_bytes"), [("in memory", 0), ("by messages", 0), ("by messages", 1 << 12)]
)
def test_many_ranks(rendezvous, way, max_bytes):
    """More than there are messages under way at a time."""
    for seed in range(3):
        case = make(seed, 20, "f8", side=9, axes=2)
        results = mm.run_virtual(20, exchange(case, way, max_bytes), rendezvous=rendezvous)
        for (got,), after in zip(results, case.after, strict=True):
            assert got.tobytes() == after.tobytes()


@pytest.mark.parametrize("max_bytes", [600, 2000, 10_000])
@pytest.mark.parametrize("op", ["", "sum"])
def test_packed_memory_stays_under_its_limit(monkeypatch, max_bytes, op):
    """Also where parts for a sum come long before their turn."""
    ranks, size = 4, 60
    shape = (size, size)
    box = ((1, size), (1, size))
    if op:
        order = [3, 1, 0, 2]
        takes = [[Take(box, tuple(Part(r, shape, box) for r in order), op)] for _ in range(ranks)]
    else:
        takes = [[Take(box, (Part((r + 1) % ranks, shape, box),))] for r in range(ranks)]
    gives = gives_of(takes)
    values = np.random.default_rng(1).standard_normal((ranks, *shape))
    alive = [0] * ranks
    peaks = [0] * ranks
    real = region_messages.MessageExchange._empty

    def counted(self, elements):
        me, memory = self._communicator.rank, real(self, elements)
        alive[me] += memory.nbytes
        peaks[me] = max(peaks[me], alive[me])
        weakref.finalize(memory, gone, me, memory.nbytes)
        return memory

    def gone(me, nbytes):
        alive[me] -= nbytes

    monkeypatch.setattr(region_messages.MessageExchange, "_empty", counted)

    def main():
        communicator = virtual()
        me = communicator.rank
        regions = Regions(tuple(takes[me]), tuple(gives[me]))
        target = np.zeros(shape)
        steps = by_messages(communicator, values[me], target, regions, max_bytes)
        finish(communicator, steps)
        return target

    results = mm.run_virtual(ranks, main, rendezvous=True)
    for rank, target in enumerate(results):
        expected = np.zeros(shape)
        if op:
            total = values[3] + values[1] + values[0] + values[2]
            view(expected, box)[...] = view(total, box)
        else:
            view(expected, box)[...] = view(values[(rank + 1) % ranks], box)
        assert target.tobytes() == expected.tobytes()
    assert 0 < max(peaks) <= max_bytes


def test_boxes_that_are_one_run_are_not_copied(monkeypatch):
    """Rows are sent from where they lie, and received where they go."""

    def refuse(*arguments):
        raise AssertionError("nothing is to be packed")

    monkeypatch.setattr(region_messages.MessageExchange, "_empty", refuse)
    shape = (4, 3)
    rows = ((1, 3), (0, 3))
    takes = [[Take(((0, 2), (0, 3)), (Part(1 - r, shape, rows),))] for r in range(2)]
    gives = gives_of(takes)

    def main():
        communicator = virtual()
        me = communicator.rank
        source, target = np.arange(12.0).reshape(shape) + 100 * me, np.zeros((3, 3))
        regions = Regions(tuple(takes[me]), tuple(gives[me]))
        finish(communicator, by_messages(communicator, source, target, regions))
        return target

    for rank, target in enumerate(mm.run_virtual(2, main)):
        other = np.arange(12.0).reshape(shape) + 100 * (1 - rank)
        assert target[:2].tolist() == other[1:3].tolist()
        assert not target[2].any()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_arrays_take_part(way):
    takes = [[], [Take(((0, 2),), (Part(2, (5,), ((1, 3),)),))], []]
    gives = gives_of(takes)

    def main():
        communicator = virtual()
        me = communicator.rank
        regions = Regions(tuple(takes[me]), tuple(gives[me]))
        source = np.arange(5) if me == 2 else None
        target = np.zeros(2, int) if me == 1 else None
        finish(communicator, WAYS[way](communicator, source, target, regions))
        return None if target is None else target.tolist()

    assert mm.run_virtual(3, main) == [None, [1, 2], None]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_gives_something_else_is_named(way):
    def main():
        communicator = virtual()
        me = communicator.rank
        box = ((0, 4),)
        takes = (Take(box, (Part(0, (4,), box),)),) if me else ()
        gives = () if me else (Give(1, ((0, 3),)),)
        steps = WAYS[way](communicator, np.zeros(4), np.zeros(4), Regions(takes, gives))
        if me:
            with raises(MismatchError, "rank 1", 32, "rank 0", 24):
                finish(communicator, steps)
        else:
            finish(communicator, steps)

    mm.run_virtual(2, main)


@pytest.mark.parametrize("way", WAYS)
def test_halves_are_added_up_in_float32(way):
    """In float16 each of the ones would be lost."""
    box = ((0, 1),)
    takes = [[Take(box, tuple(Part(r, (1,), box) for r in (0, 1, 2, 3)), "sum")], [], [], []]
    gives = gives_of(takes)

    def main():
        communicator = virtual()
        me = communicator.rank
        source = np.array([4096 if me == 0 else 1], np.float16)
        target = np.zeros(1, np.float16)
        regions = Regions(tuple(takes[me]), tuple(gives[me]))
        finish(communicator, WAYS[way](communicator, source, target, regions))
        return float(target[0])

    assert mm.run_virtual(4, main)[0] == float(np.float16(4099))


# -- arrays ----------------------------------------------------------------------------------


ONE = ((0, 1),)
TWICE = Take(ONE, (Part(0, (2,), ONE), Part(0, (2,), ONE)), "sum")


@pytest.mark.parametrize(
    ("regions", "source", "target", "error", "values"),
    [
        (
            Regions((Take(ONE, (Part(2, (2,), ONE),)),)),
            None,
            np.zeros(2),
            RankError,
            ("0 to 1", "rank 0", 2),
        ),
        (Regions((), (Give(-1, ONE),)), np.zeros(2), None, RankError, ("0 to 1", "rank 0", -1)),
        (Regions((TWICE,)), np.zeros(3), np.zeros(1), ShapeError, ("own block", [(2,)], (3,))),
        (Regions((TWICE,)), None, np.zeros(1), ShapeError, ("own block", [(2,)], "none")),
        (Regions((TWICE,)), np.zeros(2), None, ShapeError, ("target of rank 0", "none")),
        (Regions((TWICE,)), np.zeros(2), np.zeros(()), ShapeError, ("target of rank 0", ())),
        (Regions((), (Give(1, ONE),)), None, None, ShapeError, ("source of rank 0", "none")),
        (Regions(), np.zeros((2, 2)).T[:1].T, None, ShapeError, ("C-contiguous", (2, 1), (16, 8))),
        (Regions(), np.zeros(2), np.zeros(2, "f4"), DTypeError, ("float32 and float64", "rank 0")),
        (Regions(), np.zeros(2, object), None, DTypeError, ("object", "Python objects")),
        (Regions((TWICE,)), np.zeros(2, "?"), np.zeros(1, "?"), DTypeError, ("sum", "bool")),
        (Regions((TWICE,)), np.zeros(2, "S3"), np.zeros(1, "S3"), DTypeError, ("sum", "|S3")),
    ],
)
def test_arrays_that_do_not_fit(regions, source, target, error, values):
    for _ in range(2):
        with raises(error, *values):
            check_regions(regions, 0, 2, source, target)


@pytest.mark.parametrize("way", WAYS)
def test_rows_to_columns(way):
    ranks, rows, columns = 3, 7, 5
    whole = np.arange(rows * columns).reshape(rows, columns)
    plan = rows_to_columns(ranks, rows, columns)

    def main():
        communicator = virtual()
        me = communicator.rank
        source = whole[rows * me // ranks : rows * (me + 1) // ranks].copy()
        mine = whole[:, columns * me // ranks : columns * (me + 1) // ranks]
        target = np.zeros_like(mine, order="C")
        finish(communicator, WAYS[way](communicator, source, target, plan[me]))
        return target.tolist() == mine.tolist()

    assert mm.run_virtual(ranks, main) == [True] * ranks


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(
    ("way", "max_bytes"), [("in memory", 0), ("by messages", 0), ("by messages", 100)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_nobody_takes_of_may_be_taken_into(ranks, way, max_bytes, rendezvous):
    """One array is source and target: a block with room for its neighbours' edges."""
    regions = ring(ranks, 3, 50)

    def main():
        communicator = current_world().virtual
        assert communicator is not None
        me = communicator.rank
        array = np.repeat(10.0 * me + np.arange(5), 50).reshape(5, 50)
        for _ in range(3):
            array[1:-1] += 1
            finish(
                communicator,
                WAYS[way](communicator, array, array, regions[me], max_bytes),
            )
        return array[:, ::49].tolist()

    for rank, rows in enumerate(mm.run_virtual(ranks, main, rendezvous=rendezvous)):
        before, after = 10 * ((rank - 1) % ranks), 10 * ((rank + 1) % ranks)
        column = [before + 6, 10 * rank + 4, 10 * rank + 5, 10 * rank + 6, after + 4]
        assert rows == [[value, value] for value in column]
