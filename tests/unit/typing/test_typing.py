"""mypy and pyright find misspelt words in a user's program, and know what calls return."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

PROGRAM = Path(__file__).with_name("user_program.py")
ROOT = PROGRAM.parents[3]
EXPECTED = {
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1)
    if line.endswith("# expect error")
}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_mypy_finds_the_lines_that_are_wrong_and_no_other():
    pytest.importorskip("mypy")
    text = run("mypy", "--no-error-summary", str(PROGRAM))
    found = {int(number) for number in re.findall(rf"{PROGRAM.name}:(\d+): error", text)}
    assert found == EXPECTED, text


@pytest.mark.timeout(240)
def test_pyright_finds_the_lines_that_are_wrong_and_no_other(tmp_path):
    pytest.importorskip("basedpyright")  # pyright with all that it runs on in its wheel
    project = tmp_path / "pyrightconfig.json"
    settings = {"include": [str(PROGRAM)], "extraPaths": [str(ROOT)]}
    project.write_text(json.dumps(settings | {"typeCheckingMode": "standard"}))
    command = "basedpyright", "--outputjson", "--pythonpath", sys.executable
    report = json.loads(run(*command, "--project", str(project)))
    errors = [each for each in report["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in errors} == EXPECTED, errors
