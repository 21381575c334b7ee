"""The core knows none of the systems whose words `mm.compat` has."""

from __future__ import annotations

import re
from pathlib import Path

import mpimesh

SYSTEMS = re.compile(r"tensorflow|\btvm\b|kapsl|\bshrew\b|\bxla\b", re.IGNORECASE)


def test_no_file_outside_of_compat_names_one():
    root = Path(mpimesh.__file__).parent
    files = [path for path in root.rglob("*.py") if path.parent.name != "compat"]
    assert len(files) > 100
    named = [path.relative_to(root) for path in files if SYSTEMS.search(path.read_text())]
    assert named == []
