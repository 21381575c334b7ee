"""The programs and commands in docs/reference/checkpoint-format.md do what the page shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import mpimesh as mm
from mpimesh.cli import app

ROOT = Path(mm.__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "checkpoint-format.md").read_text()
CHANGING = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>"),
    (r"took [0-9.]+ s", "took <seconds>"),
    (r"[0-9.]+ MiB", "<size>"),  # of the files: the manifest's values may change it
]


def masked(text: str) -> str:
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text)
    return text.strip()


def test_its_programs_and_commands_do_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for kind, text in re.findall(r"^```(python|console)\n(.*?)^```", PAGE, re.M | re.S):
        if kind == "python":
            exec(compile(text, "docs/reference/checkpoint-format.md", "exec"), names)
            continue
        pattern = r"^\$ python -m mpimesh (.*)\n((?:[^$].*\n|\n)*)"
        for command, shown in re.findall(pattern, text, re.M):
            result = CliRunner().invoke(app, shlex.split(command))
            assert result.exit_code == 0, result.output
            assert masked(result.output) == masked(shown), command
    np.testing.assert_array_equal(names["x"], np.arange(24.0).reshape(4, 6))


def test_the_manifest_has_the_members_that_it_names(tmp_path):
    mm.save(tmp_path / "a", {"w": np.zeros(3), "loss": float("nan")})
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    (table,) = re.findall(r"^\| member .*?\n\n", PAGE, re.M | re.S)
    told = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert told == list(manifest)
    assert set(manifest["arrays"]["w"]) == {"dtype", "shape", "pieces"}
    assert manifest["values"]["loss"] == {"$float": "nan"}
    assert (
        f'"version":{re.findall(r"number of the format, ([0-9]+)", PAGE)[0]}'.encode()
        in (tmp_path / "a" / "manifest.json").read_bytes()
    )
