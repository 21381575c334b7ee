"""The command line of train_digits.py, and what rank 0 prints and draws."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.device import CHOICES
from common.program import (
    DEFAULT,
    Parser,
    above_zero,
    add_checkpoint,
    add_mesh,
    natural,
    positive,
    ranks_of,
)
from common.report import MeshReport, WorkProgress
from rich.table import Table

import mpimesh as mm
from digits.data import Batches
from mpimesh.parallel import StepReport
from mpimesh.trace import Event, chrome_trace

DIMS = {"dp": "replicas", "pp": "stages"}
"""Data parallel: replicas of the model. Pipeline parallel: its stages."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, that of the process if None."""
    options = make_parser().parse(arguments)
    if options.mesh is None:
        options.mesh = "dp=-1,pp=2" if ranks_of(options) % 2 == 0 else "dp=-1,pp=1"
    if options.lr is None:
        options.lr = 0.05 if options.optimizer == "sgd" else 0.001
    return options


def make_parser() -> Parser:
    """Describe the options."""
    parser = Parser(
        prog="train_digits.py",
        description="Train a classifier of handwritten digits on a mesh of ranks.",
    )
    parallel = add_mesh(
        parser,
        DIMS,
        example="dp=2,pp=2",
        default="two stages where the number of ranks is even, else one",
    )
    parallel.add_argument(
        "--microbatches",
        type=positive,
        default=8,
        metavar="N",
        help=f"parts of a replica's batch {DEFAULT}",
    )
    parallel.add_argument(
        "--device",
        choices=CHOICES,
        default="cpu",
        help=f"what computes: auto takes CuPy where every rank has a GPU, else NumPy {DEFAULT}",
    )
    parallel.add_argument(
        "--compare",
        action="store_true",
        help="train for a second on one rank alone first, and say how much faster all are",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=30, metavar="N", help=DEFAULT)
    training.add_argument(
        "--batch-size",
        type=positive,
        default=128,
        metavar="ROWS",
        help=f"of all replicas {DEFAULT}",
    )
    training.add_argument(
        "--hidden",
        type=positive,
        default=256,
        metavar="UNITS",
        help=f"width of the layers {DEFAULT}",
    )
    training.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help=DEFAULT)
    training.add_argument(
        "--lr",
        type=above_zero,
        metavar="RATE",
        help="learning rate (default 0.001 for adamw, 0.05 for sgd)",
    )
    training.add_argument(
        "--clip",
        type=above_zero,
        metavar="NORM",
        help="limit of the gradient's norm (default none)",
    )
    training.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help=DEFAULT
    )
    training.add_argument(
        "--seed", type=natural, default=0, metavar="N", help=f"of weights and order {DEFAULT}"
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help=f"where pictures and trace go {DEFAULT}",
    )
    files.add_argument("--json", type=Path, metavar="FILE", help="write settings and results")
    files.add_argument(
        "--trace-step",
        type=positive,
        metavar="N",
        help="the step to draw as a timeline (default the first of the last epoch)",
    )
    add_checkpoint(files, "epochs", 5)
    return parser


class Report(MeshReport):
    """Prints and draws on rank 0. Making it is collective.

    Args:
        mesh: The ranks.
        options: As `digits.console` read them.

    Raises:
        ProgramError: On every rank, if a file cannot be written.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace) -> None:
        self._options = options
        self._loss_picture = options.out / "loss.svg"
        names = ("timeline.svg", "trace.json", "step.svg", "loss.svg")
        super().__init__(mesh, [options.json, *(options.out / name for name in names)])

    def show_stages(self, stages: Sequence[mm.PipelineStage]) -> None:
        """Show how the model is cut."""
        for stage in stages:
            layers = ", ".join(map(str, stage.layers)) or "no layers, passes on what it gets"
            self.say(f"stage {stage.stage_id}: {layers}")

    def progress(self, step: int, batches: Batches) -> EpochProgress:
        """Return what shows the progress from after `step` on, to be used as a context manager."""
        return EpochProgress(self, self._options.epochs, step, batches)

    def show_results(
        self, accuracy: float, tested: int, seconds: float, rate: float | None
    ) -> None:
        """Show how well the model does on images it has not seen, and how fast it was trained."""
        right = round(accuracy * tested)
        self.say(f"test accuracy {accuracy:.4f}: {right} of {tested} digits are right")
        speed = "" if rate is None else f": {rate:,.0f} images/s"
        self.say(f"trained for {seconds:.1f} s{speed}")

    def show_gain(self, rates: tuple[float, float] | None) -> None:
        """Show how much faster the ranks are than one of them, where that was measured."""
        if rates is None:
            return
        together, alone = rates
        ranks = self.mesh.size
        self.say(
            f"in a median step {ranks} ranks do {together:,.0f} images/s, one rank alone "
            f"{alone:,.0f}: {ranks} ranks are {together / alone:.2f} times as fast"
        )
        if self.shares_cores:
            self.say("more ranks than cores do not make it faster: see the warning above")
        elif together < 1.2 * alone:
            self.say(
                "little is won where other programs use the cores, too, or where there is little "
                "to compute: try --hidden 1024 or a larger --batch-size"
            )

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
        self.console.print(table)

    # -- files -----------------------------------------------------------------------------------

    def labels(self) -> dict[int, str]:
        """Return what pictures call the ranks."""
        mesh = self.mesh
        return {
            rank: f"rank {rank} · replica {mesh.coord_of(rank, 'dp')}, "
            f"stage {mesh.coord_of(rank, 'pp')}"
            for rank in range(mesh.size)
        }

    def draw_timeline(self, events: Sequence[Event], step: int) -> None:
        """Write the events of a step as a picture and for Perfetto."""
        options = self._options
        title = (
            f"Training step {step} on {self.mesh.dims_text}: {options.schedule}, "
            f"{options.microbatches} microbatches"
        )
        self.draw_events(options.out / "timeline.svg", events, title)
        if events:
            trace = chrome_trace(events, labels=self.labels())
            self.write_text(options.out / "trace.json", json.dumps(trace, separators=(",", ":")))

    def draw_step(self, report: StepReport | None) -> None:
        """Write a picture of a step that was measured and, below it, the predicted one."""
        if report is not None:
            self.write_text(self._options.out / "step.svg", report.to_svg())

    def write(self, results: dict[str, Any]) -> None:
        """Draw the losses, write settings and results if --json says where, and tell of it."""
        self.draw_losses(self._loss_picture, results["losses"])
        self.write_json(self._options.json, results)
        self.show_written()


class EpochProgress(WorkProgress):
    """Shows the mean loss of each epoch."""

    def __init__(self, report: Report, epochs: int, step: int, batches: Batches) -> None:
        self._batches = batches
        self._shown = step  # the last step that an earlier line was about
        self._shown_s = 0.0
        done = step // batches.per_epoch
        super().__init__(report.console, "epoch", epochs, unit="images", done=done)

    def step(self, losses: Sequence[float], seconds: float) -> None:
        """Tell the losses of all steps so far, and what those of this run took, once an epoch."""
        epoch, rest = divmod(len(losses), self._batches.per_epoch)
        if rest:
            return
        rows = [len(self._batches[step + 1]) for step in range(self._shown, len(losses))]
        loss = np.average(losses[self._shown :], weights=rows)
        self._shown = len(losses)
        self.tell(epoch, sum(rows), seconds - self._shown_s, f"loss {loss:.4f}")
        self._shown_s = seconds


def megabytes(nbytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else f"{nbytes / 1e3:.1f} kB"
