"""What rank 0 shows: the mesh, the progress, the results. The other ranks stay quiet."""

from __future__ import annotations

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import mpimesh as mm
from digits.data import Batches
from mpimesh.parallel import StepReport
from mpimesh.trace import Event, curve_svg, timeline_svg, write_chrome_trace

PLAIN_LINES = 10
"""Lines of progress where there is no terminal to draw a bar on."""


def make_console(rank: int) -> Console:
    """Return where a rank prints: nowhere, except on rank 0.

    Under mpiexec a rank writes into a pipe, so there is no bar, unless FORCE_COLOR is set. Open
    MPI gives its ranks a terminal, but also when its own output goes to a file.
    """
    pretended = "Open MPI" in mm.Launch.detect().launcher and not os.environ.get("FORCE_COLOR")
    return Console(
        quiet=rank != 0, force_terminal=False if pretended else None, highlight=False, emoji=False
    )


class Report:
    """Prints on rank 0.

    Args:
        mesh: The ranks.
        options: As `digits.options` read them.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace) -> None:
        self._mesh = mesh
        self._options = options
        self._console = make_console(mesh.rank)
        self._written: list[Path] = []

    def show_mesh(self) -> None:
        """Show who computes what, and where."""
        mesh = self._mesh
        table = Table(title=f"mesh {mesh.dims_text} of {mesh.size} ranks", title_justify="left")
        for column in ("rank", "coordinates", "stage", "device", "host"):
            table.add_column(column, overflow="fold")
        for rank, device in enumerate(mesh.all_devices()):
            coords = ", ".join(f"{dim}={mesh.coord_of(rank, dim)}" for dim in mesh.dim_names)
            stage = f"{mesh.coord_of(rank, 'pp')}"
            table.add_row(str(rank), coords, stage, device_text(device), mesh.hosts[rank])
        self._console.print(table)

    def show_stages(self, stages: Sequence[mm.PipelineStage]) -> None:
        """Show how the model is cut."""
        for stage in stages:
            layers = ", ".join(map(str, stage.layers)) or "no layers, passes on what it gets"
            self._console.print(f"stage {stage.stage_id}: {layers}", soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True)

    def progress(self, step: int, batches: Batches) -> EpochProgress:
        """Return what shows the progress from after `step` on, to be used as a context manager."""
        return EpochProgress(self._console, self._options.epochs, step, batches)

    def show_results(
        self, accuracy: float, tested: int, seconds: float, rate: float | None
    ) -> None:
        """Show how well the model does on images it has not seen, and how fast it was trained."""
        right = round(accuracy * tested)
        self._console.print(f"test accuracy {accuracy:.4f}: {right} of {tested} digits are right")
        speed = "" if rate is None else f": {rate:,.0f} images/s"
        self._console.print(f"trained for {seconds:.1f} s{speed}")

    def show_traffic(self, traffic: Sequence[dict[str, Any]]) -> None:
        """Show how many messages and bytes each rank has sent off, by kind."""
        kinds = {"all-reduces": ["all_reduce"], "pipeline messages": ["pipeline send"]}
        table = Table(title="sent by each rank: messages (bytes)", title_justify="left")
        table.add_column("rank")
        for title in (*kinds, "other", "bytes in all"):
            table.add_column(title, justify="right")
        for rank, counted in enumerate(traffic):
            calls, nbytes = counted["calls"], counted["bytes"]
            known = [name for names in kinds.values() for name in names]
            groups = [
                *kinds.values(),
                [name for name in calls if name not in (*known, "pipeline recv")],
            ]
            cells = [
                f"{sum(calls.get(name, 0) for name in group):,} "
                f"({megabytes(sum(nbytes.get(name, 0) for name in group))})"
                for group in groups
            ]
            table.add_row(str(rank), *cells, megabytes(sum(nbytes.values())))
        self._console.print(table)

    # -- files -----------------------------------------------------------------------------------

    def draw_timeline(self, events: Sequence[Event], step: int) -> None:
        """Write the events of a step as a picture and for Perfetto."""
        if not events:
            return
        mesh, options = self._mesh, self._options
        labels = {
            rank: f"rank {rank} · replica {mesh.coord_of(rank, 'dp')}, "
            f"stage {mesh.coord_of(rank, 'pp')}"
            for rank in range(mesh.size)
        }
        title = (
            f"Training step {step} on {mesh.dims_text}: {options.schedule}, "
            f"{options.microbatches} microbatches"
        )
        picture = timeline_svg(events, title=title, labels=labels)
        self._path("timeline.svg").write_text(picture, encoding="utf-8")
        write_chrome_trace(self._path("trace.json"), events, labels=labels)

    def draw_step(self, report: StepReport | None) -> None:
        """Write a picture of a step that was measured and, below it, the predicted one."""
        if report is not None:
            self._path("step.svg").write_text(report.to_svg(), encoding="utf-8")

    def draw_losses(self, losses: Sequence[float]) -> None:
        """Write the loss of every step as a picture."""
        if self._mesh.rank == 0:
            title = f"Loss of each step on {self._mesh.dims_text}"
            self._path("loss.svg").write_text(curve_svg(losses, title=title), encoding="utf-8")

    def write_json(self, results: dict[str, Any]) -> None:
        """Write settings and results, if --json says where."""
        path: Path | None = self._options.json
        if path is not None and self._mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(finite(results), indent=1, allow_nan=False) + "\n")
            self._written.append(path)

    def show_written(self) -> None:
        """Say which files there are now."""
        self._console.print("wrote " + ", ".join(map(str, self._written)), soft_wrap=True)

    def _path(self, name: str) -> Path:
        folder: Path = self._options.out
        folder.mkdir(parents=True, exist_ok=True)
        self._written.append(folder / name)
        return folder / name


class EpochProgress:
    """A bar on a terminal, else a line for every few epochs."""

    def __init__(self, console: Console, epochs: int, step: int, batches: Batches) -> None:
        self._console = console
        self._epochs = epochs
        self._batches = batches
        self._shown = step  # the last step that an earlier line was about
        self._every = max(1, math.ceil(epochs / PLAIN_LINES))
        self._start_s = time.perf_counter()
        self._live = console.is_terminal and not console.quiet
        self._bar = Progress(
            TextColumn("epoch {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        done = step // batches.per_epoch
        self._task: TaskID = self._bar.add_task("", total=epochs, completed=done)

    def __enter__(self) -> EpochProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, losses: Sequence[float]) -> None:
        """Tell the losses of all steps so far; the last step of an epoch is shown."""
        epoch, rest = divmod(len(losses), self._batches.per_epoch)
        if rest or self._console.quiet:
            return
        now_s = time.perf_counter()
        rows = [len(self._batches[step + 1]) for step in range(self._shown, len(losses))]
        loss = np.average(losses[self._shown :], weights=rows)
        text = f"loss {loss:.4f}  {sum(rows) / (now_s - self._start_s):9,.0f} images/s"
        self._start_s, self._shown = now_s, len(losses)
        self._bar.update(self._task, completed=epoch, description=text)
        if not self._live and (epoch % self._every == 0 or epoch in (1, self._epochs)):
            self._console.print(f"epoch {epoch:3}/{self._epochs}  {text}")


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


def device_text(device: mm.Device) -> str:
    """Return a device in a few words."""
    unit = "cores" if str(device.backend) == "cpu" else "SMs"
    return f"{device.backend} {device.name}, {device.compute_units} {unit}"


def megabytes(nbytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else f"{nbytes / 1e3:.1f} kB"
