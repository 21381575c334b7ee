"""Every example runs, on as many ranks as its docstring says."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

SHORTER = {
    "train_digits.py": ["--epochs", "2"],
    "train_gpt.py": ["--steps", "3", "--sample", "8"],
}
"""More of them is run by test_train_digits.py and test_train_gpt.py."""

HEAT = {
    "periodic": (
        "4.01e-04",
        "1.3e-05 off; no change would be 1.8e-02 off",
        "u + 3.98 Lu + 6.69 LLu",
    ),
    "fixed": ("1.38e-04", "1.6e-06 off; no change would be 1.7e-02 off", "u + 4.00 Lu + 7.34 LLu"),
}
"""Largest error, error of the prediction, and weights: what 20 steps of the scheme are, near."""


def test_there_are_examples():
    names = {path.name for path in EXAMPLES}
    assert {"heat2d.py", "hello_mesh.py", "train_digits.py", "train_gpt.py"} <= names


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


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_train_torch(launch):
    """The first loss is that of plain PyTorch, and the example itself compares the others."""
    path = next(path for path in EXAMPLES if path.name == "train_torch.py")
    result = launch(4, [str(path), "--mesh", "dp=2,pp=2", "--steps", "4", "--check"])
    assert result.returncode == 0, str(result)
    ours, plain = (line.split(": ") for line in result.stdout.splitlines())
    assert (ours[0], plain[0]) == ("dp=2,pp=2", "plain PyTorch")
    first, same = (float(line[1].split(",")[0].removeprefix("loss ")) for line in (ours, plain))
    assert first == pytest.approx(same, rel=1e-5)


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh dp=3", "mesh dp=3.* needs 3.* ranks"),
        ("--rows 0", "argument --rows: needs a whole number of at least 1"),
        ("--virtual 2", "argument --virtual: is for running without mpiexec"),
    ],
)
def test_train_torch_says_once_what_is_wrong(launch, arguments, message):
    path = next(path for path in EXAMPLES if path.name == "train_torch.py")
    result = launch(2, [str(path), *arguments.split()])
    assert result.returncode == 2, str(result)
    (line,) = (result.stdout + result.stderr).splitlines()
    assert re.fullmatch(f"train_torch.py: error: .*{message}.*", line)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_train_torch_says_once_that_it_needs_torch(launch):
    path = next(path for path in EXAMPLES if path.name == "train_torch.py")
    result = launch(2, [str(path)])
    assert result.returncode == 0, str(result)
    (line,) = result.stdout.splitlines()
    assert "pip install 'mpimesh[torch]'" in line


@pytest.mark.parametrize(("ends", "numbers"), HEAT.items())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heat2d(launch, tmp_path, ends, numbers, ranks):
    """The same numbers on any number of ranks; the scheme is of order 2."""
    path = next(path for path in EXAMPLES if path.name == "heat2d.py")
    picture = tmp_path / "heat.png"
    result = launch(ranks, [str(path), "--ends", ends, "--picture", str(picture)])
    assert result.returncode == 0, str(result)
    error, off, weights = numbers
    size = 64 if ends == "periodic" else 63
    assert result.stdout.splitlines()[-5:] == [
        f"{ends} ends, {size} x {size} points, 400 steps to t = 0.0195: largest error {error}",
        "order 2.00",
        f"the surrogate learned {weights}",
        f"20 steps ahead it is {off}",
        f"wrote {picture}: the simulation, and the surrogate's prediction",
    ]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
