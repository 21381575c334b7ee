"""The counters of a rank as a text to read."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["traffic_table"]

_MOST_PEERS = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def traffic_table(
    operations: Sequence[tuple[str, int, int, int, int]], peers: Sequence[tuple[int, int, int]]
) -> str:
    """Return aligned tables by operation and by sender.

    Args:
        operations: Name, calls, bytes put in, bytes and messages received of each.
        peers: Rank, bytes and messages received of each. Of many, those that sent most are shown.
    """
    everything = [
        *operations,
        (
            "all",
            sum(row[1] for row in operations),
            sum(row[2] for row in operations),
            sum(row[3] for row in operations),
            sum(row[4] for row in operations),
        ),
    ]
    rows = [
        (name, f"{calls:,}", _size(put_in), _size(nbytes), f"{messages:,}")
        for name, calls, put_in, nbytes, messages in everything
    ]
    lines = _aligned([("operation", "calls", "put in", "received", "messages"), *rows])
    if not peers:
        return "\n".join(lines)
    by_bytes = sorted(peers, key=lambda row: (-row[1], row[0]))
    senders = [
        (f"rank {peer}", _size(nbytes), f"{count:,}")
        for peer, nbytes, count in sorted(by_bytes[:_MOST_PEERS])
    ]
    others = by_bytes[_MOST_PEERS:]
    if others:
        nbytes, count = sum(row[1] for row in others), sum(row[2] for row in others)
        senders.append((f"{len(others):,} others", _size(nbytes), f"{count:,}"))
    return "\n".join([*lines, "", *_aligned([("from", "received", "messages"), *senders])])


def _size(nbytes: int) -> str:
    """Return bytes in the largest binary unit of which there is one."""
    power = 0
    while power < len(_UNITS) - 1 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return f"{nbytes} B" if not power else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines: the first column starts alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
