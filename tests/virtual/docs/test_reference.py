"""The reference shows each public member of the largest classes in one task."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def module_of(path: str) -> ModuleType:
    """Return a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parents[3] / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_member_is_in_one_task():
    members: Any = module_of("docs/members.py")
    assert len(members.by_task()) == len(members.TASKS)
    members.TASKS = {owner: {"A task": "no_such"} for owner in members.TASKS}
    with pytest.raises(ValueError, match=r"remove \['no_such'\]"):
        members.by_task()
