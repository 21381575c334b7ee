"""The README's first program is the example, and the table of mpi4py's calls is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text()
(PROGRAM, *_) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


def test_the_first_program_is_the_example():
    """But for the picture, and what it prints, in the docstring of the example."""
    example = (ROOT / "examples" / "hello_mesh.py").read_text()
    docstring = ast.get_docstring(ast.parse(example), clean=False) or ""
    assert example.replace(docstring, docstring.splitlines()[0]) == PROGRAM


TABLE = (ROOT / "docs" / "coming-from" / "mpi4py.md").read_text()
ROWS = re.findall(r"^\| .* \| `((?:group|mesh)\.\w+\(.*\))` \| ", TABLE, re.M)


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
