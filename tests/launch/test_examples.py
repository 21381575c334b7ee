"""Every example runs, on as many ranks as its docstring says."""

from __future__ import annotations

import ast
import re
import textwrap
from importlib.util import find_spec

import numpy as np
import pytest

from tests.helpers.depth import deep, deep_but
from tests.helpers.raises import names
from tests.launch.example_runs import EXAMPLES as FOLDER, assert_said_once

EXAMPLES = sorted(FOLDER.glob("*.py"))

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


def test_the_index_names_all_of_them():
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"\]\((\S+?)\)", text))
    assert {path.name for path in EXAMPLES} <= named
    assert all((FOLDER / name).is_file() for name in named)


def docstring_of(path):
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def shown_in(docstring):
    """Return the lines that a docstring shows of what the example prints."""
    after = re.split(r"\bprints\b", docstring)[1]
    shown = re.search(r"\n\n((?: {4}.*\n)+)", after + "\n")
    assert shown
    return textwrap.dedent(shown[1]).splitlines()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["hello_mesh", "heat2d"])
def test_an_example_prints_what_its_docstring_shows(launch, name):
    path = next(path for path in EXAMPLES if path.stem == name)
    docstring = docstring_of(path)
    command = re.search(rf"mpiexec -n (\d+) python examples/{path.name}(.*)", docstring)
    assert command
    result = launch(int(command[1]), [str(path), *command[2].split()])
    assert sorted(result.stdout.splitlines()) == sorted(shown_in(docstring)), str(result)


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_a_docstring_has_a_picture_of_the_mesh_and_shows_what_is_printed(name):
    docstring = docstring_of(FOLDER / f"{name}.py")
    command = re.search(r"mpiexec -n (\d+)", docstring)
    assert command
    assert all(re.search(rf"\brank {rank}\b", docstring) for rank in range(int(command[1])))
    assert len(shown_in(docstring)) >= 2


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 3])
def test_wrong_options_of_heat2d_are_said_once(launch, ranks):
    path = FOLDER / "heat2d.py"
    assert_said_once(launch(ranks, [str(path), "--points", "7"]), "heat2d.py")


SMALL = ("pca", "kmeans", "poisson_fft", "resume", "pipeline_zbv", "overlap")
"""More of them is checked by tests/virtual/examples/."""
CHECKED = (*SMALL, "hello_mesh", "heat2d")
"""What is run below, with what they print."""


def test_the_small_examples_run_one_after_the_other_in_one_world(launch, tmp_path):
    code = (
        f"import os, sys; sys.path.insert(0, {str(FOLDER)!r}); os.chdir({str(tmp_path)!r})\n"
        "import pca, kmeans, poisson_fft, resume, pipeline_zbv, overlap, conjugate_gradients\n"
        "pca.main(2000); kmeans.main(2000); poisson_fft.main((8, 16)); resume.main(6)\n"
        "pipeline_zbv.main(2, 64); overlap.main(1, 1)\n"
        "x, y, z = (block for block, _, _ in conjugate_gradients.main(12, 1e-9, 1).values())\n"
        "assert abs(x - y).max() < 1e-8 and abs(x - z).max() < 1e-8"
    )
    result = launch(4, ["-c", code])
    assert result.returncode == 0, str(result)
    assert not result.stderr, str(result)
    for name in SMALL:
        assert list((tmp_path / "out").glob(f"{name}.*")), str(result)


@pytest.mark.parametrize(
    "path",
    deep_but([path for path in EXAMPLES if path.stem not in CHECKED], FOLDER / "train_gpt.py"),
    ids=lambda path: path.stem,
)
def test_an_example_runs(launch, path):
    found = re.search(rf"mpiexec -n (\d+) python examples/{path.name}", docstring_of(path))
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
    ("arguments", "values"),
    [
        ("--mesh dp=3", ("dp=3", 3, 2)),
        ("--mesh tp=2", ("--mesh", "dp", "got tp")),
        ("--rows 0", ("--rows", "at least 1", "'0'")),
        ("--virtual 2", ("--virtual", "mpiexec")),
    ],
)
def test_train_torch_says_once_what_is_wrong(launch, arguments, values):
    path = next(path for path in EXAMPLES if path.name == "train_torch.py")
    result = launch(2, [str(path), *arguments.split()])
    assert_said_once(result, "train_torch.py")
    names(result.stderr, "train_torch.py: error:", *values)


@pytest.mark.deep
@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_train_torch_says_once_that_it_needs_torch(launch):
    path = next(path for path in EXAMPLES if path.name == "train_torch.py")
    result = launch(2, [str(path)])
    assert result.returncode == 0, str(result)
    (line,) = result.stdout.splitlines()
    assert "pip install torch ml_dtypes" in line


@pytest.mark.parametrize(("ends", "numbers"), HEAT.items())
@pytest.mark.parametrize("ranks", [*deep(1, 2), 4])
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
        f"wrote {picture}",
    ]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
