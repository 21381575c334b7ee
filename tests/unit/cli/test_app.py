"""The command line as a whole: its entry points, version, completion, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import mpimesh
from mpimesh.cli import app

ROOT = Path(__file__).resolve().parents[3]


def complete(words: str) -> list[str]:
    """Return what bash is offered for a line of which the last word is to be completed."""
    env = {
        **os.environ,
        "_MPIMESH_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    program = "import sys; sys.argv = ['mpimesh']; from mpimesh.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_console_script_is_this_app():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    script = EntryPoint("mpimesh", project["scripts"]["mpimesh"], "console_scripts")
    assert script.load() is app


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mpimesh {mpimesh.__version__}\n")


def test_bash_completes_commands_options_and_schedules():
    assert complete("mpimesh ") == [
        *("doctor", "simulate", "bench", "flight", "ucx-env", "checkpoint"),
    ]
    assert complete("mpimesh simulate --sch") == ["--schedule"]
    assert complete("mpimesh simulate --schedule zb") == ["zb1p", "zb2p", "zbv"]
    assert complete("mpimesh checkpoint ") == ["ls", "show", "verify", "export"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", shell])
    assert result.exit_code == 0
    assert "_MPIMESH_COMPLETE" in result.output


def test_completion_of_the_module_is_that_of_the_command():
    """And not of ``python``, of which all else would be completed no more."""
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "mpimesh", "--show-completion", "bash"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("-F _mpimesh_completion mpimesh")


def test_help_and_completion_import_no_mpi_and_no_arrays():
    program = """
        import sys
        from typer.testing import CliRunner
        from mpimesh.cli import app
        for words in ([], ["doctor"], ["simulate"], ["bench"], ["flight"], ["checkpoint", "ls"]):
            assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
        print(*sorted({"mpi4py", "mpimesh.runtime.device_mesh", "mpimesh.store"} & {*sys.modules}))
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "\n".join(line.strip() for line in program.split("\n")).replace(
                "\nassert", "\n    assert"
            ),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_every_command_says_what_it_does_in_one_line():
    """The list of commands cuts a line of 80 columns."""
    command = typer.main.get_command(app)
    for name, one in command.commands.items():  # type: ignore[attr-defined]
        summary = one.get_short_help_str(limit=200)
        assert len(summary) <= 62, name
        assert not summary.endswith("..."), name


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, as they are typed."""
    yield words
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*words, name))


@pytest.mark.parametrize("words", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_the_page_of_the_reference_has_the_help_of(words):
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    printed = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output.rstrip()
    assert f"\n$ {' '.join(['mpimesh', *words, '--help'])}\n{printed}\n```\n" in page
