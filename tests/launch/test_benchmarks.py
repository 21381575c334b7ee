"""The benchmarks run, each suite, and give a figure for each way; how good it is they tell."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

import pytest

from tests.helpers.raises import names

ROOT = Path(__file__).parents[2]
WAYS = ("ordinary arrays", "shared arrays")


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
        "all_reduce",
        "shared",
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
    # 4 sizes of all-reduce, 1 of each of the others; 3 ways each, the copy is no row.
    assert len(tables["shared"]) == (4 + 4) * 4
    names = ["reduce-scatter", "all-gather", "broadcast", "all-to-all"]
    whats = [f"{name}, 64 KiB" for name in names]
    whats += [f"all-reduce, {size}" for size in ("8 B", "1 KiB", "8 KiB", "64 KiB")]
    assert {f"{what}: {way}" for what, way in product(whats, WAYS)} < set(tables["shared"])
    assert {len(numbers) for numbers in tables["shared"].values()} == {5}  # two of them the limit's
    assert "500 gradients of 4 KiB: GradientBuckets" in tables["buckets"]
    assert len(tables["startup"]) == 3
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
