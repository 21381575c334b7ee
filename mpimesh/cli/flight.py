"""``mpimesh flight``: what the flight records of a job say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from mpimesh.arguments import rank_names, ranks_by_value, ranks_of
from mpimesh.cli.console import InputError
from mpimesh.runtime.deadlock import cycle_steps, find_cycle
from mpimesh.runtime.flight import KEPT, FlightEntry, Record, read_records

__all__ = ["Difference", "first_difference", "report", "run_flight", "waits_for"]

_MOST_SHOWN = 16


def run_flight(folder: Path) -> None:
    """Print where the ranks first differ, who waits for whom, and which ranks left no record.

    Raises:
        InputError: If there is no record in `folder`.
    """
    records, damaged = read_records(folder)
    if not records:
        raise InputError(
            f"there is no flight record in {str(folder)!r}: set MPIMESH_RECORD_DIR before the job "
            "starts; one that ends well leaves none"
            + "".join(f"; {path.name} is damaged" for path in damaged)
        )
    typer.echo(report(records, damaged))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first operation of a group in which its ranks differ.

    Attributes:
        key: The group: mesh, name, ranks.
        number: The operation's number.
        started: What was started, where, and by which ranks.
        missing: The ranks that had not started it, though their record reaches up to it.
    """

    key: tuple[str, str, str]
    number: int
    started: dict[str, list[int]]
    missing: list[int]


def first_difference(records: Mapping[int, Record]) -> Difference | None:
    """Return where ranks first differ: in what they have started, or else in how far they are.

    Of several groups it is the one whose operation was started first.
    """
    found: list[tuple[bool, float, Difference]] = []
    for key in {entry.key for one in records.values() for entry in one.entries if entry.number}:
        table = {
            rank: {
                one.number: one for one in records[rank].entries if one.number and one.key == key
            }
            for rank in ranks_of(key[2]) or _ranks_with(records, key)
            if rank in records
        }
        begins = max((_first_kept(records[rank], row) for rank, row in table.items()), default=0)
        for number in sorted({one for row in table.values() for one in row if one >= begins}):
            started = ranks_by_value(
                (rank, row[number].digest) for rank, row in table.items() if number in row
            )
            missing = [rank for rank, row in table.items() if number not in row]
            if len(started) > 1 or missing:
                time_s = min(row[number].start_s for row in table.values() if number in row)
                sites = {
                    _texts(table[rank][number] for rank in ranks): ranks
                    for ranks in started.values()
                }
                found.append((len(started) < 2, time_s, Difference(key, number, sites, missing)))
                break
    return min(found, key=lambda one: one[:2])[2] if found else None


def _ranks_with(records: Mapping[int, Record], key: tuple[str, str, str]) -> list[int]:
    """Return the ranks that have started something in a group."""
    return [rank for rank, one in records.items() if any(row.key == key for row in one.entries)]


def _first_kept(one: Record, row: Mapping[int, FlightEntry]) -> int:
    """Return the first operation of a group that a record would still have."""
    return 1 if len(one.entries) < KEPT - 1 else min(row, default=1 << 62)


def _texts(entries: Iterable[FlightEntry]) -> str:
    """Return what several ranks have called, and where."""
    return " or ".join(dict.fromkeys(f"{one.signature} at {one.site}" for one in entries))


def waits_for(records: Mapping[int, Record]) -> dict[int, list[int]]:
    """Return for each rank that waits the ranks that it waits for, in their order.

    Of the ranks that its operation takes, these are the ones that have not started it, or are not
    in the same call, if that has no number; one without a record may be one of them.
    """
    waits: dict[int, list[int]] = {}
    for rank, one in records.items():
        if not one.wait:
            continue
        mine = next((e for e in one.entries if e.state == "waited for" and e.number), None)
        needs = [peer for peer in ranks_of(one.wait["needs"]) if peer != rank]
        here = {
            peer
            for peer in needs
            if peer in records
            and (
                _call_of(records[peer].wait) == _call_of(one.wait)
                if mine is None
                else any(
                    e.key == mine.key and e.number == mine.number for e in records[peer].entries
                )
            )
        }
        # Where all are there, it is not the start of one that it lacks.
        waits[rank] = [peer for peer in needs if peer not in here] or needs
    return waits


def _call_of(wait: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is alike on the ranks that wait in one call, wherever their programs call it."""
    call = str(wait.get("what")).rpartition(" at ")[0] or wait.get("what")
    return call, wait.get("mesh"), wait.get("group"), wait.get("needs")


def report(records: Mapping[int, Record], damaged: Sequence[Path] = ()) -> str:
    """Return what the records of a job say together."""
    size = max(one.size for one in records.values())
    lines = [f"a job of {size} ranks, of which {rank_names(records)} left a record"]
    lines += [f"damaged, and left out: {path}" for path in damaged]
    without = [rank for rank in range(size) if rank not in records]
    if without:
        lines.append(f"no record of {rank_names(without)}")
    endings = ranks_by_value((rank, one.ending) for rank, one in sorted(records.items()))
    lines += [f"{rank_names(who)} ended with: {text}" for text, who in endings.items() if text]
    difference = first_difference(records)
    if difference is None:
        lines.append("no difference: they have started the same collectives")
    else:
        _, group, ranks = difference.key
        lines.append(
            f"first difference: operation {difference.number} of group {group!r} (ranks {ranks})"
        )
        lines += [f"  {rank_names(who)}: {text}" for text, who in difference.started.items()]
        for rank in difference.missing[:_MOST_SHOWN]:
            lines.append(f"  rank {rank}: has not started it; {_last(records[rank])}")
    waits = waits_for(records)
    for rank in sorted(waits)[:_MOST_SHOWN]:
        one = records[rank]
        lines.append(f"rank {rank} waits for {rank_names(waits[rank])} in {one.wait['what']}")
    if cycle := find_cycle(lambda rank: waits.get(rank, ()), sorted(waits)):
        lines.append(f"a circle: {', '.join(cycle_steps(cycle))}")
    idle = [rank for rank in records if rank not in waits]
    for rank in sorted(idle)[:_MOST_SHOWN]:
        lines.append(f"rank {rank} waits for nobody; {_last(records[rank])}")
    return "\n".join(lines)


def _last(one: Record) -> str:
    if not one.entries:
        return "it has started nothing"
    last = one.entries[-1]
    number = f", operation {last.number}" if last.number else ""
    what = f"{last.signature} on group {last.group!r}{number}"
    return f"started last: {what}, {last.state}, at {last.site}"
