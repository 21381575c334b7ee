"""``python -m mpimesh simulate``: what it prints, draws and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from mpimesh.cli import app
from mpimesh.cli.simulate import run_simulate
from mpimesh.schedule import make_schedule, schedule_names, simulate
from tests.helpers.raises import names

ROOT = Path(__file__).parents[3]
SIZE = ["--stages", "4", "--microbatches", "16"]
TIMES = ["--forward", "5ms", "--backward", "10ms", "--message", "1ms"]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def told(*arguments: object) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return fields


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip("\n")


def test_a_page_tells_step_bubble_and_ranks():
    lines = run("--schedule", "1f1b", *SIZE, "--forward", "5ms", "--backward", "10ms").splitlines()
    # 16 + 3 slots of 15 ms, and a rank is idle for 3 of them.
    assert lines[0] == "1f1b: 4 stages, one on each rank, 16 microbatches"
    assert lines[1].split() == ["step", "285", "ms"]
    assert lines[2].split(maxsplit=1) == ["bubble", "45 ms a rank, 15.8 % of the time"]
    first, last = lines[-4].split(), lines[-1].split()
    assert " ".join(first) == "0 0 240 ms 45 ms 15.8 % 0 0 45 ms 0 4"
    assert " ".join(last) == "3 3 240 ms 45 ms 15.8 % 15 ms 0 0 30 ms 1"


def test_json_has_the_numbers_of_the_simulator():
    outcome = simulate(
        make_schedule("1f1b", 4, 16),
        forward_s=[0.005, 0.006, 0.005, 0.009],
        backward_s=0.01,
        message_s=[0.001, 0.002, 0.001],
    )
    times = ["--forward", "5ms,6ms,5ms,9ms", "--backward", "0.01s", "--message", "1ms,2000us,1e-3s"]
    fields = told("--schedule", "1f1b", *SIZE, *times)
    assert fields["step_s"] == pytest.approx(outcome.step_s, rel=1e-12)
    assert fields["bubble_fraction"] == pytest.approx(outcome.bubble_fraction, rel=1e-9)
    assert fields["peak_activations"] == 4
    for rank, row in enumerate(fields["per_rank"]):
        assert row["stages"] == [rank]
        assert row["busy_s"] == pytest.approx(outcome.busy_s(rank), rel=1e-12)
        assert sum(row["idle"].values()) == pytest.approx(row["idle_s"], rel=1e-9)
        assert row["peak_activations"] == 4 - rank


def test_a_bandwidth_is_bytes_over_time():
    whole = told("--schedule", "1f1b", *SIZE, *TIMES)
    edge = ["--latency", "200us", "--bandwidth", "10GB/s", "--activation-bytes", "8MB"]
    parts = told("--schedule", "1f1b", *SIZE, *TIMES[:4], *edge)
    assert parts["step_s"] == pytest.approx(whole["step_s"], rel=1e-9)
    # An edge that needs 20 ms for each message is slower than the stages are.
    slow = ["--bandwidth", "1MiB/s", "--activation-bytes", "20.48KiB"]
    assert told("--schedule", "1f1b", *SIZE, *TIMES[:4], *slow)["step_s"] > 16 * 0.02


@pytest.mark.parametrize(
    "times",
    [
        ["--backward-input", "5ms", "--backward-weight", "5ms"],
        ["--backward", "10ms", "--backward-weight", "5ms"],
        ["--backward", "10ms", "--backward-input", "5ms,5ms"],
        ["--backward", "10ms"],
    ],
)
def test_each_half_of_a_backward_may_be_told_by_the_other_and_the_sum(times, tmp_path):
    path = tmp_path / "halves.csv"
    path.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert told("--schedule", path, "--forward", "5ms", *times)["step_s"] == pytest.approx(0.025)


def test_a_file_tells_its_sizes(tmp_path):
    path = tmp_path / "own.csv"
    schedule = make_schedule("gpipe", 3, 5)
    path.write_text(schedule.to_string())
    assert told("--schedule", path, *TIMES)["step_s"] == pytest.approx(
        simulate(schedule, forward_s=0.005, backward_s=0.01, message_s=0.001).step_s
    )
    names(refused("--schedule", path, "--microbatches", 6, *TIMES), "--microbatches", 5)
    path.write_text("0F0,1B0")
    names(refused("--schedule", path, *TIMES), "csv", "rank 0", "step 1")
    path.write_bytes(b"\xff\xfe")
    names(refused("--schedule", path, *TIMES), "schedule", path)


def test_ranks_may_hold_several_stages():
    size = ["--stages", 8, "--microbatches", 8]
    assert told("--schedule", "zbv", *size, *TIMES)["ranks"] == 4
    fields = told("--schedule", "interleaved", *size, "--ranks", 2, *TIMES)
    assert [row["stages"] for row in fields["per_rank"]] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_auto_is_found_for_the_times_that_are_given():
    times = ["--forward", "1ms,9ms,1ms,1ms", "--backward", "2ms", "--message", "3ms"]
    steps = {
        name: told("--schedule", name, *SIZE, *times)["step_s"]
        for name in ("auto", "1f1b", "gpipe", "zb1p", "zb2p")
    }
    assert steps["auto"] == min(steps.values())
    assert steps["auto"] < steps["1f1b"]


def test_memory_is_told_where_it_is_known_what_is_kept():
    size = ["--stages", 3, "--microbatches", 8]
    page = run("--schedule", "1f1b", *size, *TIMES, "--kept-bytes", "1MiB,2MiB,4GiB")
    assert [line.split()[-2:] for line in page.splitlines()[-3:]] == [
        ["3", "MiB"],  # of three microbatches
        ["4", "MiB"],
        ["4", "GiB"],
    ]
    told_all = told("--schedule", "all", *size, *TIMES, "--kept-bytes", "8MB")["schedules"]
    kept = {row["schedule"]: row["peak_bytes"] for row in told_all}
    assert kept["gpipe"] == 8 * 8e6
    assert kept["1f1b"] == 3 * 8e6
    # Stages cut in two leave half as much, and two of them are on a rank.
    assert kept["zbv"] == 6 * 4e6
    names(refused(*size, *TIMES, "--kept-bytes", "1B,2B"), "--kept-bytes", "3 stages", 2)
    assert told(*size, *TIMES)["peak_bytes"] is None


def test_a_table_shows_each_step(tmp_path):
    page = run("--schedule", "1f1b", "--stages", 2, "--microbatches", 2, *TIMES, "--table")
    assert "rank 0  0F0  0F1  0B0  0B1\nrank 1  1F0  1B0  1F1  1B1\n" in page


def test_all_schedules_are_compared_on_as_many_ranks():
    page = run("--schedule", "all", *SIZE, *TIMES)
    rows = told("--schedule", "all", *SIZE, *TIMES)["schedules"]
    assert {row["ranks"] for row in rows} == {4}
    steps = [row["step_s"] for row in rows]
    assert steps == sorted(steps)
    training = [name for name in schedule_names() if make_schedule(name, 8, 8).trains]
    assert len(rows) == len(training)
    shown = [line.split()[0] for line in page.splitlines()[2 : 2 + len(rows)]]
    # What auto has found bears the name of its origin, and none is faster.
    assert shown[0].startswith("auto-") or steps[0] == min(
        row["step_s"] for row in rows if row["schedule"].startswith("auto-")
    )
    assert sorted(name.split("-")[0] for name in shown) == sorted(training)
    # The same work on every rank, however fine the model is cut.
    assert {round(row["step_s"] - row["bubble_s"], 9) for row in rows} == {0.24}


def test_what_would_take_minutes_is_left_out_of_the_comparison(monkeypatch):
    monkeypatch.setattr(f"{run_simulate.__module__}._MOST_SEARCHED", 63)
    compared = told("--schedule", "all", *SIZE, *TIMES)
    assert list(compared["refused"]) == ["auto"]
    assert not any(row["schedule"].startswith("auto") for row in compared["schedules"])
    names(run("--schedule", "all", *SIZE, *TIMES), "auto", "4 stages", "16 microbatches")


def test_pictures_are_written(tmp_path):
    path = tmp_path / "out.svg"
    page = run("--schedule", "1f1b", *SIZE, *TIMES, "--svg", path)
    assert page.endswith(f"picture: {path}\n")
    assert len(ET.parse(path).getroot().findall("{*}g/{*}rect")) == 4 * 16 * 2
    run("--schedule", "all", *SIZE, *TIMES, "--svg", path)
    assert len(ET.parse(path).getroot().findall("{*}g")) >= 2 * 4
    missing = tmp_path / "no" / "out.svg"
    result = CliRunner().invoke(app, ["simulate", *SIZE, *TIMES, "--json", "--svg", str(missing)])
    assert result.exit_code == 2
    names(result.stderr, f"error: --svg: {missing} cannot be written", "no folder")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([*SIZE], ("forward", "--forward", "5ms")),
        ([*SIZE, "--forward", "5"], ("--forward", "'5'")),
        ([*SIZE, "--forward", "-5ms"], ("--forward", "'-5ms'")),
        ([*SIZE, "--forward", "5 parsecs"], ("--forward", "'5 parsecs'")),
        ([*SIZE, "--forward", "1ms,,2ms"], ("--forward", "''")),
        ([*SIZE, "--forward", "1e999s"], ("--forward", "'1e999s'")),
        ([*SIZE, "--forward", "5ms"], ("--backward", "--backward-input", "--backward-weight")),
        (
            [*SIZE, "--forward", "5ms,6ms", "--backward", "9ms"],
            ("--forward", "4 stages", 2),
        ),
        ([*SIZE, *TIMES[:4], "--message", "1ms,1ms"], ("--message", 3, "4 stages", 2)),
        ([*SIZE, *TIMES, "--latency", "1ms"], ("--message", "--latency")),
        ([*SIZE, *TIMES[:4], "--bandwidth", "1GB/s"], ("--bandwidth", "--activation-bytes")),
        (
            [*SIZE, *TIMES[:4], "--bandwidth", "0GB/s", "--activation-bytes", "8MiB"],
            ("--bandwidth", "'0GB/s'"),
        ),
        (
            [*SIZE, *TIMES[:4], "--bandwidth", "1GB/s", "--activation-bytes", "8"],
            ("--activation-bytes", "'8'"),
        ),
        (
            [*SIZE, "--forward", "5ms", "--backward-input", "5ms"],
            ("half of a backward", "--backward-weight"),
        ),
        (
            [*SIZE, "--forward", "5ms", "--backward", "5ms", "--backward-weight", "6ms"],
            ("--backward-weight", "--backward"),
        ),
        (["--microbatches", 4, *TIMES], ("--stages",)),
        (["--stages", 4, *TIMES], ("--microbatches",)),
        (["--stages", 0, "--microbatches", 4, *TIMES], ("--stages", 0)),
        ([*SIZE, *TIMES, "--schedule", "2f2b"], ("'2f2b'",)),
        ([*SIZE, *TIMES, "--schedule", "all", "--table"], ("--table",)),
        ([*SIZE, *TIMES, "--schedule", "all", "--ranks", 2], ("--ranks", 2, 4)),
        (
            [*SIZE, *TIMES, "--schedule", "zbv", "--ranks", 4],
            ("zbv", "num_stages 4", "num_ranks 4"),
        ),
        ([*SIZE, *TIMES, "--schedule", "zbv", "--stages", 3], ("zbv", "two stages")),
        ([*SIZE, "--forward", "5ms", "--schedule", "auto"], ("schedule", "times")),
        ([*SIZE, "--forward", "5ms,5ms", *TIMES[2:], "--schedule", "auto"], ("--forward", 4, 2)),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments, values):
    message = refused(*arguments)
    names(message, *values)
    assert "\n" not in message


def test_it_runs_where_there_is_no_mpi_and_no_cupy():
    program = (
        "import sys\n"
        "sys.modules['mpi4py'] = sys.modules['cupy'] = None  # an import of them now fails\n"
        "sys.argv = ['mpimesh', 'simulate', *sys.argv[1:]]\n"
        "from mpimesh.cli import app\n"
        "app()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *SIZE, *TIMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "step    313 ms" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(tmp_path, monkeypatch):
    one = ("--schedule", "1f1b", *SIZE, *TIMES)
    names(refused(*one, "--svg", tmp_path / "step.pdf"), "--svg", "step.pdf", ".svg or .png")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    message = refused(*one, "--svg", tmp_path / "step.png")
    names(message, "--svg", "step.png", "pip install resvg-py", "step.svg")
    assert not list(tmp_path.iterdir())


def test_a_name_of_png_gets_one(tmp_path):
    pytest.importorskip("resvg_py")
    run("--schedule", "1f1b", *SIZE, *TIMES, "--svg", tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_trace_has_the_whole_step(tmp_path):
    path = tmp_path / "step.json"
    page = run("--schedule", "1f1b", *SIZE, *TIMES, "--trace", path)
    assert page.endswith(f"trace: {path}, for ui.perfetto.dev\n")
    events = json.loads(path.read_text())["traceEvents"]
    assert len([one for one in events if one.get("cat") in ("forward", "backward")]) == 4 * 16 * 2
    names(refused("--schedule", "all", *SIZE, *TIMES, "--trace", path), "--trace", "all")


def test_files_that_cannot_be_written_are_refused_before_the_page(tmp_path):
    for option, path, why in (
        ("--svg", tmp_path / "none" / "a.svg", "no folder"),
        ("--trace", tmp_path / "none" / "a.json", "no folder"),
        ("--trace", tmp_path, "is a folder"),
    ):
        names(refused("--schedule", "1f1b", *SIZE, *TIMES, option, path), option, why)
    both = tmp_path / "a.svg"
    text = refused("--schedule", "1f1b", *SIZE, *TIMES, "--svg", both, "--trace", both)
    names(text, "--svg and --trace", "two names")
    assert not both.exists()
