"""All figures in one go: `python benchmarks/run.py [suite ...]`, or `make bench`.

Starts 2 and 4 ranks with the mpiexec of this Python's MPI, and prints a table for each. The
suites are startup, meshes, all_reduce, shared, messages, buckets, pipeline, training, redistribute,
operators, recompute, step, checkpoints, array_files, minilm, gpt, gloo, torch_ddp, sharded and
device; all of them if none is named. step is measured on 1 rank, too. checkpoints has PyTorch's
beside them where it is there.

recompute and gpt are on 1 rank. gpt, gloo, torch_ddp and sharded are left out where there is no
PyTorch; the variable TORCH_PYTHON names another Python to measure them with. minilm is left out
where there is nothing to read models with, device where there is no GPU; device measures device
memory, on 1 rank, too. With `--python PATH`, once or several times, these Pythons measure instead
of this one: make bench gives one with MPICH and one with Open MPI.

`--ranks 2` measures on 2 ranks only; `--operations all_reduce,barrier` and `--sizes 8,64` choose
what the suite shared measures. `--json FILE` appends to a file what the tables show, an object for
each run of ranks, on a line:

    make bench BENCH_ARGS='shared --ranks 2 --operations all_reduce --json out/shared.jsonl'
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    device,
    gloo,
    gpt,
    meshes,
    minilm,
    sharded,
    shared,
    startup,
    torch_ddp,
)
from benchmarks.measure import FULL, TINY  # noqa: E402
from benchmarks.rows import format_table  # noqa: E402
from mpimesh.testing.launch import launch  # noqa: E402

_ON_HOST = (
    *("all_reduce", "shared", "messages", "buckets", "pipeline", "training"),
    *("redistribute", "operators"),
)
_WITH_TORCH = ("gpt", "gloo", "torch_ddp", "sharded")
SUITES = (
    "startup",
    "meshes",
    *_ON_HOST,
    "recompute",
    "step",
    "checkpoints",
    "array_files",
    "minilm",
    *_WITH_TORCH,
    "device",
)
RANKS = (2, 4)
_LIMIT_S = 1800.0


def main(arguments: list[str]) -> None:
    """Measure with this Python, or with those that are named."""
    options = _parse(arguments)
    suites = options.suites or list(SUITES)
    with_torch = [name for name in suites if name in _WITH_TORCH]
    torch_python = os.environ.pop("TORCH_PYTHON", "") if with_torch else ""
    here = [name for name in suites if not (torch_python and name in with_torch)]
    if not options.python:
        _measure(here, options)
    for number, python in enumerate(options.python):
        # What is measured in one process without MPI is the same with every MPI.
        _measure_with(python, [s for s in here if not number or s != "startup"], options)
    if torch_python:
        _measure_with(torch_python, with_torch, options)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure mpimesh beside mpi4py and gloo.")
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(SUITES))
    parser.add_argument("--python", action="append", default=[], help="measures instead of this")
    parser.add_argument("--ranks", type=_whole_numbers, help="instead of 2,4")
    parser.add_argument("--json", type=Path, help="the file to which results are appended")
    parser.add_argument("--tiny", action="store_true", help="only to see that everything runs")
    shared.add_choices(parser)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite is called {unknown[0]!r}; there are {', '.join(SUITES)}")
    return options


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _measure_with(python: str, suites: list[str], options: argparse.Namespace) -> None:
    if not suites:
        return
    print(f"\n{python}", flush=True)
    command = [python, __file__, *suites, *_options_of_worker(options)]
    command += [] if options.ranks is None else ["--ranks", ",".join(map(str, options.ranks))]
    command += [] if options.json is None else ["--json", str(options.json)]
    if code := subprocess.run(command).returncode:
        raise SystemExit(code)


def _options_of_worker(options: argparse.Namespace) -> list[str]:
    chosen = ("operations", options.operations), ("sizes", options.sizes)
    words = [word for name, values in chosen for word in (f"--{name}", ",".join(map(str, values)))]
    return [*["--tiny"] * options.tiny, *words]


def _measure(suites: list[str], options: argparse.Namespace) -> None:
    """Measure with this Python, and print the tables."""
    tiny = options.tiny
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    ranks = options.ranks or (RANKS[:1] if tiny else RANKS)
    if "startup" in suites:
        print(
            f"\nstartup, one process\n\n{format_table(startup.run(TINY if tiny else FULL))}",
            flush=True,
        )
    if "meshes" in suites:
        for size in options.ranks or (RANKS[:1] if tiny else meshes.RANKS):
            rows = meshes.run(size, TINY if tiny else FULL)
            print(f"\nmeshes, {size} ranks\n\n{format_table(rows)}", flush=True)
    on_host = [name for name in suites if name in _ON_HOST]
    if on_host:
        for size in ranks:
            _run(size, on_host, options)
    if "recompute" in suites:
        _run(1, ["recompute"], options)
    if "step" in suites:
        for size in (1, *ranks):
            _run(size, ["step"], options)
    if "checkpoints" in suites:
        for size in ranks:
            _run(size, ["checkpoints"], options)
    if "array_files" in suites:
        _run(ranks[0], ["array_files"], options)
    for name, suite, sizes in (
        ("minilm", minilm, ranks[:1]),
        ("gpt", gpt, (1,)),
        ("gloo", gloo, ranks),
        ("torch_ddp", torch_ddp, ranks),
        ("sharded", sharded, ranks),
        ("device", device, (1, *ranks)),
    ):
        if name not in suites:
            continue
        if why_not := suite.available():
            print(f"\n{name} is not measured: {why_not}", flush=True)
            continue
        for size in sizes:
            _run(size, [name], options)


def _run(ranks: int, suites: list[str], options: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        program = ["-m", "benchmarks.worker", *suites, *_options_of_worker(options)]
        # What mpimesh has measured to choose its ways, it measures anew: it is part of the figures.
        env = {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
        result = launch(ranks, program, folder=Path(folder), env=env, timeout_s=_LIMIT_S)
    if result.returncode:
        raise SystemExit(str(result))
    report = json.loads(result.stdout.strip().splitlines()[-1])
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ranks": ranks, **report}) + "\n")
    title = f"{ranks} rank{'s' * (ranks > 1)}, {report['mpi']}, NumPy {report['numpy']}"
    print(f"\n{title}: {report['algorithms']}")
    for suite, rows in report["tables"].items():
        print(f"\n{suite}, {title}\n\n{format_table(rows)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
