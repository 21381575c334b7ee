"""The words of other systems, between processes."""

from __future__ import annotations

import pytest

from tests.helpers import compat_programs


@pytest.mark.parametrize("checks", ["0", "1"])
def test_k31_kapsl(comm, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    compat_programs.every_kapsl_operation(comm)


def test_v19_tvm(comm):
    compat_programs.parts_of_worker_0(comm)


def test_b12_burn(comm):
    compat_programs.gradients_by_their_ids(comm)


def test_b12_burn_missing(comm):
    compat_programs.missing_gradients_are_named(comm)


def test_t35_tensorflow(comm):
    compat_programs.beats_go_on(comm)
