"""The page of troubleshooting quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.*)`$", PAGE, re.M)
HOLE = "\0"


@cache
def texts() -> list[str]:
    """All texts of the library, with a mark where an f-string puts a value in."""
    found = []
    for path in (ROOT / "mpimesh").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else HOLE
                    for part in node.values
                )
                found.append("".join(parts))
    return found


def is_said(message: str) -> bool:
    """Tell whether one text has all words of `message` in order, with a value for each "…"."""
    words = [part.strip() for part in message.split("…")]
    return any(_has(text, words) for text in texts())


def _has(text: str, words: list[str]) -> bool:
    at = 0
    for part in words:
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


def test_each_quoted_message_is_in_the_code():
    assert len(QUOTED) > 20
    assert [message for message in QUOTED if not is_said(message)] == []
    assert not is_said("mesh … ranks, but the moon has …")
    assert not is_said("… sees a world of 1, as it uses this launcher's protocol; …")
