"""``python -m mpimesh embed``: the lines of a file to vectors, on all ranks of the job."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mpimesh.cli.threads import share_cores
from mpimesh.errors import LaunchError, MpimeshError, WorldSizeError
from mpimesh.models import EmbeddedFile, MiniLM, embed_file
from mpimesh.runtime import DeviceMesh, Launch, exit_all

__all__ = ["EmbedRequest", "embed_lines", "run_embed"]


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """The request of the command line.

    Attributes:
        lines: The file of sentences, one a line, or "-" for standard input.
        mesh: The dims of the mesh.
        out: Where the vectors go, as .npy; None to only time them.
        model: The folder of the model; None for the installed all-MiniLM-L6-v2.
        batch_tokens: About how many tokens are computed at a time.
        as_json: Whether to write one JSON object and nothing else.
    """

    lines: str
    mesh: str
    out: Path | None
    model: Path | None
    batch_tokens: int
    as_json: bool


def run_embed(request: EmbedRequest) -> None:
    """Embed the lines and tell how it went. Collective over the job; rank 0 reads and writes.

    What is wrong with the request ends all ranks with exit code 2.
    """
    # Each rank turns its share of the lines into ids; the threads of the library would fight for
    # the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with DeviceMesh(request.mesh) as mesh, share_cores(mesh):
            told = embed_lines(request, mesh)
    except MpimeshError as error:
        if not (error.agreed or isinstance(error, WorldSizeError | LaunchError)):
            raise
        # All ranks raise it: one of them tells.
        if Launch.detect().rank == 0:
            # A mesh that needs more ranks names how to start a program: here it is this one.
            text = str(error).replace("python program.py", "python -m mpimesh embed FILE")
            print(f"error: {text}", file=sys.stderr, flush=True)
        exit_all(2)
    if told is not None:
        print(told, flush=True)


def embed_lines(request: EmbedRequest, mesh: DeviceMesh) -> str | None:
    """Embed the lines, and return on rank 0 what to tell. Collective over `mesh`.

    Raises:
        SentencesError: On every rank, if rank 0 cannot read the lines or write the vectors.
        ModelError: On every rank, if any cannot read the model.
    """
    start_s = time.perf_counter()
    model = MiniLM(mesh, request.model, batch_tokens=request.batch_tokens)
    loaded_s = time.perf_counter()
    console = Console(stderr=True, quiet=mesh.rank != 0 or request.as_json)
    bar = _bar(console)
    task = bar.add_task("sentences", total=None)

    def progress(done: int, total: int | None) -> None:
        bar.start()  # not before: what cannot be read is told without a bar
        bar.update(task, completed=done, total=total)

    try:
        found = embed_file(
            model, request.lines, request.out, progress=progress if mesh.rank == 0 else None
        )
    finally:
        if bar.live.is_started:
            bar.stop()
    seconds = time.perf_counter() - loaded_s
    if mesh.rank != 0:
        return None
    return _told(request, mesh, found, loaded_s - start_s, seconds)


class _Speed(ProgressColumn):
    """A column with the number of sentences per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=console,
    )


def _told(
    request: EmbedRequest, mesh: DeviceMesh, found: EmbeddedFile, loading_s: float, seconds: float
) -> str:
    count = found.num_lines
    fields = {
        "sentences": count,
        "features": found.width,
        "tokens": found.num_tokens,
        "num_empty": found.empty.count,
        "num_cut": found.cut.count,
        "empty": found.empty.first,
        "cut": found.cut.first,
        "mesh": mesh.dims_text,
        "ranks": mesh.size,
        "loading_s": _rounded(loading_s),
        "seconds": _rounded(seconds),
        "sentences_per_s": _rounded(count / seconds),
        "out": None if request.out is None else str(request.out),
    }
    if request.as_json:
        return json.dumps(fields, indent=1)
    lines = [
        f"{count} sentences, {found.num_tokens} tokens, mesh {mesh.dims_text}: "
        f"{seconds:.2f} s, {count / seconds:,.0f} sentences/s (model read in {loading_s:.2f} s)"
    ]
    for what, odd in (("without a word", found.empty), ("cut to fit the model", found.cut)):
        if odd.count:
            more = ", ..." if odd.count > 10 else ""
            numbers = ", ".join(map(str, odd.first[:10]))
            lines.append(f"lines {what}: {odd.count}, namely {numbers}{more}")
    if request.out is None:
        lines.append("the vectors were only computed: --out FILE.npy writes them")
    else:
        lines.append(f"wrote {request.out}: {(count, found.width)}, {found.dtype}")
    return "\n".join(lines)


def _rounded(value: float) -> float:
    """Return four digits of a measurement: more would be noise."""
    return float(f"{value:.4g}")
