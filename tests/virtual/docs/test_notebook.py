"""The notebook is that of its page, and its cells show what it says."""

from __future__ import annotations

import json

from tests.virtual.docs.test_blocks import ROOT
from tests.virtual.docs.test_reference import module_of

PAGE, NOTEBOOK = ROOT / "docs/tutorials/notebook.md", ROOT / "docs/tutorials/virtual-ranks.ipynb"


def test_the_notebook_has_the_cells_of_its_page_and_what_they_show():
    made = json.loads(module_of("docs/notebook.py").notebook(PAGE.read_text()))
    again = f"python docs/notebook.py {PAGE.relative_to(ROOT)} {NOTEBOOK.relative_to(ROOT)}"
    assert json.loads(NOTEBOOK.read_text()) == made, f"the page has changed: {again}"


def test_the_notebook_is_one_in_the_format_of_jupyter():
    whole = json.loads(NOTEBOOK.read_text())
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"]) > 10
    pictures = 0
    for cell in whole["cells"]:
        assert set(cell) - {"execution_count", "outputs"} == {
            "cell_type",
            "id",
            "metadata",
            "source",
        }
        assert ("outputs" in cell) == (cell["cell_type"] == "code")
        for output in cell.get("outputs", []):
            pictures += "<svg" in output.get("data", {}).get("text/html", "")
    assert pictures == 2
