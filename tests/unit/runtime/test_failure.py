"""Tracebacks that can be read, the hooks, and how the main program ended."""

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
from mpimesh.runtime.agreement import agree_alike
from mpimesh.runtime.launch import exit_status
from mpimesh.runtime.tracebacks import readable
from tests.helpers.depth import deep_but


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


def test_all_frames_are_shown_with_checks_of_level_two(monkeypatch):
    error = caught(lambda: Mesh([("a", -5)]))
    for checks in ("0", "1"):
        monkeypatch.setenv("MPIMESH_CHECKS", checks)
        assert "mpimesh/mesh" not in readable(error)
    monkeypatch.setenv("MPIMESH_CHECKS", "2")
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

            error = caught(lambda: agree_alike(mesh._core.everyone, "test", refuse))
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


# -- the end of the main program -----------------------------------------------------------------

HEAD = """
import atexit, sys
from mpimesh.runtime.failure import MainProgram
main = MainProgram()
main.watch()
atexit.register(lambda: print("status", main.exit_status()))
"""
MODES = ["script", "-m", "-c"]

# The program, its exit status, and what is known of it in a script and elsewhere.
PROGRAMS = {
    "the end": ("pass", 0, 0, 0),
    "sys.exit()": ("sys.exit()", 0, 0, 0),
    "sys.exit(0)": ("sys.exit(0)", 0, 0, 0),
    "sys.exit(3)": ("sys.exit(3)", 3, 3, 3),
    "sys.exit(text)": ("sys.exit('text')", 1, 1, 1),
    "in a function": ("def f():\n    try: sys.exit(3)\n    finally: f.x = 1\nf()", 3, 3, 3),
    "bare": ("raise SystemExit(3)", 3, 3, 0),
    "bare class": ("raise SystemExit", 0, 0, 0),
    "bare, through finally": ("try:\n    raise SystemExit(3)\nfinally:\n    x = 1", 3, 3, 0),
    "bare, in a function": ("def f():\n    raise SystemExit(3)\nf()", 3, 3, 0),
    "before it was watched": ("from builtins import SystemExit as E\nraise E(3)", 3, 3, 0),
    "an error": ("1 / 0", 1, 1, 1),
    "an error in a function": ("def f():\n    1 / 0\nf()", 1, 1, 1),
    "an error, other hook": ("sys.excepthook = lambda *error: None\n1 / 0", 1, 1, 1),
    "exit caught": ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, 0, 0),
    "exit caught and kept": (
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error",
        0,
        0,
        0,
    ),
    "bare exit caught and kept": (
        "def f():\n    raise SystemExit(3)\ntry:\n    f()\nexcept SystemExit as error:\n"
        "    kept = error",
        0,
        0,
        0,
    ),
    "caught, then another": (
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\nsys.exit(4)",
        4,
        4,
        4,
    ),
    "an exit that was never raised": ("kept = SystemExit(3)", 0, 0, 0),
    "exit of a thread": (
        "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\n"
        "thread.start()\nthread.join()",
        0,
        0,
        0,
    ),
}


# An exit that is told, one that is not, an error, an exit that is none, and one of another thread.
QUICK = ("sys.exit(3)", "bare, in a function", "an error", "exit caught", "exit of a thread")


@pytest.mark.parametrize("mode", deep_but(MODES, "script", "-c"))
@pytest.mark.parametrize("name", deep_but(PROGRAMS, *QUICK))
def test_the_status_of_the_main_program_is_known(tmp_path, mode, name):
    text, status, known_of_script, known_elsewhere = PROGRAMS[name]
    program = HEAD + textwrap.dedent(text) + "\n"
    (tmp_path / "program.py").write_text(program)
    arguments = {"script": ["program.py"], "-m": ["-m", "program"], "-c": ["-c", program]}[mode]
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stderr
    known = known_of_script if mode == "script" else known_elsewhere
    assert result.stdout == f"status {known}\n", result.stderr


def test_sys_exit_raises_what_it_says():
    code = HEAD + textwrap.dedent(
        """
        for arguments in [(), (None,), (0,), (3,), ("text",)]:
            try:
                sys.exit(*arguments)
            except SystemExit as error:
                print(error.code, type(error).__name__, error.args)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[:-1] == [
        "None SystemExit ()",
        "None SystemExit ()",
        "0 SystemExit (0,)",
        "3 SystemExit (3,)",
        "text SystemExit ('text',)",
    ]


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), (True, 1), ("text", 1)]
)
def test_exit_status(code, status):
    assert exit_status(code) == status
