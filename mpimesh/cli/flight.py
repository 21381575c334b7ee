"""``python -m mpimesh flight``: what the flight records of a job say together."""

from __future__ import annotations

from pathlib import Path

import typer

from mpimesh.cli.quantities import InputError
from mpimesh.runtime.flight import read_records, report

__all__ = ["run_flight"]


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
