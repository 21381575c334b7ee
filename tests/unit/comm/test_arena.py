"""Memory that a process hands out and others can open: here two arenas of one process."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.comm.arena import HUGE_PAGE_BYTES, Arena, Node
from mpimesh.core.pool import MOST_BYTES
from mpimesh.errors import TransportError
from tests.helpers.depth import deep
from tests.helpers.raises import raises

ROOT = Path(__file__).resolve().parents[3]
PAGES_BYTES = 64 * 1024
"""From this size on parts have pages of their own."""


@pytest.fixture(scope="module")
def node():
    return Node()


@pytest.fixture
def arena(node):
    """One for all tests, as a process has one for all its life; every test gives all back."""
    gc.collect()
    before = node.arena.used_bytes
    yield node.arena
    gc.collect()
    assert node.arena.used_bytes == before


def stored_bytes(arena):
    return os.fstat(arena.fd).st_blocks * 512


def address_of(array):
    return array.__array_interface__["data"][0]


@given(st.lists(st.integers(0, 3 * PAGES_BYTES), max_size=8))
def test_parts_do_not_overlap(node, sizes):
    arena = node.arena
    parts = [arena.empty(nbytes) for nbytes in sizes]
    for number, part in enumerate(parts):
        part[...] = number
    for number, (nbytes, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.dtype == np.uint8
        assert part.shape == (nbytes,)
        assert part.flags.writeable
        assert np.all(part == number)


@pytest.mark.parametrize(
    ("nbytes", "alignment_bytes"),
    [
        (0, 64),
        *deep((1, 64)),
        (PAGES_BYTES - 1, 64),
        (PAGES_BYTES, 4096),
        *deep((HUGE_PAGE_BYTES - 1, 4096), (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)),
        (HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES),
    ],
)
def test_parts_begin_on_cache_lines_and_large_ones_on_pages(arena, nbytes, alignment_bytes):
    parts = [arena.empty(nbytes) for _ in range(3)]
    assert [address_of(part) % alignment_bytes for part in parts] == [0, 0, 0]
    # They do not share the last line, or page, either.
    ends = sorted(address_of(part) for part in parts)
    gaps = [after - before for before, after in pairwise(ends)]
    assert all(gap >= nbytes and gap % alignment_bytes == 0 and gap for gap in gaps)


@pytest.mark.parametrize("nbytes", range(PAGES_BYTES - 65, PAGES_BYTES + 1, 13))
def test_a_part_that_follows_one_of_nearly_its_size_begins_on_a_page(arena, nbytes):
    arena.trim()
    first = arena.empty(64)  # so that the next one would not begin on a page by itself
    assert arena.empty(nbytes).shape == (nbytes,)
    part = arena.empty(PAGES_BYTES)
    assert address_of(part) % 4096 == 0
    assert first is not None


def test_what_is_not_there_is_not_handed_out(arena):
    assert arena.empty(arena.nbytes) is None
    assert arena.empty(64) is not None


def test_arrays_are_found_where_they_begin(arena):
    part = arena.empty(1000)
    at = arena.find(part)
    assert at > 0
    assert arena.find(part[10:20]) == at + 10
    numbers = part[8:].view(np.float32).reshape(2, -1)
    assert arena.find(numbers) == at + 8
    assert arena.find(numbers[1]) == at + 8 + numbers[0].nbytes
    assert arena.find(np.frombuffer(memoryview(part), np.int64)) == at
    assert arena.find(part[:0]) == at


def test_ordinary_arrays_are_not_found(arena):
    assert arena.find(np.zeros(10)) == -1
    assert arena.find(np.zeros(0)) == -1
    other = Arena()
    assert arena.find(other.empty(64)) == -1
    assert other.find(arena.empty(64)) == -1


@pytest.mark.parametrize("nbytes", [1, 5000, PAGES_BYTES, HUGE_PAGE_BYTES])
def test_memory_is_taken_back_with_the_last_view(arena, nbytes):
    before = arena.used_bytes
    part = arena.empty(nbytes)
    held = arena.used_bytes - before
    assert held >= nbytes
    at = arena.find(part)
    views = [part[:1], part.view(np.int8), part.reshape(1, -1), np.asarray(memoryview(part))]
    del part
    while views:
        assert arena.used_bytes == before + held
        views.pop()
    assert arena.used_bytes == before
    assert arena.find(arena.empty(nbytes)) == at, "the same place is used again"


def test_memory_is_taken_back_from_any_thread(arena):
    """Threads take and give at once; what each wrote is there when it looks again."""
    before, torn = arena.used_bytes, []

    def work(mark):
        rng = np.random.default_rng(mark)
        kept = []
        for nbytes in rng.integers(1, 2 * PAGES_BYTES, 300):
            part = arena.empty(int(nbytes))
            part[...] = mark
            kept.append(part)
            if len(kept) > 5:
                old = kept.pop(int(rng.integers(5)))
                torn.append(bool(np.any(old != mark)))

    threads = [threading.Thread(target=work, args=[mark]) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(torn) == 4 * 295
    assert not any(torn)
    assert arena.used_bytes == before


def test_memory_may_end_while_other_memory_is_taken(arena):
    """The collector runs in the middle of `empty`, in the thread that holds the lock."""
    before = arena.used_bytes

    def cycle():
        part = arena.empty(MOST_BYTES + 1)  # taking less makes nothing that is collected
        ring = [part]
        ring.append(ring)

    collections = []
    thresholds = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    gc.set_threshold(1)
    try:
        for _ in range(300):
            cycle()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    gc.collect()
    assert len(collections) > 300
    assert arena.used_bytes == before


@pytest.mark.parametrize("nbytes", [PAGES_BYTES, 8 * HUGE_PAGE_BYTES])
def test_pages_go_back_to_the_system(nbytes):
    arena: Any = Arena(warm_bytes=0)
    before = stored_bytes(arena)
    part = arena.empty(nbytes)
    part[...] = 1
    assert stored_bytes(arena) >= before + nbytes
    del part
    assert stored_bytes(arena) == before
    again = arena.empty(nbytes)
    assert not again.any(), "pages that went back read as zeros"


def test_the_next_part_of_a_size_has_the_pages_of_the_last():
    """Up to a limit; what is kept so is neither used nor lost."""
    arena: Any = Arena(warm_bytes=3 * PAGES_BYTES)
    before, stored = arena.used_bytes, stored_bytes(arena)
    parts = [arena.empty(PAGES_BYTES) for _ in range(5)]
    for part in parts:
        part[...] = 7
    places = [arena.find(part) for part in parts]
    del part
    while parts:
        parts.pop(0)
    assert arena.used_bytes == before
    assert stored_bytes(arena) == stored + 3 * PAGES_BYTES
    again = [arena.empty(PAGES_BYTES) for _ in range(3)]
    assert [arena.find(part) for part in again] == places[:1:-1], "the last one first"
    assert all((part == 7).all() for part in again)
    assert arena.used_bytes == before + 3 * PAGES_BYTES


def test_kept_parts_make_room(monkeypatch):
    monkeypatch.setattr("mpimesh.comm.arena._MOST_BYTES", 1 << 30)
    arena: Any = Arena(warm_bytes=1 << 60)
    most = arena.nbytes // 2
    part = arena.empty(most)
    assert part is not None
    del part
    assert arena.empty(most + HUGE_PAGE_BYTES) is not None


def test_a_forked_child_gives_nothing_back_and_takes_nothing(arena):
    part = arena.empty(2 * PAGES_BYTES)
    part[...] = 7
    at = arena.find(part)
    child = os.fork()
    if child == 0:
        # Its parent's memory must not be given back, nor handed out a second time.
        del part
        gc.collect()
        os._exit(0 if arena.empty(PAGES_BYTES) is None else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.all(part == 7)
    other = arena.empty(2 * PAGES_BYTES)
    assert arena.find(other) != at


# -- opened by others ------------------------------------------------------------------------


def test_memory_that_was_opened_is_the_same(node, arena):
    other: Any = Node()
    seen = other.open(node.address)
    assert other.open(node.address) is seen
    assert seen.nbytes == arena.nbytes
    part = arena.empty(800).view(np.float64)
    part[...] = np.arange(100.0)
    at = arena.find(part)
    theirs = seen[at : at + 800].view(np.float64)
    assert theirs.tolist() == part.tolist()
    theirs[5] = -1
    assert part[5] == -1
    assert other.arena.find(theirs) == -1, "it lies in another's memory"


def test_nodes_are_told_apart(monkeypatch):
    keys = set()
    for host in ("a", "a", "b", "c"):
        monkeypatch.setattr(os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        keys.add(Node().address[0])
    assert len(keys) == 3
    assert all(0 <= key < 1 << 63 for key in keys)


def wrong_token(address):
    return (*address[:3], address[3] ^ 1, *address[4:])


def wrong_length(address):
    return (*address[:4], address[4] // 2, address[5])


def closed_file(address):
    return (*address[:2], 1 << 20, *address[3:])


def other_file(address):
    with Path(__file__).open() as file:
        return (*address[:2], os.dup(file.fileno()), *address[3:])


def no_memory(address):
    return (address[0], 0, -1, 0, 0, 0)


def dead_process(address):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return (address[0], process.pid, *address[2:])


@pytest.mark.parametrize(
    ("spoil", "values"),
    [
        (wrong_token, ("not its memory",)),
        (wrong_length, ("not its memory",)),
        (closed_file, ("opened",)),
        (other_file, ("not its memory",)),
        (no_memory, ("no memory",)),
        (dead_process, ("opened",)),
    ],
)
def test_what_is_not_what_the_address_says_is_refused(node, spoil, values):
    address = spoil(node.address)
    for _ in range(2):
        with raises(TransportError, f"process {address[1]}", *values):
            node.open(address)
    if spoil is other_file:
        os.close(address[2])


# -- systems that cannot ---------------------------------------------------------------------


def python(text, *limits):
    """Run `text` in a process with limits; return what it printed."""

    def limit():
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        preexec_fn=limit,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


ASK = """
import numpy as np
from mpimesh.comm.arena import Node
node = Node()
print(node.arena, node.why_not, len(np.empty({left}, np.uint8)))
"""


@pytest.mark.parametrize("gib", [1, 2, 6])
def test_limited_address_space_is_left_to_the_program(gib):
    left = (gib << 30) - (700 << 20)
    text = python(ASK.format(left=left), (resource.RLIMIT_AS, gib << 30))
    assert text.startswith("None no address space for memory that other ranks can open")
    assert "ulimit -v" in text
    assert text.endswith(str(left))


def test_a_limit_of_files_is_no_failure():
    text = python(ASK.format(left=1), (resource.RLIMIT_FSIZE, 1 << 20))
    assert text.startswith("None no address space")
    assert "too large" in text


def test_a_system_without_files_in_memory():
    hide = "import os\nif hasattr(os, 'memfd_create'): del os.memfd_create\n"
    text = python(hide + ASK.format(left=1))
    assert text.startswith("None this system has no files in memory")


def test_no_file_stays_behind():
    text = python(
        "import os\n"
        "from mpimesh.comm.arena import Arena\n"
        "first = Arena()\n"
        "print(os.readlink(f'/proc/self/fd/{first.fd}'), os.get_inheritable(first.fd))"
    )
    assert text == "/memfd:mpimesh (deleted) False"
