"""The walk through the code in docs/explanation/how-a-job-ends.md is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpimesh as mm
from mpimesh.runtime.control import Tag

ROOT = Path(mm.__file__).parent
PAGE = (ROOT.parent / "docs" / "explanation" / "how-a-job-ends.md").read_text()
FILE, NAME = r"`([a-z_/]+\.py)`", r"`(\w+)`"
PLACES = re.findall(rf"{NAME} (?:in |\(){FILE}", PAGE)
PLACES += [(name, file) for file, name in re.findall(rf"{FILE}, {NAME}", PAGE)]


@pytest.mark.parametrize("file", sorted(set(re.findall(FILE, PAGE))))
def test_each_file_that_it_names_is_there(file):
    assert (ROOT / file).exists()


@pytest.mark.parametrize(("name", "file"), sorted(PLACES))
def test_what_it_places_in_a_file_is_there(name, file):
    assert re.search(rf"^(class|def) {name}\b", (ROOT / file).read_text(), re.M)


def test_it_tells_of_every_kind_of_message():
    told = set(re.findall(r"`Tag\.(\w+)`", PAGE))
    answers = {"WATCHDOG_ANSWER", "DEADLOCK_ANSWER", "DEADLOCK_VERDICT"}
    assert told | answers == set(Tag.__members__)


@pytest.mark.parametrize(
    "text",
    [
        "without ending MPI",
        "while other ranks had not: ending the job",
        "longer than MPIMESH_TIMEOUT_S=",
        "ranks wait for each other in a circle, and none can go on:",
        "waits for ranks that have not",
        "last operations of this rank:",
    ],
)
def test_what_it_says_is_printed_is_printed(text):
    assert text in PAGE
    assert any(text in path.read_text() for path in (ROOT / "runtime").glob("*.py"))
