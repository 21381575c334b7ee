"""Tracebacks that can be read, and when the hooks are put in place."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MeshError, RankError
from mpimesh.mesh import Mesh
from mpimesh.runtime.agreement import agreed
from mpimesh.runtime.tracebacks import readable
from mpimesh.runtime.world import current_world


def caught(function):
    with pytest.raises(Exception) as info:  # noqa: PT011 - any
        function()
    return info.value


def test_frames_of_mpimesh_are_hidden_where_it_has_refused_something():
    error = caught(lambda: Mesh([("a", -5)]))
    assert isinstance(error, MeshError)
    text = readable(error)
    assert "mpimesh/mesh" not in text
    assert __file__ in text
    assert str(error) in text


def test_frames_of_mpimesh_stay_where_it_has_failed_itself():
    def program():
        np.add(mm.DTensor.__new__(mm.DTensor), 1)

    error = caught(program)
    assert not isinstance(error, mm.MpimeshError)
    assert "mpimesh/dtensor" in readable(error)


def test_all_frames_are_shown_with_checks(monkeypatch):
    error = caught(lambda: Mesh([("a", -5)]))
    assert "mpimesh/mesh" not in readable(error)
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    assert "mpimesh/mesh" in readable(error)


def test_what_an_exception_came_from_is_shown_too():
    def program():
        try:
            raise KeyError("first")
        except KeyError:
            Mesh([("a", -5)])

    text = readable(caught(program))
    assert "KeyError: 'first'" in text
    assert "mpimesh/mesh" not in text


def test_errors_that_hold_addresses_agree():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:

            def refuse():
                raise RankError(f"not <object object at 0x7f00{mesh.rank}>")

            progress = current_world().progress
            error = caught(lambda: agreed(progress, mesh.everyone.communicator, "test", refuse))
            return type(error), error.agreed

    assert mm.run_virtual(2, main) == [(RankError, True)] * 2


def run(code: str, **variables: str) -> str:
    clean = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PMI", "OMPI_", "SLURM", "MPI_LOCAL", "_MPIMESH"))
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


HOOKED = """
import sys, threading
plain = sys.exit
import mpimesh
hooks = sys.excepthook, threading.excepthook, sys.exit
print([hooks == (sys.__excepthook__, threading.__excepthook__, plain), "mpi4py.MPI" in sys.modules])
"""


def test_a_program_that_no_launcher_has_started_has_no_hooks():
    assert run(HOOKED) == "[True, False]\n"
    assert run(HOOKED, PMI_SIZE="1", PMI_RANK="0") == "[True, False]\n"


def test_a_rank_has_hooks_from_the_import_on_and_its_children_have_none():
    variables = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    assert run(HOOKED, **variables) == "[False, False]\n"
    child = "\nimport subprocess\nchild = [sys.executable, '-c', sys.argv[1]]"
    code = f"import sys; import mpimesh{child}\nsubprocess.run(child)".replace(
        "sys.argv[1]", repr(HOOKED)
    )
    assert run(code, **variables) == "[True, False]\n"
