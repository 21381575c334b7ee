"""Ranks that call different things all learn who called what; right programs raise no alarm."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mpimesh.arguments import rank_names
from mpimesh.errors import MismatchError, MpimeshError
from tests.contract.cases import same
from tests.contract.marks import needs_checks
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.mismatch_cases import (
    COLLECTIVES,
    RIGHT,
    WRONG,
    differences,
    place_of,
    plannings,
)


def _run(calls, group):
    """Run calls one after the other; return the first error and its call."""
    for call in calls:
        try:
            call(group).resolve()
        except MpimeshError as error:
            return error, call
    return None, calls[-1]


def _texts(mesh, text):
    """Every rank's text."""
    letters = np.frombuffer(text.encode().ljust(8192), np.uint8)
    table = mesh.group().all_gather(letters[None]).resolve()
    return [bytes(row).decode().rstrip() for row in table]


@needs_checks
def check_wrong_programs_raise_the_same_error_everywhere(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        odd_rank = group.size - 1
        for program in WRONG:
            if group.size < program.least:
                continue
            calls = program.odd if group.rank == odd_rank else program.rest
            error, call = _run(calls, group)
            assert error is not None, f"{program.name}: no error"
            texts = _texts(mesh, str(error))
            if not (program.local and group.rank == odd_rank):
                assert isinstance(error, MismatchError), f"{program.name}: {error!r}"
                assert error.agreed
            if program.local:
                own = texts[odd_rank]
                texts = texts[:odd_rank]
                assert own.splitlines()[0][:60] in texts[0], f"{program.name}: {own}\n{texts[0]}"
            assert len(set(texts)) == 1, f"{program.name}: {texts}"
            text = texts[0]
            assert place_of(call) in text, f"{program.name}: {place_of(call)} is not in {text}"
            assert f"rank {odd_rank}: " in text, text
            assert "group 'world'" in text
            same(group.all_reduce(np.ones(2)).resolve(), np.full(2, float(group.size)))


@needs_checks
def check_each_collective_plain_and_planned_is_compared_with_each_other(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        if n == 1:
            return
        for name in COLLECTIVES:
            for what, (odd, rest) in differences(name).items():
                for odd_plans, rest_plans in plannings(name, what):
                    case = name, what, odd_plans, rest_plans
                    is_odd = group.rank == n - 1
                    handle = odd(group, odd_plans) if is_odd else rest(group, rest_plans)
                    with pytest.raises(MismatchError) as caught:
                        handle.resolve()
                    text = str(caught.value)
                    assert f"rank {n - 1}: " in text, (case, text)
                    assert f"{rank_names(range(n - 1))}: " in text, (case, text)
            same(group.all_reduce(np.ones(2)).resolve(), np.full(2, float(n)))


def check_right_programs_raise_no_alarm(comm):
    with groups_of(comm) as groups:
        for group in groups:
            for program in RIGHT:
                if group.size >= program.least:
                    calls = program.odd if group.rank == group.size - 1 else program.rest
                    error, _ = _run(calls, group)
                    assert error is None, f"{program.name}: {error}"


def check_right_programs_under_way_together(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        handles = []
        for program in RIGHT:
            if group.size >= program.least:
                calls = program.odd if group.rank == group.size - 1 else program.rest
                handles += [call(group) for call in calls]
        random.Random(group.rank).shuffle(handles)
        for handle in handles:
            handle.resolve()


@needs_checks
def check_every_rank_of_a_table_is_named(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        if n == 1:
            return
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(np.ones(group.rank + 1)).resolve()
        text = str(caught.value)
        for rank in range(n):
            assert f"  rank {rank}: all_reduce(shape ({rank + 1},), float64, sum)" in text
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(np.ones(1 + group.rank // (n - 1))).resolve()
        assert f"  {rank_names(range(n - 1))}: all_reduce(shape (1,)" in str(caught.value)


@needs_checks
def check_long_calls_keep_their_place_in_the_table(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        label = "very long " * 200
        x = np.zeros(
            2 + (group.rank == 0), [(f"a field called number {n}", "i2") for n in range(40)]
        )
        with pytest.raises(MismatchError) as caught:
            group.broadcast(x, label=label).resolve()
        text = str(caught.value)
        assert text.count(f"{__file__}:") == 2, text
        assert "broadcast(shape (2,)" in text
        assert "broadcast(shape (3,)" in text


@needs_checks
def check_names_of_the_same_ranks_do_not_mix(comm):
    """Two groups of the same ranks: their calls may not be taken for each other."""
    with mesh_of(comm) as mesh:
        if mesh.world_size == 1:
            return
        mesh.add_group("again", range(mesh.world_size))
        names = ["world", "again"] if mesh.rank == 0 else ["again", "world"]
        problems = []
        for name in names:
            try:
                mesh.group(name).all_reduce(np.full(2, len(name))).resolve()
            except MismatchError as error:
                problems.append(str(error))
        assert len(problems) == 2
        assert "on group 'world'" in problems[0]
        assert "on group 'again'" in problems[0]


def check_independent_groups_may_start_in_any_order(comm):
    with mesh_of(comm) as mesh:
        if len(mesh.dim_names) < 2:
            return
        names = list(mesh.dim_names)
        for _ in range(4):
            random.Random(mesh.rank).shuffle(names)
            handles = [mesh.group(name).all_reduce(np.ones(3)) for name in names]
            for handle, name in zip(handles, names, strict=True):
                same(handle.resolve(), np.full(3, float(mesh.group(name).size)))


def swapped_calls_on_lines_of_their_own(comm):
    """For ``MPIMESH_CHECKS=2``: equal calls in another order are told by their lines alone."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        calls = [
            lambda: group.all_reduce(np.full(2, 1.0)),
            lambda: group.all_reduce(np.full(2, 2.0)),
        ]
        for call in calls:
            call().resolve()
        if group.size == 1:
            return
        problems = []
        for call in calls if group.rank else calls[::-1]:
            with pytest.raises(MismatchError) as caught:
                call().resolve()
            problems.append(str(caught.value))
        for text in problems:
            for call in calls:
                assert place_of(call) in text
        same(calls[0]().resolve(), np.full(2, float(group.size)))


def swapped_calls_through_one_helper(comm):
    """For ``MPIMESH_CHECKS=2``: calls of one line are told by those that called its function."""
    with mesh_of(comm) as mesh:
        group = mesh.group()

        def summed(value):
            return group.all_reduce(np.full(2, value)).resolve()

        def first():
            return summed(1.0)

        def second():
            return summed(2.0)

        for step in (first, second):
            step()
        if group.size == 1:
            return
        for step in (first, second) if group.rank else (second, first):
            with pytest.raises(MismatchError) as caught:
                step()
            for name in (first, second):
                code = name.__code__
                assert f"{code.co_filename}:{code.co_firstlineno + 1}" in str(caught.value)
