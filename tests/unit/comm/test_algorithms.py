"""The table of algorithms, and the sizes it is made from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from mpimesh.comm import VirtualWorld, virtual_communicators
from mpimesh.comm.algorithms import NEVER, OPERATIONS, Algorithms, Row, Sizes, Ways
from mpimesh.comm.tuner import KeptSizes, crossing, stretch
from tests.helpers.raises import raises

SIZES = [1 << 10, 1 << 20, NEVER, 1 << 16, 1]
MOST = 1 << 18
NUMBERS = len(OPERATIONS) + 3


def test_each_operation_has_its_size():
    table = Sizes(SIZES, "").on_one_node(MOST)
    for operation, size in zip(OPERATIONS, SIZES, strict=True):
        for nbytes in (0, 1, 1000, 1 << 10, 1 << 16, 1 << 20, 1 << 40):
            shared = "in_place" if nbytes >= size else "mpi"
            assert table.ways(operation, nbytes) == Ways("mpi", shared), (operation, nbytes)
    assert table.ways("gather", 1 << 30) == Ways("mpi", "mpi")


def test_a_size_for_each_operation_is_needed():
    with raises(ValueError, "zip()"):
        Sizes(SIZES[1:], "").on_one_node(MOST)


def test_slots_and_chunks_of_an_all_reduce():
    table = Sizes(SIZES, "", slots_from=1 << 9, chunks_from=1 << 20).on_one_node(MOST)
    ways = {
        nbytes: table.ways("all_reduce", nbytes) for nbytes in (8, 512, MOST, MOST + 1, 1 << 20)
    }
    assert ways == {
        8: ("mpi", "mpi"),
        512: ("slots", "slots"),
        MOST: ("slots", "in_place"),
        MOST + 1: ("mpi", "in_place"),
        1 << 20: ("chunks", "in_place"),
    }
    # Small arrays in shared memory go through slots as well.
    assert table.ways("all_reduce", MOST // 16) == ("slots", "slots")
    assert table.ways("all_reduce", MOST // 16 + 1) == ("slots", "in_place")
    # Slots that begin where none fits are none.
    assert Sizes(SIZES, "", slots_from=MOST + 1).on_one_node(MOST).ways("all_reduce", MOST) == (
        "mpi",
        "in_place",
    )


def test_everything():
    table = Sizes.everything("asked for").on_one_node(MOST)
    for operation in OPERATIONS:
        for nbytes in (1, 1 << 30):
            assert "mpi" not in table.ways(operation, nbytes)
    assert {row.reason for row in table if row.operation != "*"} == {"asked for"}


def test_levels_take_all_memory_alike():
    table = Sizes(SIZES, "measured").on_several_nodes()
    assert table.ways("all_reduce", 1 << 10) == ("two_levels", "two_levels")
    assert table.ways("all_gather", 1 << 40) == ("mpi", "mpi")
    assert all("between them by MPI; measured" in row.reason for row in table if row.from_bytes)


def test_a_table_is_printed_a_row_a_line():
    table = Sizes(SIZES, "measured", slots_from=1 << 9).on_one_node(MOST)
    lines = str(table).splitlines()
    assert len(lines) == len(table)
    assert lines[0] == "all_reduce from 512 B up to 256 KiB, host memory: slots (measured)"
    slower = "the stage would be slower than messages"
    assert lines[1] == f"all_reduce above 256 KiB, host memory: mpi ({slower})"
    assert "all_reduce from 512 B up to 16 KiB, shared memory: slots (measured)" in lines
    assert "reduce_scatter from 1 MiB, shared memory: in_place (measured)" in lines
    assert lines[-1] == "everything else, smaller arrays included: mpi (MPI's own collective)"
    assert not any("smaller" in line for line in lines[:-1])


def test_a_row_of_one_size_names_it_once():
    ways = {0: "mpi", 9: "slots", 10: "mpi"}
    rows = [Row("all_reduce", "host", nbytes, way, "") for nbytes, way in ways.items()]
    assert [row.subject for row in Algorithms(rows)] == [
        "all_reduce below 9 B",
        "all_reduce of 9 B",
        "all_reduce from 10 B",
    ]


def test_a_table_of_one_way_says_that_everything_goes_it():
    assert str(Algorithms.only("virtual", "why")) == "everything: virtual (why)"
    assert str(Algorithms([Row("*", "device", 0, "copy", "why")])) == (
        "everything, device memory: copy (why)"
    )


def test_what_the_user_has_set_is_told_with_the_sizes_that_it_can_be_for():
    table = Algorithms.only("mpi", "why").with_setting("all_reduce", "slots", 65536)
    assert str(table).splitlines()[:2] == [
        "all_reduce up to 64 KiB, host memory: slots (MPIMESH_ALGORITHMS)",
        "all_reduce above 64 KiB, host memory: mpi (too large for slots)",
    ]
    table = Algorithms.only("mpi", "why").with_setting("all_reduce", "ring", NEVER)
    assert str(table).splitlines()[-1] == "everything else: mpi (why)"


def test_of_rows_alike_the_last_counts():
    table = Algorithms([Row("*", "host", 0, "mpi", "a"), Row("*", "host", 0, "virtual", "b")])
    assert [row.algorithm for row in table] == ["virtual"]


def test_sizes_are_made_again_from_their_numbers():
    sizes = Sizes(SIZES, "why", slots_from=77, chunks_from=88)
    assert len(sizes.numbers) == NUMBERS
    assert Sizes.of_numbers(sizes.numbers, "why") == sizes


def test_what_was_measured_is_kept_for_the_next_job(tmp_path):
    path = tmp_path / "folder" / "sizes.json"
    (comm,) = virtual_communicators(VirtualWorld(1))
    measured = Sizes(SIZES, "", slots_from=77)
    kept = KeptSizes("auto", path)
    first = kept.agreed(comm, 1, lambda: measured)
    assert first.numbers == measured.numbers
    assert kept.agreed(comm, 1, pytest.fail) is first, "it does not change when it was measured"
    again = KeptSizes("auto", path).agreed(comm, 1, pytest.fail)
    assert (again.numbers, again.reason != first.reason) == (first.numbers, True)


def test_no_array_is_as_large_as_never():
    assert NEVER > 1 << 57, "the address space of a process"
    assert NEVER < 1 << 63, "ranks send it as a signed number of 64 bits"


@pytest.mark.parametrize(
    "text",
    [
        '{"2 on 1": [Infinity, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1e30, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [0, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1, 1]}',
        '{"2 on 1": 3}',
        '{"2": [1, 1, 1, 1, 1, 1, 1]}',
        "[" * 100_000,
        "",
    ],
)
def test_a_file_that_says_nonsense_counts_as_none(tmp_path, text):
    path = tmp_path / "sizes.json"
    path.write_text(text)
    assert KeptSizes("auto", path).of_ranks(2) is None


def test_ranks_on_other_nodes_are_another_group(tmp_path):
    path = tmp_path / "sizes.json"
    kept = KeptSizes("auto", path)
    rows = {(4, 1): 5, (4, 2): 6, (8, 2): 7}
    for (ranks, nodes), number in rows.items():
        kept.learn(ranks, nodes, Sizes.of_numbers([number] * NUMBERS, ""), keep=True)
    again = KeptSizes("auto", path)
    for (ranks, nodes), number in rows.items():
        found = again.of_ranks(ranks, nodes)
        assert found is not None
        assert found.numbers == [number] * NUMBERS
    assert again.of_ranks(8) is None


GAINS = st.dictionaries(st.integers(1, 1 << 20), st.floats(0.1, 10), max_size=8)


def product(gains, first=0, last=NEVER):
    return math.prod(gains[size] for size in sorted(gains) if first <= size <= last)


@given(GAINS)
def test_two_ways_cross_where_all_larger_sizes_gain_most(gains):
    most = max([1.0, *(product(gains, size) for size in gains)])
    assert product(gains, crossing(gains, NEVER)) == pytest.approx(most)


@given(GAINS)
def test_a_way_is_taken_between_the_sizes_that_gain_most(gains):
    every = [product(gains, first, last) for first in gains for last in gains if first <= last]
    found = stretch(gains)
    if found is None:
        assert max([1.0, *every]) == pytest.approx(1.0)
    else:
        assert product(gains, *found) == pytest.approx(max(every))
        assert max(every) > 1


def test_one_size_measured_wrong_does_not_decide():
    assert crossing({8: 0.5, 64: 1.5, 512: 2.0, 4096: 0.9}, NEVER) == 64
    assert crossing({8: 0.5, 64: 0.9}, NEVER) == NEVER
    assert stretch({8: 0.5, 64: 1.5, 512: 0.9, 4096: 2.0, 32768: 0.9}) == (64, 4096)


def test_slots_end_where_they_gain_no_more():
    table = Sizes(SIZES, "", slots_from=8, slots_to=1 << 12).on_one_node(MOST)
    ways = [table.ways("all_reduce", nbytes).host for nbytes in (4, 8, 1 << 12, (1 << 12) + 1)]
    assert ways == ["mpi", "slots", "slots", "mpi"]
