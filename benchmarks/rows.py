"""The rows of a table: what was timed, and how far it is from a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import Timing

__all__ = ["format_table", "make_rows", "size_text"]

Row = dict[str, Any]


def size_text(nbytes: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def make_rows(
    what: str, timings: Mapping[str, Timing], *, copy: str = "", share: float = 1.0
) -> list[Row]:
    """Return a row for each way.

    Args:
        what: What all of them do, for instance ``"all-reduce, 1 MiB"``.
        timings: Of :func:`benchmarks.measure.in_turns`.
        copy: Which of them is the copy that makes the limit, and gets no row; none if empty.
        share: The limit's part of the time of that copy.
    """
    rows = []
    for way, timing in timings.items():
        if way == copy:
            continue
        row: Row = {
            "what": f"{what}: {way}",
            "us": timing.median_s * 1e6,
            "ratio": timing.ratio,
            "over_us": timing.over_s * 1e6,
        }
        if copy:
            row["limit_us"] = timings[copy].median_s * share * 1e6
            row["over_limit"] = timing.over(timings[copy]) / share
        rows.append(row)
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table; columns of the limit, and of images, if a row has them."""
    if any("times" in row for row in rows):
        return _format_beside(rows)
    limits = any("limit_us" in row for row in rows)
    titles = ["what", "us", "ratio to the first", "more than the first, us"]
    titles += ["limit, us", "times the limit"] if limits else []
    images = any("per_s" in row for row in rows)
    titles += ["images a second"] if images else []
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [
            row["what"],
            f"{row['us']:,.1f}",
            _ratio_text(row["ratio"]),
            f"{row['over_us']:+,.1f}",
        ]
        if limits:
            cells += (
                [f"{row['limit_us']:,.1f}", f"{row['over_limit']:.2f}"]
                if "limit_us" in row
                else ["", ""]
            )
        if images:
            cells.append(f"{row['per_s']:,.0f}" if "per_s" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 1 else f"{ratio:.2g}"


def _format_beside(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a column for each way, and one for each ratio; see `shared`."""
    measured = [row for row in rows if "times" in row]
    ways = list(dict.fromkeys(way for row in measured for way in row["us"]))
    ratios = list(dict.fromkeys(way for row in measured for way in row["times"]))
    titles = ["what", "mpi4py's", *(f"{way}, us" for way in ways)]
    titles += [f"{ways[0]} / {way}" for way in ratios]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in measured:
        cells = [row["what"], row["call"]]
        cells += [f"{row['us'][way]:,.1f}" if way in row["us"] else "" for way in ways]
        cells += [_ratio_text(row["times"][way]) if way in row["times"] else "" for way in ratios]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        for way, cells in row.get("cells", {}).items():
            ahead, median = row["ahead"][way], row["median"][way]
            lines.append(f"\n{way}: {ahead} of {cells} {row['what']}, median ratio {median:.2f}")
    return "\n".join(lines)
