"""Knowledge of exit functions of the way the main program ended."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

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


@pytest.mark.thin(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_exit_status(tmp_path, mode, name):
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
