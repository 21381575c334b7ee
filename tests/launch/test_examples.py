"""Every example runs, on as many ranks as its docstring says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

SHORTER = {"train_digits.py": ["--epochs", "2"]}
"""Its whole length is run by test_train_digits.py."""


def test_there_are_examples():
    assert {"hello_mesh.py", "train_digits.py"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(launch, path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    found = re.search(rf"mpiexec -n (\d+) python examples/{path.name}", docstring or "")
    assert found, f"the docstring of {path} names no command"
    result = launch(int(found[1]), [str(path), *SHORTER.get(path.name, [])])
    assert result.returncode == 0, str(result)
    assert result.stdout.strip()
    assert not result.stderr, str(result)


def test_hello_mesh(launch):
    """Replicas of a stage are two ranks apart; the stage before is the rank before."""
    path = next(path for path in EXAMPLES if path.name == "hello_mesh.py")
    lines = launch(4, path).stdout.splitlines()
    expected = []
    for rank in range(4):
        mean = np.full(3, rank % 2 + 1.0)  # of ranks 0 and 2, or of 1 and 3
        before = np.full(3, rank - 1.0) if rank % 2 else None
        place = f"rank {rank} at dp={rank // 2}, pp={rank % 2}"
        expected.append(f"{place}: mean over dp {mean}, from the stage before {before}")
    assert sorted(lines) == expected
