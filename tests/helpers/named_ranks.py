"""The ranks that a message names before its rows."""

from __future__ import annotations

import re

from mpimesh.arguments import ranks_of


def named_ranks(message: str) -> set[int]:
    """Return the ranks of all rows such as ``ranks 0-2, 5: what they did``."""
    rows = re.findall(r"ranks? ([0-9][-0-9:, ]*): ", message)
    return {rank for row in rows for rank in ranks_of(row.replace(" ", ""))}
