"""Pictures by matplotlib, which an example can do without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path("out")
INSTALL = "pip install matplotlib"


def save_figure(name: str, draw: Callable[[Any], None], *, columns: int = 1) -> None:
    """Draw a picture into ``out/``, and say where it is, or how to get what draws it.

    Args:
        name: The name of the file, which ends with .svg or .png.
        draw: Gets the axes of matplotlib, a list of them if there are several.
        columns: The number of axes, side by side.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"SKIPPED the picture {name}: matplotlib is not installed: {INSTALL}")
        return
    figure = Figure(figsize=(4.4 * columns, 3.2), layout="constrained")
    draw(figure.subplots(1, columns))
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / name, dpi=90, metadata={"Date": None} if name.endswith("svg") else {})
    print(f"wrote {OUT / name}")
