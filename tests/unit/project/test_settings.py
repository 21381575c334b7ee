"""Settings of the environment, and refusals of wrong ones."""

from __future__ import annotations

import pytest

from mpimesh.errors import SettingsError
from mpimesh.settings import Settings, algorithms_of, tree_arity
from tests.helpers.raises import raises


def test_nothing_set_is_the_defaults():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


def test_each_variable_reaches_its_field():
    given = {
        "MPIMESH_CHECKS": "2",
        "MPIMESH_TIMEOUT_S": "1.5",
        "MPIMESH_NOTICE_S": "2.5",
        "MPIMESH_CHUNK_ELEMENTS": "7",
        "MPIMESH_EXIT_WARN_S": "0",
        "MPIMESH_CUDA_AWARE": "no",
        "MPIMESH_SHARED_GPU": "refuse",
        "MPIMESH_ALGORITHMS": "all_reduce=ring",
    }
    read = Settings.from_environment(given)
    assert (read.checks, read.timeout_s, read.chunk_elements) == (2, 1.5, 7)
    assert read.notice_s == 2.5
    assert read.algorithms == "all_reduce=ring"
    assert (read.exit_warn_s, read.cuda_aware, read.shared_gpu) == (0, "no", "refuse")


@pytest.mark.parametrize(
    ("variable", "text", "values"),
    [
        ("MPIMESH_CHECKS", "3", ("0, 1 or 2", 3)),
        ("MPIMESH_CHECKS", "1.5", ("whole", "'1.5'")),
        ("MPIMESH_TIMEOUT_S", "-1", ("negative", "'-1'")),
        ("MPIMESH_TIMEOUT_S", "1e-9", ("0.1", "1e-09")),
        ("MPIMESH_TIMEOUT_S", "soon", ("seconds", "'soon'")),
        ("MPIMESH_CUDA_AWARE", "1", ("auto, yes, no", "'1'")),
        ("MPIMESH_SHARED_GPU", "yes", ("warn, refuse, allow", "'yes'")),
        ("MPIMESH_ALGORITHMS", "all_reduce", ("all_reduce=ring", "'all_reduce'")),
        ("MPIMESH_ALGORITHMS", "gather=ring", ("all_reduce, reduce, broadcast", "'gather=ring'")),
        ("MPIMESH_ALGORITHMS", "reduce=ring,", ("got ''",)),
        ("MPIMESH_ALGORITHMS", "reduce=rings", ("centralized, ring", "'reduce=rings'")),
        ("MPIMESH_ALGORITHMS", "reduce=tree(1)", ("tree(b)", 2, "'reduce=tree(1)'")),
        ("MPIMESH_ALGORITHMS", "reduce=ring,reduce=mpi", ("reduce twice",)),
        ("MPIMESH_CUDAAWARE", "yes", ("known", "MPIMESH_CUDA_AWARE")),
    ],
)
def test_what_cannot_be_is_refused_by_name(variable, text, values):
    with raises(SettingsError, variable, *values):
        Settings.from_environment({variable: text})


def test_algorithms_by_operation():
    assert algorithms_of("") == algorithms_of("  ") == {}
    text = " all_reduce = ring,broadcast=tree(4) , reduce=two_levels"
    assert algorithms_of(text) == {
        "all_reduce": "ring",
        "broadcast": "tree(4)",
        "reduce": "two_levels",
    }


def test_the_arity_of_a_tree():
    texts = ("tree(2)", "tree(16)", "tree(1)", "tree(0)", "tree(02)", "tree(x)", "tree", "ring")
    assert [tree_arity(text) for text in texts] == [2, 16, 0, 0, 0, 0, 0, 0]
