"""Examples replace what examples have written, and nothing else."""

from __future__ import annotations

import json
import random
from xml.etree import ElementTree

import pytest

from tests.launch.example_runs import example_module

OTHERS = ["{}", "<svg></svg>", "\x93NUMPY", "my results " * 2000, '{"about": "my work"}', " "]


def test_random_files_of_others_stay(monkeypatch, tmp_path):
    files = example_module("common.files", monkeypatch)
    figure = example_module("common.figure", monkeypatch)
    draw = random.Random(0)
    for number in range(24):
        path = tmp_path / f"{number}{draw.choice(['.svg', '.json', '.png'])}"
        kind = draw.choice(["none", "empty", "ours", "other", "link", "folder"])
        target = tmp_path / f"target{number}"
        if kind == "other":
            path.write_text(draw.choice(OTHERS))
        elif kind == "link":
            target.write_text(files.MARK)
            path.symlink_to(target)
        elif kind == "folder":
            path.mkdir()
        elif kind == "empty":
            path.touch()
        elif kind == "ours" and path.suffix == ".png":
            path.write_text(files.MARK)
        elif kind == "ours":
            files.write_text(path, '{"large": "' + "x" * 9000 + '"}')
        before = path.read_bytes() if path.is_file() else None
        if path.suffix == ".png":
            pytest.importorskip("matplotlib")
            figure.save_figure(path, lambda axes: axes.plot([1, 2]))
            changed = path.is_file() and path.read_bytes() != before
        else:
            text = "<svg>new</svg>" if path.suffix == ".svg" else '{"new": 1}'
            changed = True
            try:
                files.write_text(path, text)
            except FileExistsError:
                changed = False
        assert changed == (kind in ("none", "empty", "ours")), (kind, path)
        if not changed:
            assert (path.read_bytes() if path.is_file() else None) == before
        elif path.suffix == ".json":
            assert json.loads(path.read_text())["new"] == 1
        elif path.suffix == ".svg":
            assert ElementTree.fromstring(path.read_text()).text == "new"
        if changed:
            files.check_replaceable(path)


@pytest.mark.parametrize("name", ["results.json", "out/step.svg"])
def test_an_example_says_so_before_it_begins(name, monkeypatch, tmp_path, capsys):
    program = example_module("train_digits", monkeypatch)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"mine": 1}')
    files = ["--json", str(tmp_path / "results.json"), "--out", str(tmp_path / "out")]
    assert program.main(["--virtual", "2", "--mesh", "dp=2", *files]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "no example has written" in line
    assert path.read_text() == '{"mine": 1}'
