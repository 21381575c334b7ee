"""The programs of docs/how-to/files.md run, one after the other, in one folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.store import open_array, save_array

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "files.md").read_text()
ARRAYS = PAGE[PAGE.index("## Arrays in files") :]
PROGRAMS = re.findall(r"^```python\n(.*?)^```", ARRAYS, re.M | re.S)


def test_arrays_in_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mm, "open_array", open_array, raising=False)
    monkeypatch.setattr(mm, "save_array", save_array, raising=False)
    found = []
    for number, program in enumerate(PROGRAMS):
        code = compile(program, f"program {number} of docs/how-to/files.md", "exec")

        def main(code=code):
            names: dict[str, Any] = {"mm": mm, "np": np}
            exec(code, names)
            return names

        found.append(mm.run_virtual(4, main))
    x = np.arange(24.0).reshape(6, 4)
    for names in found[0]:
        assert names["total"] == x.sum()
        assert np.array_equal(names["corner"], x[:2, ::2])
        assert names["part"].shape == (3, 4)
    x[3:5] = 0
    assert np.array_equal(np.load("x.npy"), x)
    assert all((names["again"].local == 1).all() for names in found[2])
