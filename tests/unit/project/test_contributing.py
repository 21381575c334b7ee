"""CONTRIBUTING names files, rooms and targets that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.project.test_rooms import ROOMS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = sorted(
    set(re.findall(r"`((?:mpimesh|tests|docs|examples|benchmarks|slurm)/[\w./-]*)", TEXT))
)


def test_each_file_that_is_named_is_there():
    assert len(FILES) > 40
    assert [name for name in FILES if not (ROOT / name).exists()] == []


def test_all_rooms_are_in_the_list():
    begin = TEXT.index("## Rooms")
    table = TEXT[begin : TEXT.index("\n## ", begin)]
    listed = {
        name.rstrip("/").removesuffix(".py")
        for row in re.findall(r"^\| ([^|]*) \|", table, re.M)
        for name in re.findall(r"`(\w+/?(?:\.py)?)`", row)
    }
    assert listed == {room for rooms in ROOMS for room in rooms} - {"__main__"}


def test_each_name_of_the_code_is_in_it():
    names = {a or b for a, b in re.findall(r"`([A-Z][A-Z_]+)`|`@(\w+)\(", TEXT)}
    sources = [*(ROOT / "mpimesh").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    assert {"ALGORITHM_NAMES", "implements"} <= names
    assert [name for name in names if name not in code] == []
