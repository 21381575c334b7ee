"""The line about a long wait: when it comes, how often, from whom, and what it says."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.comm import VirtualWorld, virtual_communicators
from mpimesh.runtime.call import Call, site_line
from mpimesh.runtime.deadlock import DeadlockSearch
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.watchdog import Notice
from tests.helpers.raises import names

COMMUNICATORS = virtual_communicators(VirtualWorld(3))


def waiting(seconds: float, *, what: object = "something", rank: int = 0, peers=None) -> Wait:
    wait = Wait(what, COMMUNICATORS[rank], peers)
    wait.since_s = time.monotonic() - seconds
    return wait


def lines_of(*waits: Wait, rank: int = 0, after_s: float = 30.0) -> list[str]:
    lines: list[str] = []
    notice = Notice(rank, after_s, lambda rank, line: lines.append(f"{rank} {line}"))
    for wait in waits:
        for _ in range(3):
            notice.check(wait)
    return lines


@pytest.mark.parametrize(("seconds", "number"), [(29.5, 0), (30.5, 1), (3000, 1)])
def test_a_wait_is_told_once_and_not_before_its_time(seconds, number):
    assert len(lines_of(waiting(seconds))) == number


def test_again_only_for_a_wait_twice_as_long():
    lengths_s = [31, 40, 59, 61, 100, 119, 121, 200]
    told = lines_of(*map(waiting, lengths_s))
    assert [line.split(" has waited ")[1].split()[0] for line in told] == ["31", "61", "121"]


@pytest.mark.parametrize(
    ("place", "rank", "seconds", "number"),
    [(0, 15, 31, 1), (0, 16, 3000, 0), (1, 1, 31, 0), (1, 1, 89, 0), (2, 2, 91, 1)],
)
def test_of_many_ranks_few_speak_and_the_first_of_a_group_before_the_others(
    place, rank, seconds, number
):
    assert len(lines_of(waiting(seconds, rank=place), rank=rank)) == number


def test_nothing_is_said_at_0():
    assert lines_of(waiting(1e9), after_s=0) == []


def test_the_line_says_what_where_for_whom_and_what_to_do():
    call = Call("all_reduce", "dp", "sum", (3,), "float64")
    (told,) = lines_of(waiting(31, what=call), rank=4)
    assert told.startswith("4 mpimesh: ")
    names(told, "31 s", "all_reduce(shape (3,), float64, sum)", "group 'dp'")
    names(told, "MPIMESH_TIMEOUT_S=60")
    assert "\n" not in told
    (told,) = lines_of(waiting(31, what="pipeline action 0F1", peers=(2,)))
    names(told, "pipeline action 0F1", f"{__file__}:", "rank 2")


def said_of(work) -> str:
    """What follows the usual line of a rank that waits in `work`."""
    group, call = work._group, work._call
    wait = Wait(call, group.communicator, call.peers)
    wait.since_s -= 91
    lines: list[str] = []
    Notice(0, 30.0, lambda _, line: lines.append(line), group.progress).check(wait)
    (line,) = lines
    return line.partition("says what each rank does")[2]


def test_the_line_says_which_ranks_of_the_node_are_missing_and_what_they_do_instead():
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            group, side = mesh.group(), mesh.add_group("side", [0, 1])
            group.all_gather(np.ones(2)).resolve()
            if mesh.rank:
                barrier = side.start_barrier() if mesh.rank == 1 else None
                group.send(np.ones(1), 0).resolve()
                group.recv(0).resolve()
                total = group.all_reduce(np.ones(3))
                group.send(np.ones(1), 0).resolve()
            else:
                total = group.all_reduce(np.ones(3))
                group.recv(1).resolve()
                group.recv(2).resolve()
                message = group.recv(1)
                said = [said_of(total), said_of(message)]
                barrier = side.start_barrier()
                group.send(np.ones(1), 1).resolve()
                message.resolve()
                said.append(said_of(total))
                group.send(np.ones(1), 2).resolve()
                group.recv(2).resolve()
                said.append(said_of(total))
            total.resolve()
            if barrier is not None:
                barrier.resolve()
            return said if mesh.rank == 0 else []

    elsewhere = "rank 1 (in barrier() on group 'side', which this rank has not started)"
    here = "rank 2 (last here: all_gather(shape (6,), float64, axis 0, sizes [2, 2, 2]))"
    assert mm.run_virtual(3, main)[0] == [
        f". Missing, of the job: {elsewhere}, {here}",
        f". Elsewhere, of the job: {elsewhere}",
        f". Missing, of the job: {here}",
        ". All its ranks on this node have started it",
    ]


def test_with_checks_the_line_says_nothing_of_others_for_nothing_is_posted(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            total = mesh.group().all_reduce(np.ones(3))
            said = said_of(total)
            total.resolve()
            return said

    assert mm.run_virtual(2, main) == ["", ""]


def test_an_operator_of_a_split_array_is_where_the_program_has_it():
    """And not in NumPy's mixin, through which it comes."""

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            x = mm.distribute(np.arange(8.0), mesh, "dp=S0").sum()
            assert not x > 100
            filename, _ = site_line(mesh._core.context.progress.calls[-1].site)
            return filename

    assert mm.run_virtual(2, main) == [__file__] * 2


class _Alone:
    """In place of channels to other ranks: there are none."""

    def __iter__(self):
        return iter(())

    def find(self, ranks):
        return None


@pytest.mark.parametrize("kind", ["notice", "deadlock search"])
def test_who_looks_after_a_wait_does_not_keep_its_arrays(kind):
    progress, array = Progress(), np.ones(3)
    alive = weakref.ref(array)
    wait = Wait("something", COMMUNICATORS[0], None, partial(np.add, array, 1))
    wait.since_s -= 31
    watcher = (
        Notice(0, 30.0, lambda rank, line: None)
        if kind == "notice"
        else DeadlockSearch(0, progress, cast(Any, _Alone()))
    )
    watcher.check(wait)
    del wait, array
    assert alive() is None
