"""The benchmarks run, each suite, and give a figure for each way; how good it is they tell."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

import pytest

from tests.helpers.depth import deep
from tests.helpers.raises import names

ROOT = Path(__file__).parents[2]
WAYS = ("ordinary arrays", "shared arrays")
OPERATIONS = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *("reduce", "gather", "scatter", "barrier"),
)


def run(*arguments):
    command = [sys.executable, "benchmarks/run.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def measure(*suites):
    """The output of tiny suites: by the first line of a table, its subject and its numbers."""
    result = run("--tiny", "--python", sys.executable, *suites)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = result.stdout.split("\n\n")
    tables = {}
    for title, table in pairwise(parts):
        if table.startswith("| what"):
            lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
            name = title.strip().splitlines()[-1].split(",")[0]
            tables[name] = {what: list(map(number, numbers)) for what, *numbers in lines}
    assert sorted(tables) == sorted(suites), result.stdout
    for table in tables.values():
        for us, ratio, over_us, *limit in table.values():
            assert min(us, ratio, *limit) > 0
            assert math.isfinite(over_us)
    return tables


def number(cell):
    return float(cell.replace(",", ""))


def test_recomputation():
    """Its sizes are too small for a smaller peak."""
    kept, again = measure("recompute")["recompute"]
    names(kept, "activations kept", "MiB after forward")
    names(again, "nn.Checkpoint", "MiB at most")


@pytest.mark.deep
def test_checkpoints_and_arrays_in_files():
    tables = measure("checkpoints", "array_files")
    ways = {what.split(": ")[1] for what in tables["checkpoints"]}
    assert {"plain files", "mm.save", "mm.load", "a copy"} <= ways
    ways = {what.split(": ")[1] for what in tables["array_files"]}
    assert {"save_array, .npy", "save_array, HDF5", "open_array, Zarr, S0"} <= ways


@pytest.mark.deep
def test_all_suites_on_the_host():
    tables = measure(
        "startup",
        "meshes",
        "all_reduce",
        "buckets",
        "pipeline",
        "training",
        "redistribute",
        "operators",
        "step",
    )
    assert {f"x + y, blocks of 8 x 8: {way}" for way in ("NumPy", "mpimesh")} < set(
        tables["operators"]
    )
    solved = "conjugate gradients, 64 x 64, an iteration"
    solvers = ("split arrays", "blocks and plans", "mpi4py by hand")
    assert {f"{solved}: {way}" for way in solvers} < set(tables["operators"])
    assert len(tables["all_reduce"]) == 4 * 3  # 3 sizes of at most 64 KiB
    assert "500 gradients of 4 KiB: GradientBuckets" in tables["buckets"]
    assert len(tables["startup"]) == 3
    assert len(tables["meshes"]) == 8
    # As long as the schedule says, at least; and per action where no stage sleeps.
    for what, (us, ratio, *_) in tables["pipeline"].items():
        assert (ratio > 1 and us > 1000) or "simulated" in what or "actions" in what, what
    assert len(tables["pipeline"]) == 2 * 3 + 1
    ways = ("one rank", "2 stages", "2 replicas")
    assert list(tables["training"]) == [f"a step with 512 images: {way}" for way in ways]
    steps = ("by hand", "mpimesh, dp=2")
    assert list(tables["step"]) == [f"a step with 128 images: {way}" for way in steps]
    moved = "64 x 64 float64, S0 to S1, 16 KiB a rank"
    assert {f"{moved}: {way}" for way in ("pack + Alltoall", "mpimesh", "mpimesh, messages")} < set(
        tables["redistribute"]
    )
    around = "halo around 64 x 64 float64, grid of 1 dim"
    assert {f"{around}: {way}" for way in ("Sendrecv", "mpimesh")} < set(tables["redistribute"])
    assert "product of two 64 x 64, rows split: mpimesh" in tables["redistribute"]


@pytest.mark.parametrize("operations", ["all_gather,scatter,barrier", *deep(",".join(OPERATIONS))])
def test_collectives_inside_a_node(tmp_path, operations):
    file = tmp_path / "new" / "shared.jsonl"
    chosen = ["--operations", operations, "--sizes", "8,65536", "--json", str(file)]
    result = run("--tiny", "shared", *chosen)
    assert result.returncode == 0, result.stdout + result.stderr
    (report,) = map(json.loads, file.read_text().splitlines())
    assert report["ranks"] == 2
    *rows, summary = report["tables"]["shared"]
    cut = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    assert [row["what"] for row in rows] == [
        what
        for name in sorted(operations.split(","), key=OPERATIONS.index)
        for what in (
            [name]
            if name == "barrier"
            else [
                f"{name.replace('_', '-')}, {size}"
                for size in ("16 B" if name in cut else "8 B", "64 KiB")
            ]
        )
    ]
    for row in rows:
        assert f"| {row['what']} | {row['call']} | {row['us']['mpi4py']:,.1f} |" in result.stdout
        ours = ["plain", "planned", "shared, planned"]
        assert list(row["times"]) == (ours[:1] if row["what"] == "barrier" else ours)
        assert min(*row["us"].values(), *row["times"].values()) > 0
    ratios = [times for row in rows for times in row["times"].values()]
    assert summary["cells"]["all"] == len(ratios)
    assert summary["ahead"]["all"] == sum(times > 1 for times in ratios)
    assert summary["median"]["all"] == pytest.approx(statistics.median(ratios))
    names(result.stdout, f"all: {summary['ahead']['all']} of {len(ratios)}")


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_gloo():
    (table,) = measure("gloo").values()
    whats = ("all-reduce, 8 B", "all-reduce, 64 KiB")
    expected = {f"{what}: {way}" for what, way in product(whats, ("gloo", *WAYS))}
    expected |= {
        f"500 gradients of 4 KiB: {way}" for way in ("gloo, one by one", "GradientBuckets")
    }
    assert expected < set(table)


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_torch_ddp():
    (table,) = measure("torch_ddp").values()
    ways = [
        "DistributedDataParallel over gloo",
        "the same, a bucket for each layer",
        "mpimesh",
        "nothing summed",
    ]
    assert [what.split(": ")[1] for what in table] == ways


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_gpt_has_the_losses_of_torch():
    """The suite ends with an error where they differ."""
    (table,) = measure("gpt").values()
    assert [what.split(": ")[1] for what in table] == ["PyTorch", "mpimesh"]


@pytest.mark.deep
@pytest.mark.skipif(
    not (find_spec("safetensors") and find_spec("tokenizers")), reason="needs what reads models"
)
def test_minilm():
    (table,) = measure("minilm").values()
    expected = [f"16 sentences, random weights: {way}" for way in ("one rank", "2 replicas")]
    assert list(table) == expected


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_without_torch_it_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    result = run("--tiny", "gloo")
    assert result.returncode == 0, result.stderr
    assert "pip install torch==" in result.stdout


def test_the_command_knows_its_suites():
    result = run("shred")
    assert result.returncode == 2
    names(result.stderr, "'shred'", "startup", "all_reduce", "shared")
    result = run("shared", "--operations", "all_reduce,allgather")
    assert result.returncode == 2
    names(result.stderr, "'allgather'", "all_gather", "barrier")
