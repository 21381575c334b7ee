"""The map of the library: each room with its files, and arrows to the rooms that it imports from.

    python docs/house.py house.svg

Rooms and their order are those of tests/unit/project/test_rooms.py, which fails where a room
imports from one below it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Pixels.
WIDTH, LEFT, NAME, TILES, ARCS = 1080, 20, 190, 560, 790
ROW, BAR = 46, 30
EVERYWHERE = {"errors", "settings", "arguments"}
"""Rooms that nearly all import from; arrows to them would hide the others."""
INK, MUTED, PAPER = "#1f2328", "#59636e", "#ffffff"
ROOM, FILE, TOP = "#eef3f8", "#9dbcd8", "#6b94b8"


LEGEND = (
    "A tile is a file. An arrow leads from a room to one that it imports from, which is above it; "
    "those to the first three are left out."
)


@dataclass
class Room:
    """A folder of the package, or a file that stands alone.

    Attributes:
        name: As in ``mpimesh.NAME``.
        about: The first sentence of its docstring.
        files: The lines of code of each of its files, without docstrings and comments.
        imports: How often its files import from each other room.
    """

    name: str
    about: str = ""
    files: dict[str, int] = field(default_factory=dict)
    imports: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """The lines of code of all files."""
        return sum(self.files.values())


def levels() -> list[list[str]]:
    """Read the rooms, those that may be imported by all others first."""
    tree = ast.parse((ROOT / "tests/unit/project/test_rooms.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS"
    )
    return [sorted(names) for names in ast.literal_eval(value)]


def read(package: Path) -> dict[str, Room]:
    """Read the rooms of `package` off its source."""
    rooms: dict[str, Room] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0].startswith("__"):
            continue
        room = rooms.setdefault(parts[0], Room(parts[0]))
        text = path.read_text()
        tree = ast.parse(text)
        if len(parts) == 1 or parts[1:] == ("__init__",):
            docstring = ast.get_docstring(tree) or ""
            room.about = docstring.split("\n\n")[0].replace("\n", " ").replace("``", "").rstrip(".")
        room.files["/".join(parts[1:]) or parts[0]] = code_lines(text, tree)
        for other in imported(tree):
            if other != room.name:
                room.imports[other] += 1
    for path in sorted([*package.rglob("*.pyx"), *package.rglob("*.h")]):
        name, *parts = path.relative_to(package).parts
        lines = [line.strip() for line in path.read_text().splitlines()]
        code = [line for line in lines if line and not line.startswith(("#", "//", "/*", "*"))]
        rooms[name].files["/".join(parts)] = len(code)
        for line in code:
            match = re.match(r"(?:from|c?import) mpimesh\.(\w+)", line)
            if match and match[1] != name:
                rooms[name].imports[match[1]] += 1
    return rooms


def imported(tree: ast.Module) -> list[str]:
    """List the rooms that a file imports from, once for each statement."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "mpimesh":
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpimesh."):
            names.append((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names += [a.name.split(".")[1] for a in node.names if a.name.startswith("mpimesh.")]
    return names


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold code: no docstring, no comment, no blank line."""
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def draw(order: list[list[str]], rooms: dict[str, Room]) -> str:
    """Draw the map: a row for each room, its files as tiles, and arrows at the right."""
    names = [name for level in order for name in level if name in rooms]
    place = {name: 74 + ROW * row for row, name in enumerate(names)}
    most = max(rooms[name].lines for name in names)
    total, files = sum(r.lines for r in rooms.values()), sum(len(r.files) for r in rooms.values())
    body = [
        _text(LEFT, 28, "The rooms of mpimesh", size=18, weight="600"),
        _text(LEFT, 50, f"{total:,} lines of code in {files} files. {LEGEND}", fill=MUTED),
    ]
    for number, name in enumerate(names):
        for other, count in sorted(rooms[name].imports.items()):
            if other in place and other not in EVERYWHERE:
                body.append(
                    _arrow(place[name], place[other], number, len(names), count, name, other)
                )
    for name in names:
        body += _room(rooms[name], place[name], most)
    height = 74 + ROW * len(names) + 6
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif">',
            "<title>The rooms of mpimesh, their files, and who imports from whom</title>",
            '<defs><marker id="up" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{TOP}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _room(room: Room, y: float, most: int) -> list[str]:
    parts = [
        f'<rect x="{LEFT}" y="{y}" width="{ARCS - LEFT}" height="{ROW - 6}" rx="4" fill="{ROOM}"/>',
        _text(LEFT + 10, y + 17, room.name, size=14, weight="600"),
        _text(LEFT + 10, y + 32, _counts(room), size=11, fill=MUTED),
    ]
    x, scale = float(NAME), TILES / most
    for file, lines in sorted(room.files.items(), key=lambda item: -item[1]):
        width = max(lines * scale, 1.5)
        label = f"{file.removesuffix('__init__').rstrip('/') or room.name}: {lines} lines"
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 5}" width="{max(width - 1, 0.8):.1f}" '
            f'height="{BAR - 14}" rx="1.5" fill="{FILE}"><title>{escape(label)}</title></rect>'
        )
        x += width
    parts.append(_text(NAME, y + 34, _short(room.about, 105), size=11))
    return parts


def _counts(room: Room) -> str:
    files = len(room.files)
    return f"{room.lines:,} lines, {files} file{'s' * (files != 1)}"


def _arrow(
    below: float, above: float, number: int, rooms: int, count: int, name: str, other: str
) -> str:
    """Draw the arrow from a room's row to one above; those that go far reach out far."""
    start, end = below + 12 + 14 * number / rooms, above + 12 + 14 * number / rooms
    reach = ARCS + 24 + (start - end) * 0.34
    times = f"{count} import{'s' * (count != 1)}"
    path = f"M{ARCS} {start:.1f}C{reach:.1f} {start:.1f} {reach:.1f} {end:.1f} {ARCS + 2} {end:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{TOP}" stroke-width="{0.5 + count**0.5 / 5:.2f}" '
        f'opacity="0.45" marker-end="url(#up)"><title>{name} imports from {other}: {times}</title>'
        "</path>"
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3].rsplit(" ", 1)[0] + " ..."


def _text(
    x: float, y: float, text: str, *, size: int = 13, fill: str = INK, weight: str = "400"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def write(path: Path) -> None:
    """Draw the map into a file, which is not touched if it shows the same already."""
    picture = draw(levels(), read(ROOT / "mpimesh"))
    if not path.is_file() or path.read_text() != picture:
        path.write_text(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the map of the library.")
    parser.add_argument("picture", type=Path, metavar="HOUSE.svg")
    write(parser.parse_args().picture)
