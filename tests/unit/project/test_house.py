"""The map of the library that docs/house.py draws from the imports."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.deep
def test_the_map_shows_each_room_in_order_and_arrows_up(tmp_path):
    picture = tmp_path / "house.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "house.py", picture], check=True, timeout=60)
    tree = ET.parse(picture)
    texts = {element.text: float(element.get("y", 0)) for element in tree.iter(f"{SVG}text")}
    rooms = {
        path.name.removesuffix(".py")
        for path in (ROOT / "mpimesh").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert {room for room in rooms if not room.startswith("__")} <= texts.keys()
    assert texts["mesh"] < texts["comm"] < texts["parallel"] < texts["cli"]
    titles = [title.text or "" for title in tree.iter(f"{SVG}title")]
    arrows = [re.match(r"(\w+) imports from (\w+): \d", title) for title in titles]
    pairs = {(arrow[1], arrow[2]) for arrow in arrows if arrow}
    assert ("parallel", "schedule") in pairs
    assert all(texts[below] > texts[above] for below, above in pairs)
