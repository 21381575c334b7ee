"""The README's statements: its programs run, its commands and names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mpimesh as mm
from mpimesh.cli import app

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [
    line.split("#")[0].strip()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
]


def test_the_first_program_is_the_example():
    """But for the picture, and what it prints, in the docstring of the example."""
    example = (ROOT / "examples" / "hello_mesh.py").read_text()
    docstring = ast.get_docstring(ast.parse(example), clean=False) or ""
    assert PYTHON[0] == example.replace(docstring, docstring.splitlines()[0])


def test_the_pipeline_trains():
    program = compile(PYTHON[1], "README.md", "exec")

    def main():
        draw = np.random.default_rng(0)
        x = draw.normal(size=(50, 64)).astype(np.float32)
        batches = [(x, (x[:, 0] > 0).astype(np.int64))] * 20
        names: dict[str, object] = {"mm": mm, "batches": batches}
        exec(program, names)
        return names["loss"], np.asarray(names["y"]).shape

    results = mm.run_virtual(4, main)
    assert [shape for _, shape in results] == [(50, 10)] * 4
    losses = {loss for loss, _ in results}
    assert len(losses) == 1
    assert losses.pop() < 1.5  # from log(10) = 2.3


def test_arrays_over_a_mesh(capsys):
    program = compile(PYTHON[2], "README.md", "exec")

    def main():
        names: dict[str, object] = {"mm": mm, "np": np}
        exec(program, names)
        return names["total"]

    x = np.arange(24.0).reshape(6, 4)
    y = np.maximum(x @ np.ones((4, 8)) - 50.0, 0.0)
    assert mm.run_virtual(4, main) == [y.sum()] * 4
    printed = capsys.readouterr().out
    assert "dp=S0, tp=R on dp=2,tp=2 -> dp=R, tp=S1" in printed
    assert "each rank takes what it lacks: 192 B in 4 messages" in printed
    assert printed.count("(3, 4) of (6, 8), all add up to 480.0\n") == 4


def test_a_gpt_split_over_ranks(capsys):
    program = compile(PYTHON[3], "README.md", "exec")

    def main():
        names: dict[str, object] = {"mm": mm, "np": np}
        exec(program, names)
        return names["mean"]

    losses = set(mm.run_virtual(4, main))
    assert len(losses) == 1
    assert losses.pop() < 2.0  # from log(256) = 5.5
    assert capsys.readouterr().out.count("loss") == 1


def test_sharded_training(capsys):
    program = compile(PYTHON[4], "README.md", "exec")

    def main():
        names: dict[str, object] = {"mm": mm, "np": np}
        exec(program, names)
        return names["loss"]

    losses = set(mm.run_virtual(3, main))
    assert len(losses) == 1
    assert losses.pop() < 0.4  # from log(4) = 1.4
    assert capsys.readouterr().out.startswith("1348 parameters, loss ")


@pytest.mark.parametrize("command", SHELL)
def test_a_command_names_what_is_there(command, tmp_path, monkeypatch):
    program, *arguments = [word for word in command.split() if not re.match("[A-Z_]+=", word)]
    if program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "sbatch":
        (script,) = [word for word in arguments if word.endswith(".sbatch")]
        assert (ROOT / script).is_file()
    elif program in {"python", "mpiexec", "eval"}:  # eval "$(python -m mpimesh ...)"
        _, words = command.removesuffix(')"').split("python -m mpimesh ")
        if words.startswith("simulate "):  # quick and harmless, so it is run
            monkeypatch.chdir(tmp_path)
            result = CliRunner().invoke(app, words.split())
            assert result.exit_code == 0, result.output
            assert [*tmp_path.iterdir()] == [tmp_path / "out.svg"] * ("--svg" in words)
            return
        if words.startswith("checkpoint "):
            monkeypatch.chdir(tmp_path)
            mm.save("run/step-00000030", {"model": {"w": np.arange(3)}})
            result = CliRunner().invoke(app, words.split())
            assert result.exit_code == 0, result.output
            return
        help_text = CliRunner().invoke(app, [words.split()[0], "--help"]).output
        assert all(word in help_text for word in words.split())
    else:
        assert program == "pip"
        groups = re.findall(r"\[([\w,]+)\]", command)
        extras = [extra for group in groups for extra in group.split(",")]
        assert extras
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_names_of_the_table_exist():
    names = re.findall(r"`mm\.(\w+)", TEXT)
    assert len(names) > 10
    missing = sorted({name for name in names if not hasattr(mm, name)})
    assert not missing
    operations = re.search(r"`(all_reduce,[^`]*)`", TEXT)
    assert operations is not None
    assert all(hasattr(mm.ProcessGroup, name) for name in operations[1].split(", "))


def test_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = compile(PYTHON[5], "README.md", "exec")

    def main():
        names: dict[str, Any] = {"mm": mm, "np": np}
        exec(program, names)
        return names["state"]["losses"], names["weights"]["0.weight"].shape

    for ranks in (4, 3):  # the second run finds all done
        for losses, shape in mm.run_virtual(ranks, main):
            assert len(losses) == 30
            assert losses[-1] < 0.9  # from log(4) = 1.4
            assert shape == (64, 16)
    names = ["step-00000010", "step-00000020", "step-00000030"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


def test_a_plan_in_a_loop(capsys):
    program = compile(PYTHON[6], "README.md", "exec")

    def main():
        names: dict[str, object] = {"mm": mm, "np": np}
        exec(program, names)
        return np.asarray(names["x"]).tolist()

    assert mm.run_virtual(4, main) == [[9 * 1.5] * 4] * 4
    assert capsys.readouterr().out == "mean of the last step: [13.5 13.5 13.5 13.5]\n"


def test_a_halo_in_a_loop():
    program = compile(PYTHON[7], "README.md", "exec")

    def main():
        names: dict[str, object] = {"mm": mm, "np": np}
        exec(program, names)
        return np.asarray(names["smooth"]).tolist()

    x = np.arange(8.0)
    for _ in range(3):
        x = (np.roll(x, 1) + np.roll(x, -1)) / 2
    assert mm.run_virtual(4, main) == [x.tolist()] * 4


ROWS = re.findall(r"^\| .* \| `((?:group|mesh)\.\w+\(.*\))` \| ", TEXT, re.M)


def test_each_row_of_the_table_from_mpi4py_gives_what_it_says():
    blocks = [np.arange(4.0) + 10 * rank for rank in range(4)]
    total, joined = np.sum(blocks, axis=0), np.concatenate(blocks)
    nothing: list[object] = [None] * 4
    expected: dict[str, list[object]] = {
        "all_reduce": [total] * 4,
        "reduce": [None, blocks[3], None, None],
        "broadcast": [blocks[1]] * 4,
        "all_gather": [joined] * 4,
        "gather": [None, joined, None, None],
        "scatter": [blocks[1][rank : rank + 1] for rank in range(4)],
        "reduce_scatter": [total[rank : rank + 1] for rank in range(4)],
        "all_to_all": [np.array([block[rank] for block in blocks]) for rank in range(4)],
        "send": nothing,
        "recv": [None, blocks[0], None, None],
        "shift": [None, *blocks[:3]],
        "wrap": [blocks[3], *blocks[:3]],
    }

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            found: dict[str, Any] = {}
            for row in ROWS:
                x = np.arange(4.0) + 10 * mesh.rank
                names = {"mesh": mesh, "group": mesh.group("dp"), "x": x}
                name = "wrap" if "wrap" in row else re.split(r"[.(]", row)[1]
                takes_part = {"send": mesh.rank == 0, "recv": mesh.rank == 1}
                if row.startswith("mesh."):
                    found[name] = list(eval(row, names).ranks)
                elif takes_part.get(name, True):
                    found[name] = eval(row, names).resolve()
                    assert "out=x" not in row or found[name] is x
            return found

    results = mm.run_virtual(4, main)
    names = {name for found in results for name in found}
    assert names == {*expected, "group", "add_group"}
    for rank, found in enumerate(results):
        assert (found.pop("group"), found.pop("add_group")) == ([0, 1, 2, 3], [0, 3])
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name][rank], err_msg=f"{name}, {rank}")
