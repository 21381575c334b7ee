"""Messages of a node by themselves: random programs of threads and processes, in C; see mail.c.

Each program sends up to 400 messages of three tags between all pairs of ranks, also to oneself, and
receives them in another order: small ones, large ones that are read in place, by calls into the
other process or in pieces; into rooms that are too small, or named only when the message is there.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from mpimesh.core.mail import Mail, slot_bytes
from mpimesh.core.node import DOOR_BYTES, LANE_BYTES, Door, Engine, Window
from mpimesh.errors import ClosedError
from tests.helpers.depth import deep

OF_THREADS = (), ("pieces",), ("rendezvous",)
OF_PROCESSES = (), ("pieces",)


@pytest.fixture(scope="module")
def mail(driver):
    return driver("mail.c")


@pytest.mark.parametrize("env", [None, {"SLEEPY": "1"}])
@pytest.mark.parametrize("ranks", [2, 3, *deep(1, 5, 8)])
@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_random_messages(mail, kind, ranks, env):
    for seed, options in enumerate(OF_THREADS if kind == "threads" else OF_PROCESSES):
        mail.succeeds(kind, ranks, seed + 1, 5, *options, env=env)


@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_two_threads_of_each_rank(mail, kind):
    mail.succeeds(kind, 2, 1, 3, "pairs")
    mail.succeeds(kind, 3, 2, 2, "pairs", "pieces")


@pytest.mark.parametrize("kind", ["threads", "procs"])
def test_memory_that_is_scarce(mail, kind):
    for seed in range(2):
        mail.succeeds(kind, 3, seed, 3, "scarce", *(["pieces", "pairs"] if seed else []))


def test_ranks_that_are_stopped_for_a_while(mail):
    mail.succeeds("procs", 3, 1, 5, "stop")


@pytest.mark.parametrize("ranks", [2, *deep(3, 5)])
def test_who_waits_for_a_killed_rank_learns_it(mail, ranks):
    mail.loses_some(ranks, seeds=6)


@pytest.mark.deep
def test_sanitizers_find_nothing(sanitized):
    for kind in ("threads", "procs"):
        for options in OF_THREADS if kind == "threads" else OF_PROCESSES:
            sanitized("mail.c", kind, 3, 1, 3, *options)
        sanitized("mail.c", kind, 2, 1, 2, "pairs", "scarce")


def one_rank(*, is_thread, rendezvous=False):
    memory = np.frombuffer(mmap.mmap(-1, LANE_BYTES + slot_bytes(1)), np.uint8)
    door = Door(np.zeros(DOOR_BYTES, np.uint8))
    window = Window(Engine(door, is_thread), 0, [memory], [0], [door], is_threads=is_thread)
    return Mail(window, [memory], [LANE_BYTES], [0], 1, None, [], rendezvous)


def test_who_has_closed_probes_for_nothing():
    mail = one_rank(is_thread=True)
    assert mail.probe(7) is None
    mail.close()
    with pytest.raises(ClosedError, match="closed"):
        mail.probe(7)


def test_rendezvous_is_of_threads():
    with pytest.raises(ValueError, match="threads"):
        one_rank(is_thread=False, rendezvous=True)
