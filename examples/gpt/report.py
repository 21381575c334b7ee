"""What rank 0 shows: the mesh, the progress, the results. The other ranks stay quiet."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from digits.report import PLAIN_LINES, device_text, finite, make_console
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mpimesh as mm
from mpimesh.trace import Event, curve_svg, timeline_svg


class Report:
    """Prints and draws on rank 0.

    Args:
        mesh: The ranks.
        options: As `gpt.options` read them.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace) -> None:
        self._mesh = mesh
        self._options = options
        self._console = make_console(mesh.rank)

    def show_model(self, pipe: mm.PipelineParallel) -> None:
        """Show who computes what, where, and how the model is cut."""
        mesh = self._mesh
        table = Table(title=f"mesh {mesh.dims_text} of {mesh.size} ranks", title_justify="left")
        for column in ("rank", "coordinates", "device", "host"):
            table.add_column(column, overflow="fold")
        for rank, device in enumerate(mesh.all_devices()):
            table.add_row(str(rank), self._place(rank), device_text(device), mesh.hosts[rank])
        self._console.print(table)
        for number in range(pipe.num_stages):
            stage = pipe.stage(number)
            names = [type(layer).__name__ for layer in stage.layers] if stage else []
            self.say(f"stage {number}: {', '.join(names)}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True, markup=False)

    def progress(self) -> StepProgress:
        """Return what shows the progress, to be used as a context manager."""
        options = self._options
        return StepProgress(self._console, options.steps, options.batch_size * options.context)

    # -- files -----------------------------------------------------------------------------------

    def draw_timeline(self, events: Sequence[Event], step: int) -> None:
        """Draw the events of a step."""
        if events:
            mesh, options = self._mesh, self._options
            labels = {rank: f"rank {rank} · {self._place(rank)}" for rank in range(mesh.size)}
            title = f"Training step {step} on {mesh.dims_text}: {options.schedule}"
            self._write(options.timeline, timeline_svg(events, title=title, labels=labels))

    def write(self, results: dict[str, Any]) -> None:
        """Draw the losses, and write settings and results, where the options say."""
        options = self._options
        title = f"Loss of each step on {self._mesh.dims_text}"
        self._write(options.plot, curve_svg(results["losses"], title=title))
        self._write(options.json, json.dumps(finite(results), indent=1, allow_nan=False) + "\n")

    def _write(self, path: Path | None, text: str) -> None:
        if path is not None and self._mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            self.say(f"wrote {path}")

    def _place(self, rank: int) -> str:
        mesh = self._mesh
        return ", ".join(f"{dim}={mesh.coord_of(rank, dim)}" for dim in mesh.dim_names)


class StepProgress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, console: Console, steps: int, tokens_per_step: int) -> None:
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._every = max(1, math.ceil(steps / PLAIN_LINES))
        self._shown = 0  # the last step that an earlier line was about
        self._start_s = time.perf_counter()
        self._held_out = math.nan
        self._live = console.is_terminal and not console.quiet
        self._bar = Progress(
            TextColumn("step {task.completed:>4.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def evaluated(self, loss: float) -> None:
        """Tell the loss on the text that is held out."""
        self._held_out = loss

    def step(self, losses: Sequence[float], lr: float, norm: float) -> None:
        """Tell the losses of all steps so far, and what the last one was done with."""
        done = len(losses)
        line = done % self._every == 0 or done in (1, self._steps)
        if self._console.quiet or not (self._live or line):
            return
        now_s = time.perf_counter()
        seconds, steps = now_s - self._start_s, done - self._shown
        held_out = "" if math.isnan(self._held_out) else f"  held out {self._held_out:.3f}"
        text = (
            f"loss {losses[-1]:.3f}{held_out}  norm {norm:.2f}  rate {lr:.5f}  "
            f"{steps * self._tokens_per_step / seconds:,.0f} bytes/s"
        )
        self._bar.update(self._task, completed=done, description=text)
        if line:
            self._start_s, self._shown = now_s, done
            if not self._live:
                self._console.print(f"step {done:4}/{self._steps}  {text}", soft_wrap=True)
