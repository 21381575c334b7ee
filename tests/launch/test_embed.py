"""The embed command and its example under mpiexec: one row a line, and exit codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpimesh.models.random_model import write_random_model
from tests.helpers.raises import names
from tests.launch.example_runs import EXAMPLES, assert_said_once

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

EXAMPLE = EXAMPLES / "embed_minilm.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small")


def test_the_command_and_the_example_write_a_row_for_each_line(launch, model, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_bytes("a b\fc\r\n\nman\u2028is\n. food".encode())
    found: list[Any] = []
    for program in (["-m", "mpimesh", "embed"], [EXAMPLE]):
        out = tmp_path / f"{len(found)}.npy"
        arguments = [*program, lines, "--model", model, "--mesh", "dp=2", "--out", out]
        result = launch(2, list(map(str, arguments)))
        assert result.returncode == 0, str(result)
        assert result.stdout.startswith("4 sentences")
        found.append(np.load(out))
    assert found[0].shape == (4, 12)
    np.testing.assert_array_equal(*found)


@pytest.mark.deep
@pytest.mark.parametrize("arguments", ["--mesh xx=3", "--mesh dp=2", "--out v.npy", "--wrong"])
def test_wrong_options_of_the_example_are_said_once(launch, model, arguments):
    """Whether or not the published weights are installed."""
    options = [*arguments.split(), "--model", str(model)]
    assert_said_once(launch(3, [str(EXAMPLE), *options]), "embed_minilm.py")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("program", "content", "out", "values"),
    [
        ([EXAMPLE], b"good\n\xff\n", "v.npy", ("lines.txt", "line 2", "UTF-8")),
        (["-m", "mpimesh", "embed"], b"good\n", "none/v.npy", ("no folder", "none")),
    ],
    ids=["example", "command"],
)
def test_one_rank_tells_and_all_end_with_2(launch, model, tmp_path, program, content, out, values):
    lines = tmp_path / "lines.txt"
    lines.write_bytes(content)
    arguments = [*program, lines, "--model", model, "--mesh", "tp=3", "--out", tmp_path / out]
    result = launch(3, list(map(str, arguments)))
    assert result.returncode == 2, str(result)
    assert not result.stdout
    assert result.stderr.count("error") == 1, str(result)
    names(result.stderr, *values)
    assert [one.name for one in tmp_path.glob("*.npy*")] == []
