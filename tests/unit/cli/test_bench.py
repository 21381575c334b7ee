"""The page and the picture of ``mpimesh bench``. (It measures in tests/launch.)"""

from __future__ import annotations

from itertools import product
from xml.etree import ElementTree

import pytest
from rich.console import Console

from mpimesh.cli.bench import COLLECTIVES, Point, _crowded, _page, bench_svg
from mpimesh.cli.console import print_page

OPERATIONS = [one.operation for one in COLLECTIVES]
WAYS = ("mpi4py", "messages", "arrays", "planned", "shared", "sh.plan")
POINTS = [
    Point(operation, nbytes, way, "mpi", (place + 1) * nbytes * 1e-9, 1 / (place + 1), 3)
    for nbytes, operation in product((8, 4096, 64 << 20), OPERATIONS)
    for place, way in enumerate(WAYS)
]


def test_the_page_fits_80_columns(tmp_path):
    with (tmp_path / "page").open("w") as file:
        console = Console(file=file, width=80, highlight=False, no_color=True)
        print_page(*_page(POINTS, ["2 ranks on 1 node", "a note"]), console=console)
    lines = (tmp_path / "page").read_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "mpimesh bench: 2 ranks on 1 node"
    assert lines[1] == "a note"
    row = next(line for line in lines if line.startswith("4 KiB"))
    microseconds = [f"{(place + 1) * 4.096:.3g}" for place in range(len(WAYS))]
    assert row.split() == ["4", "KiB", *microseconds, "0.5x", "0.50"]
    largest = next(line for line in lines if line.startswith("64 MiB"))
    assert largest.split()[2] == "67,109"


def test_the_picture_has_a_panel_for_each_collective_and_a_curve_for_each_way():
    root = ElementTree.fromstring(bench_svg(POINTS, "2 ranks"))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [one for one in texts if one in OPERATIONS] == [*OPERATIONS]
    paths = [*root.iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == len(OPERATIONS) * len(WAYS)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for path in paths:
        points = [tuple(map(float, one.split())) for one in path.attrib["d"][1:].split("L")]
        assert len(points) == 3
        assert all(0 < x < width and 0 < y < height for x, y in points)
        # Larger arrays lie to the right, and longer times higher.
        assert points == sorted(points, key=lambda point: point[0])
        assert points == sorted(points, key=lambda point: -point[1])
    assert "no values" in bench_svg([], "nothing")


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("a", [0]), ("a", [1])], ()),
        ([("a", [0, 1]), ("a", [0, 1]), ("b", [0])], ()),
        ([("a", [0, 1]), ("b", [0]), ("b", [0])], ("2 ranks", "1 core of b")),
        ([("a", [0, 1])] * 3, ("3 ranks", "2 cores of a")),
    ],
)
def test_ranks_that_take_turns_are_said(places, words):
    found = _crowded(places)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)
