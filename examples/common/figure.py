"""Pictures by matplotlib, which an example can do without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.files import MARK, check_replaceable

OUT = Path("out")
INSTALL = "pip install matplotlib"


def save_figure(name: str | Path, draw: Callable[[Any], None], *, columns: int = 1) -> None:
    """Draw a picture, and say where it is, or how to get what draws it.

    Args:
        name: The name of the file in ``out/``, which ends with .svg or .png; or a path.
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
    path = name if isinstance(name, Path) else OUT / name
    try:
        check_replaceable(path)
    except FileExistsError as error:
        print(f"SKIPPED the picture {path}: {error.strerror}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix == ".svg"
    metadata = {"Date": None, "Creator": MARK} if is_svg else {"Software": MARK}
    figure.savefig(path, dpi=90, metadata=metadata)
    print(f"wrote {path}")
