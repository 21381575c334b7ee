"""``mpimesh bench`` as a person starts it: under mpiexec, alone, wrongly."""

from __future__ import annotations

import csv
import json

from mpimesh.cli.bench import COLLECTIVES, SIZES_BYTES
from tests.helpers.raises import names

BENCH = ["-m", "mpimesh", "bench"]


def test_two_ranks_measure_every_way_in_the_time_given(launch, tmp_path):
    table, picture = tmp_path / "bench.csv", tmp_path / "bench.svg"
    options = ["--seconds", "1", "--json", "--csv", str(table), "--svg", str(picture)]
    result = launch(2, [*BENCH, *options], timeout_s=60)
    assert result.returncode == 0, str(result)
    report = json.loads(result.stdout)
    assert (report["ranks"], report["nodes"]) == (2, 1)
    points = report["points"]
    measured = {(one["operation"], one["nbytes"], one["way"]) for one in points}
    assert len(measured) == len(points)
    ways = ("mpi4py", "messages", "arrays", "planned", "shared", "sh.plan")
    for operation in (one.operation for one in COLLECTIVES):
        least = 8 if operation in ("all_reduce", "broadcast") else 64
        assert {(operation, least, way) for way in ways} <= measured
    assert {one["nbytes"] for one in points} <= {*SIZES_BYTES}
    assert all(1e-8 < one["seconds"] < 10 for one in points)
    assert all(one["ratio"] == 1 for one in points if one["way"] == "mpi4py")
    algorithms = {one["way"]: one["algorithm"] for one in points if one["operation"] == "broadcast"}
    assert algorithms["mpi4py"] == "Bcast"
    assert algorithms["messages"] == "mpi"
    assert algorithms["arrays"] == "node"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["seconds"]) for row in rows] == [one["seconds"] for one in points]
    assert picture.read_text().startswith("<svg")


def test_what_cannot_be_measured_is_refused_once(launch):
    result = launch(1, BENCH, launcher=["env"])
    assert result.returncode == 2, str(result)
    names(result.stderr, "one rank alone", "mpiexec -n 4 mpimesh bench")
    result = launch(2, [*BENCH, "--svg", "bench.gif"])
    assert result.returncode == 2, str(result)
    assert result.stderr.count("--svg: bench.gif must end in .svg or .png") == 1
    assert "while other ranks had not" not in result.stderr


def test_a_file_that_cannot_be_written_is_refused_before_it_measures(launch, tmp_path):
    result = launch(2, [*BENCH, "--csv", str(tmp_path / "none" / "bench.csv")])
    assert result.returncode == 2, str(result)
    assert result.stderr.count("there is no folder") == 1
    assert "measuring" not in result.stderr
