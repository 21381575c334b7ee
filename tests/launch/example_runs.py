"""Run an example: in this process, on virtual ranks, or as a program of its own."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mpimesh.testing import mpi_vendor
from mpimesh.testing.launch import LaunchResult
from tests.helpers.raises import names

EXAMPLES = Path(__file__).parents[2] / "examples"


def example_module(name: str, monkeypatch: Any) -> ModuleType:
    """Import an example, or what one is made of."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def in_process(name: str, monkeypatch: Any, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Return what runs an example here, and gives its exit code and results."""
    module = example_module(name, monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, Any]:
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        code = module.main([*arguments, "--json", str(result)])
        text = result.read_text() if result.exists() else ""
        return code, json.loads(text) if text else None

    return run


def assert_one_line(printed: str, name: str, *values: object) -> None:
    """Check that all that was printed is one line of an error, which names `values`."""
    assert re.fullmatch(f"{name}: error: .*\n", printed), printed
    names(printed, *values)


def assert_said_once(result: LaunchResult, name: str) -> None:
    """Check that one rank has said what is wrong, and that all ended with exit code 2."""
    assert result.returncode == 2, str(result)
    lines = (result.stdout + result.stderr).splitlines()
    assert len([line for line in lines if f"{name}: error: " in line]) == 1, str(result)
    assert "Traceback" not in result.stderr
    if mpi_vendor() == "mpich":  # the other one adds a paragraph of its own
        assert len(lines) == 1, str(result)
