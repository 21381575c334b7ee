"""Output of rank 0: the mesh, the progress, files. The other ranks stay quiet."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mpimesh as mm
from common.files import check_replaceable, write_text
from common.program import on_all_ranks
from mpimesh.trace import Event, curve_svg, timeline_svg

PLAIN_LINES = 10
"""Lines of progress where there is no terminal to draw a bar on."""


def make_console(rank: int) -> Console:
    """Return where a rank prints: nowhere, except on rank 0.

    Under mpiexec a rank writes into a pipe, so there is no bar, unless FORCE_COLOR is set. Open
    MPI gives its ranks a terminal, but also when its own output goes to a file.
    """
    pretended = "Open MPI" in mm.runtime.Launch.detect().launcher and not os.environ.get(
        "FORCE_COLOR"
    )
    return Console(
        quiet=rank != 0, force_terminal=False if pretended else None, highlight=False, emoji=False
    )


class MeshReport:
    """Prints and draws on rank 0. Making it is collective.

    Args:
        mesh: The ranks.
        files: What will be written; None among them is left out.

    Raises:
        ProgramError: On every rank, if one of the files cannot be written, or is there and of no
            example: better now than at the end.
    """

    def __init__(self, mesh: mm.DeviceMesh, files: Sequence[Path | None] = ()) -> None:
        self.mesh = mesh
        self.console = make_console(mesh.rank)
        self.written: list[Path] = []
        self.shares_cores = False
        for path in filter(None, files):
            on_all_ranks(mesh, lambda path=path: self._try_to_write(path), f"write {path}")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True, markup=False)

    def show_mesh(self) -> None:
        """Collective: show which rank is where, and which ranks wait for each other's cores."""
        mesh = self.mesh
        table = Table(title=f"mesh {mesh.dims_text} of {mesh.size} ranks", title_justify="left")
        for column in ("rank", "coordinates", "device", "host"):
            table.add_column(column, overflow="fold")
        for rank, device in enumerate(mesh.all_devices()):
            unit = "cores" if str(device.backend) == "cpu" else "SMs"
            text = f"{device.backend} {device.name}, {device.compute_units} {unit}"
            table.add_row(str(rank), self.place(rank), text, mesh.hosts[rank])
        self.console.print(table)
        cores = gather_json(mesh.group(), sorted(os.sched_getaffinity(0)))
        for host in dict.fromkeys(mesh.hosts) if cores else ():
            here = [rank for rank in range(mesh.size) if mesh.hosts[rank] == host]
            count = len({core for rank in here for core in cores[rank]})
            if len(here) > count:
                self.shares_cores = True
                self.say(
                    f"WARNING: {len(here)} ranks take turns on the {count} core(s) of {host}: the "
                    f"results are right, but more than {count} rank(s) there make it slower"
                )

    def place(self, rank: int) -> str:
        """Return the coordinates of a rank."""
        mesh = self.mesh
        return ", ".join(f"{dim}={mesh.coord_of(rank, dim)}" for dim in mesh.dim_names)

    # -- files -----------------------------------------------------------------------------------

    def labels(self) -> dict[int, str]:
        """Return what pictures call the ranks."""
        return {rank: f"rank {rank} · {self.place(rank)}" for rank in range(self.mesh.size)}

    def draw_events(self, path: Path | None, events: Sequence[Event], title: str) -> None:
        """Draw what every rank did when; `events` are those of all ranks, and on rank 0 only."""
        if events:
            self.write_text(path, timeline_svg(events, title=title, labels=self.labels()))

    def draw_losses(self, path: Path | None, losses: Sequence[float]) -> None:
        """Draw the loss of every step."""
        title = f"Loss of each step on {self.mesh.dims_text}"
        self.write_text(path, curve_svg(losses, title=title))

    def write_json(self, path: Path | None, results: dict[str, Any]) -> None:
        """Write settings and results."""
        self.write_text(path, json.dumps(finite(results), indent=1, allow_nan=False) + "\n")

    def write_text(self, path: Path | None, text: str) -> None:
        """Write a file on rank 0, if there is a name for it."""
        if path is not None and self.mesh.rank == 0:
            write_text(path, text)
            self.written.append(path)

    def show_saved(self, folder: Path | None, step: int) -> None:
        """Say where the weights after the last step are."""
        if folder is None:
            self.say("the weights are not kept: --checkpoint DIR saves them")
        else:
            self.say(f"weights and optimizer after step {step} are saved in {folder}")

    def show_written(self) -> None:
        """Say which files there are now."""
        if self.written:
            self.say("wrote " + ", ".join(map(str, self.written)))

    def _try_to_write(self, path: Path) -> None:
        if self.mesh.rank == 0:
            check_replaceable(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()


class WorkProgress:
    """A bar on a terminal, else a line now and then; a context manager.

    Args:
        console: Where to.
        noun: What is counted, such as "step".
        total: How many there are.
        unit: What they are made of, such as "bytes", of which it tells the rate of all ranks.
        done: How many are done already.
    """

    def __init__(
        self, console: Console, noun: str, total: int, *, unit: str, done: int = 0
    ) -> None:
        self._console = console
        self._noun, self._total, self._unit = noun, total, unit
        self._every = max(1, math.ceil(total / PLAIN_LINES))
        self._width = len(str(total)) + 1
        self._live = console.is_terminal and not console.quiet
        self._work = 0.0
        self._seconds = 0.0
        self._bar = Progress(
            TextColumn(noun + " {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> WorkProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def tell(self, done: int, work: float, seconds: float, text: str) -> bool:
        """Say how many are done; return whether what was said stays to be read.

        Args:
            done: In all.
            work: Units that were done since this was last called.
            seconds: What they took, without what else was done meanwhile, such as saving.
            text: More about it.
        """
        self._work += work
        self._seconds += seconds
        line = done % self._every == 0 or done in (1, self._total)
        if self._console.quiet or not (self._live or line):
            return False
        text = f"{text}  {self._work / self._seconds:,.0f} {self._unit}/s"
        self._bar.update(self._task, completed=done, description=text)
        if line:
            self._work, self._seconds = 0.0, 0.0
            if not self._live:
                self._console.print(
                    f"{self._noun} {done:{self._width}}/{self._total}  {text}",
                    soft_wrap=True,
                    markup=False,
                )
        return line


def gather_json(group: mm.ProcessGroup, value: Any) -> list[Any]:
    """Collective: return the values of all ranks on rank 0 of the group, nothing elsewhere."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = group.all_gather(np.array([text.size])).resolve()
    texts = group.gather(text, sizes=sizes.tolist()).resolve()
    if texts is None:
        return []
    return [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(sizes)[:-1])]


def finite(value: Any) -> Any:
    """Return `value` with None for what JSON cannot say: infinite numbers and NaN."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
