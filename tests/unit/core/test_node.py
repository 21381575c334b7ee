"""The window of a node's ranks by itself: random programs of threads and processes, in C.

Each program starts up to 40 operations of all kinds at a time, on four overlapping windows, of
ordinary, shared and foreign memory, and resolves them in an order of its own on each rank; values
are compared with closed formulas: see node.c. In exchanges of boxes each rank copies and sums boxes
of the blocks of some, and in some of them a rank has another block, or gives something else.
"""

from __future__ import annotations

import pytest

from tests.helpers.depth import deep


@pytest.fixture(scope="module")
def node(driver):
    return driver("node.c")


@pytest.mark.parametrize("ranks", [1, 2, 3, *deep(4, 6, 9)])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_random_programs(node, kind, ranks):
    for seed in range(5):
        node.succeeds(kind, ranks, seed, 10, *(["late"] if seed % 2 else []))


@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_waits_that_sleep_at_once(node, kind):
    for seed in range(5):
        node.succeeds(kind, 3, seed, 5, "late", env={"SLEEPY": "1"})


def test_ranks_that_are_stopped_for_a_while(node):
    for seed in range(5):
        node.succeeds("procs", 3, seed, 10, "stop")


@pytest.mark.parametrize("ranks", [2, 3, *deep(5)])
def test_who_needs_a_killed_rank_learns_it(node, ranks):
    node.loses_some(ranks, seeds=8)


def test_a_mismatch_is_seen_by_every_rank(node):
    for kind in ("threads", "procs"):
        node.succeeds(kind, 3, 1, 1, "mismatch")


def test_a_box_that_comes_in_one_piece_beside_many_of_another_rank(node):
    for kind in ("threads", "procs"):
        node.succeeds(kind, 3, 1, 1, "fewer")


@pytest.mark.parametrize("env", [None, {"SLEEPY": "1"}])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_two_threads_of_each_rank(node, kind, env):
    for seed in range(4):
        node.succeeds(kind, 2, seed, 5, "pairs", *(["late"] if seed % 2 else []), env=env)


@pytest.mark.parametrize("program", ["bells", "texts"])
def test_no_bell_is_lost_and_no_text_torn(node, program):
    for kind in ("threads", "procs"):
        node.succeeds(kind, 2, 1, 1, program)


@pytest.mark.deep
def test_sanitizers_find_nothing(sanitized):
    for kind in ("threads", "procs"):
        sanitized("node.c", kind, 3, 1, 2, "late")
        sanitized("node.c", kind, 2, 1, 2, "pairs")
        sanitized("node.c", kind, 2, 1, 1, "texts")
        sanitized("node.c", kind, 3, 1, 1, "fewer")
