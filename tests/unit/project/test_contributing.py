"""CONTRIBUTING names files, rooms and targets that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.project.test_rooms import ROOMS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = sorted(
    set(re.findall(r"`((?:mpimesh|tests|docs|examples|benchmarks|slurm)/[\w./-]*)", TEXT))
)


def test_there_are_files():
    assert len(FILES) > 40


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_there(name):
    assert (ROOT / name).exists()


def test_all_rooms_are_in_the_list():
    begin = TEXT.index("## Rooms")
    table = TEXT[begin : TEXT.index("\n## ", begin)]
    listed = {
        name.rstrip("/").removesuffix(".py")
        for row in re.findall(r"^\| ([^|]*) \|", table, re.M)
        for name in re.findall(r"`(\w+/?(?:\.py)?)`", row)
    }
    assert listed == {room for rooms in ROOMS for room in rooms} - {"__main__"}


@pytest.mark.thin(1)
@pytest.mark.parametrize("word", sorted(set(re.findall(r"`([A-Z][A-Z_]+)`|`@(\w+)\(", TEXT))))
def test_a_name_of_the_code_is_in_it(word):
    name = "".join(word)
    sources = [*(ROOT / "mpimesh").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert name == "DEPTH" or any(name in path.read_text() for path in sources)
