"""Files that an example writes: it replaces what examples have written, and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

MARK = "written by an example of mpimesh"
"""Stands near the beginning or the end of a picture or JSON file of an example."""

_NEAR_BYTES = 4096


def check_replaceable(path: Path) -> None:
    """Refuse a path where something is that no example has written.

    Raises:
        FileExistsError: If so.
    """
    if not path.is_symlink():
        if not path.exists():
            return
        if not path.is_dir():
            if not path.is_file():
                return  # such as /dev/null
            size = path.stat().st_size
            with path.open("rb") as file:
                near = file.read(_NEAR_BYTES)
                file.seek(max(0, size - _NEAR_BYTES))
                near += file.read()
            if not size or MARK.encode() in near:
                return
    reason = "no example has written what is there: give another name, or move that away"
    raise FileExistsError(errno.EEXIST, reason, str(path))


def write_text(path: Path, text: str) -> None:
    """Write an SVG, or an object of JSON, with the mark in it.

    Raises:
        FileExistsError: As :func:`check_replaceable`.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".svg":
        text = f"{text.rstrip()}\n<!-- {MARK} -->\n"
    else:
        text = f'{{"about": "{MARK}", {text.lstrip().removeprefix("{")}'
    path.write_text(text, encoding="utf-8")
