"""The reference shows each public member of the largest classes in one task."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

MEMBERS = Path(__file__).parents[3] / "docs/members.py"


@pytest.mark.thin(1)
def test_each_public_member_is_in_one_task():
    spec = importlib.util.spec_from_file_location("members", MEMBERS)
    members = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(members)
    pages = members.by_task()
    assert len(pages) == len(members.TASKS)
    members.TASKS = {owner: {"A task": "no_such"} for owner in members.TASKS}
    with pytest.raises(ValueError, match=r"remove \['no_such'\]"):
        members.by_task()
