"""``python -m mpimesh embed``: the lines of a file to vectors, on all ranks of the job."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpimesh.arrays import HostArray
from mpimesh.errors import LaunchError, MpimeshError, WorldSizeError, on_all_ranks
from mpimesh.models import Embedded, MiniLM
from mpimesh.runtime import DeviceMesh, Launch, exit_all

__all__ = ["EmbedRequest", "embed_lines", "run_embed", "share_lines"]

STDIN = "-"


class SentencesError(MpimeshError, OSError):
    """The sentences cannot be read, or their vectors not be written."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """What the command line asks for.

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
    # Each rank turns the lines into ids; the threads of the library would fight for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with DeviceMesh(request.mesh) as mesh:
            told = embed_lines(request, mesh)
    except MpimeshError as error:
        if not (error.agreed or isinstance(error, WorldSizeError | LaunchError)):
            raise
        # All ranks raise it: one of them tells.
        if Launch.detect().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        exit_all(2)
    if told is not None:
        print(told, flush=True)


def embed_lines(request: EmbedRequest, mesh: DeviceMesh) -> str | None:
    """Embed the lines, and return on rank 0 what to tell. Collective over `mesh`.

    Raises:
        SentencesError: On every rank, if rank 0 cannot read the lines or write the vectors.
        ModelError: On every rank, if any cannot read the model.
    """
    lines = share_lines(mesh, lambda: _read_lines(request))
    start_s = time.perf_counter()
    model = MiniLM(mesh, request.model, batch_tokens=request.batch_tokens)
    loaded_s = time.perf_counter()
    console = Console(stderr=True, quiet=mesh.rank != 0 or request.as_json)
    with _bar(console) as bar:
        task = bar.add_task("sentences", total=len(lines))
        share = len(lines)  # rank 0 sees those of its replica, and stands for the others

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=round(done * share / max(total, 1)))

        found = model.embed(lines, progress=progress if mesh.rank == 0 else None)
        mesh.barrier()
    seconds = time.perf_counter() - loaded_s
    share_lines(mesh, lambda: _write(request, found.vectors))
    if mesh.rank != 0:
        return None
    return _told(request, mesh, found, loaded_s - start_s, seconds)


def share_lines(mesh: DeviceMesh, make: Callable[[], list[str]]) -> list[str]:
    """Return on every rank what `make` gives on rank 0. Collective over `mesh`.

    Raises:
        SentencesError: That of `make`, on every rank.
    """
    text = None
    if mesh.rank == 0:
        try:
            fields: dict[str, object] = {"lines": make()}
        except SentencesError as error:
            fields = {"error": str(error)}
        text = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    received = mesh.group().broadcast(text, root=None, label="lines").resolve()
    found = json.loads(received.tobytes())
    if "error" in found:
        raise on_all_ranks(SentencesError(found["error"]))
    lines: list[str] = found["lines"]
    return lines


def _read_lines(request: EmbedRequest) -> list[str]:
    out = request.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise SentencesError(f"cannot write {out}: it is a folder, or in none that exists")
    try:
        if request.lines == STDIN:
            data = sys.stdin.buffer.read()
        else:
            data = Path(request.lines).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SentencesError(f"cannot read the sentences: {error}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SentencesError(f"{request.lines}, line {line}: not UTF-8, {error.reason}") from None
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # what ends with a line feed has no further line
    return [line.removesuffix("\r") for line in lines]


def _write(request: EmbedRequest, vectors: HostArray) -> list[str]:
    out = request.out
    if out is None:
        return []
    # Under another name first: who reads the file finds all of it or the one before.
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("wb") as file:
            np.save(file, vectors, allow_pickle=False)
        part.replace(out)
    except OSError as error:
        raise SentencesError(f"cannot write {out}: {error}") from None
    return []


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _told(
    request: EmbedRequest, mesh: DeviceMesh, found: Embedded, loading_s: float, seconds: float
) -> str:
    count = len(found.vectors)
    fields = {
        "sentences": count,
        "features": found.vectors.shape[1],
        "tokens": found.num_tokens,
        "empty": [place + 1 for place in found.empty],
        "cut": [place + 1 for place in found.cut],
        "mesh": mesh.dims_text,
        "ranks": mesh.size,
        "loading_s": loading_s,
        "seconds": seconds,
        "sentences_per_s": count / seconds,
        "out": None if request.out is None else str(request.out),
    }
    if request.as_json:
        return json.dumps(fields, indent=1)
    lines = [
        f"{count} sentences, {found.num_tokens} tokens, mesh {mesh.dims_text}: "
        f"{seconds:.2f} s, {count / seconds:,.0f} sentences/s (model read in {loading_s:.2f} s)"
    ]
    for what, places in (("without a word", found.empty), ("cut to fit the model", found.cut)):
        if places:
            more = ", ..." if len(places) > 10 else ""
            numbers = ", ".join(str(place + 1) for place in places[:10])
            lines.append(f"lines {what}: {len(places)}, namely {numbers}{more}")
    if request.out is not None:
        lines.append(f"wrote {request.out}: {found.vectors.shape}, {found.vectors.dtype}")
    return "\n".join(lines)
