"""The table of algorithms."""

from __future__ import annotations

from mpimesh.comm.algorithms import Algorithms, Row, tree_arity


def test_a_table_is_printed_a_row_a_line():
    rows = [
        Row("all_reduce", "host", 0, "mpi", "smaller arrays"),
        Row("all_reduce", "host", 1 << 16, "two_levels", "why"),
        Row("*", "host", 0, "mpi", "MPI's own collective"),
    ]
    assert str(Algorithms(rows)).splitlines() == [
        "all_reduce from 64 KiB, host memory: two_levels (why)",
        "everything else, smaller arrays included: mpi (MPI's own collective)",
    ]
    assert Algorithms(rows).pick("all_reduce", "host", 1 << 16) == "two_levels"
    assert Algorithms(rows).pick("all_reduce", "shared", (1 << 16) - 1) == "mpi"
    assert Algorithms(rows).pick("gather", "host", 1 << 40) == "mpi"


def test_a_row_of_one_size_names_it_once():
    ways = {0: "mpi", 9: "ring", 10: "mpi"}
    rows = [Row("all_reduce", "host", nbytes, way, "") for nbytes, way in ways.items()]
    assert [row.subject for row in Algorithms(rows)] == [
        "all_reduce below 9 B",
        "all_reduce of 9 B",
        "all_reduce from 10 B",
    ]


def test_a_table_of_one_way_says_that_everything_goes_it():
    assert str(Algorithms.only("node", "why")) == "everything: node (why)"
    assert str(Algorithms([Row("*", "device", 0, "copy", "why")])) == (
        "everything, device memory: copy (why)"
    )


def test_of_rows_alike_the_last_counts():
    table = Algorithms([Row("*", "host", 0, "mpi", "a"), Row("*", "host", 0, "node", "b")])
    assert [row.algorithm for row in table] == ["node"]


def test_the_arity_of_a_tree():
    texts = ("tree(2)", "tree(16)", "tree(1)", "tree(0)", "tree(02)", "tree(x)", "tree", "ring")
    assert [tree_arity(text) for text in texts] == [2, 16, 0, 0, 0, 0, 0, 0]
