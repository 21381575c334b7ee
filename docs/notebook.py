"""The notebook of a page: its text and its Python as cells, with what they print and show.

python docs/notebook.py docs/tutorials/notebook.md docs/tutorials/virtual-ranks.ipynb
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any


def cells_of(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page of MyST: ("markdown" or "code", source) in order."""
    page = re.sub(r"<!-- output -->\n```text\n.*?^```$", "", page, flags=re.M | re.S)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.S)
    page = re.sub(r"^:::.*?^:::$", "", page, flags=re.M | re.S)  # pictures
    page = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", page)
    cells = []
    for number, text in enumerate(re.split(r"^```(?:python)?$", page, flags=re.M)):
        text = re.sub(r"\n{3,}", "\n\n", text) if number % 2 == 0 else text
        if text.strip():
            cells.append(("code" if number % 2 else "markdown", text.strip()))
    return cells


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return what a notebook shows below it: prints, and its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        shown = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            shown = {"text/plain": f"<{type(value).__name__}>", "text/html": value._repr_html_()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown})
    return outputs


def notebook(page: str) -> str:
    """Return the notebook of a page in Jupyter's format, version 4.5."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, (kind, source) in enumerate(cells_of(page)):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source,
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": run(source, names)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("notebook", type=Path)
    arguments = parser.parse_args()
    arguments.notebook.write_text(notebook(arguments.page.read_text()))


if __name__ == "__main__":
    main()
