"""examples/train_gpt.py: the same training on every mesh, and what it promises around it."""

from __future__ import annotations

import json
import os
import re
import signal
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import mpimesh as mm
from tests.helpers.depth import deep
from tests.helpers.raises import names
from tests.launch.example_runs import (
    EXAMPLES,
    assert_one_line,
    assert_said_once,
    example_module,
    in_process,
)
from tests.launch.gpt_oracle import CONTEXT, OPTIONS, STEPS, trained_alone, whole_model

SCRIPT = EXAMPLES / "train_gpt.py"


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Run the example in this process, on virtual ranks; return its exit code and results."""
    return in_process("train_gpt", monkeypatch, tmp_path)


def assert_same(results, *, tied=False, dropout=0.0, accumulate=1):
    accumulate = accumulate if dropout else 1  # a batch may be cut anyhow
    losses, held_out, _ = trained_alone(tied=tied, dropout=dropout, accumulate=accumulate)
    np.testing.assert_allclose(results["losses"], losses, rtol=0, atol=1e-9)
    assert results["held_out_losses"] == {str(STEPS): pytest.approx(held_out, abs=1e-9)}


def meant(options):
    """Return what options of the command line mean for the oracle."""
    dropout = re.search(r"--dropout (\S+)", options)
    parts = re.search(r"--accumulate (\d+)", options)
    return {
        "tied": "--tied" in options,
        "dropout": float(dropout[1]) if dropout else 0.0,
        "accumulate": int(parts[1]) if parts else 1,
    }


# -- the same training ---------------------------------------------------------------------------


FULLER = [
    (4, "--mesh pp=2,dp=2 --shard 3 --accumulate 3 --tied"),
    (4, "--mesh pp=2,tp=2 --schedule zbv"),
    (4, "--mesh dp=2,pp=2 --schedule interleaved --dropout 0.2 --accumulate 2"),
    (6, "--mesh pp=2,tp=3 --microbatches 3"),
    (6, "--mesh tp=2,dp=3 --shard 2"),
    (8, "--mesh dp=8 --shard 3"),
    (8, "--mesh pp=4,tp=2 --schedule zb1p --sequence-parallel --dropout 0.2 --accumulate 2"),
    (8, "--mesh dp=2,pp=2,tp=2 --shard 3 --tied --sequence-parallel --accumulate 2"),
    (
        8,
        "--mesh tp=2,pp=2,dp=2 --schedule interleaved --zero 1 --sequence-parallel "
        "--dropout 0.2 --accumulate 2",
    ),
]
"""More dims at once, and more options; a quick run has each dim alone."""


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *deep((1, ""), (1, "--accumulate 4 --zero 1")),
        (2, "--mesh pp=2 --schedule dualpipev --shard 2"),
        *deep((2, "--mesh tp=2 --dropout 0.2")),
        (3, "--mesh tp=3 --sequence-parallel"),
        (4, "--mesh dp=4 --accumulate 2 --dropout 0.2 --shard 3"),
        *deep(*FULLER),
    ],
)
def test_virtual_ranks_train_as_one_process_does(train, ranks, options):
    """Every order of dims, every kind of schedule, and each option with some others."""
    sample = "3" if ranks > 4 else "0"
    code, results = train("--virtual", str(ranks), *options.split(), *OPTIONS, "--sample", sample)
    assert code == 0
    assert_same(results, **meant(options))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, "--mesh dp=2,tp=2"),
        *deep(
            (4, "--mesh dp=2,pp=2 --shard 3 --accumulate 2"),
            (4, "--mesh pp=2,tp=2 --sequence-parallel"),
            (8, "--mesh dp=2,pp=2,tp=2"),
        ),
    ],
)
def test_processes_train_as_one_does_and_write_the_same(launch, train, tmp_path, ranks, options):
    _, alone = train(*OPTIONS)
    assert alone["sample"].startswith("The ")
    path = tmp_path / "spread.json"
    result = launch(ranks, [str(SCRIPT), *options.split(), *OPTIONS, "--json", str(path)])
    assert result.returncode == 0, str(result)
    assert not result.stderr, str(result)
    results = json.loads(path.read_text())
    assert_same(results)
    assert results["sample"] == alone["sample"]


# -- what a model writes -------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("dims", ["dp=1,pp=1,tp=1", "dp=3,pp=1,tp=1", "dp=1,pp=2,tp=3"])
def test_a_sample_follows_the_model(monkeypatch, dims):
    """A cold one takes the likeliest bytes; a seed draws one text, and another seed another.

    The bytes behind the last one that was written, and ranks without a row, change nothing.
    """
    sample_text = example_module("gpt.sample", monkeypatch).sample_text
    state = trained_alone()[2]
    model = whole_model()
    model.materialize(seed=0, dtype=np.float64)
    model.load_state_dict(state)
    likeliest = list(b"import")
    for _ in range(9):  # past the end of what it reads at once
        likeliest.append(int(model(np.array([likeliest[-CONTEXT:]]))[0, -1].argmax()))

    def main():
        with mm.DeviceMesh(dims) as mesh:
            tp = mesh.group("tp") if mesh.dim_size("tp") > 1 else None
            layers = mm.parallel.gpt_layers(
                256, 18, 2, 3, max_tokens=CONTEXT, rotary=True, tied=False, tp=tp
            )
            times = [1.0] * len(layers)
            count = mesh.dim_size("pp")
            stages = mm.PipelineParallel.partition(layers, count, mesh=mesh, times=times)
            pipe = mm.PipelineParallel(stages, 1, mesh=mesh, dtype=np.float64)
            pipe.load_state_dict(state)
            cold = sample_text(mesh, pipe, "import", 9, context=CONTEXT, temperature=1e-6, seed=1)
            drawn = [
                sample_text(mesh, pipe, "a", 20, context=CONTEXT, temperature=1.0, seed=seed)
                for seed in (0, 0, 1)
            ]
            return cold, drawn

    results = mm.run_virtual(mm.Mesh(dims).size, main)
    assert results == [results[0]] * len(results)
    cold, drawn = results[0]
    assert cold == bytes(likeliest).decode(errors="replace")
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sample_cannot_command_a_terminal(train, tmp_path, capsys):
    """A text may teach the model anything; what is printed is text, what is written is as it is."""
    text = tmp_path / "text"
    text.write_bytes(b"\x1b[2J\x07\r\t" * 300)
    options = "--steps 40 --features 16 --heads 2 --layers 1 --context 8 --lr 0.02 --sample 12"
    code, results = train("--text", str(text), *options.split(), "--prompt", "\x1b[")
    assert code == 0
    assert "\x1b[2J\x07\r\t" in results["sample"]
    printed = capsys.readouterr().out
    assert "\\x1b[2J\\x07\\r\\t" in printed
    assert not set("\x1b\x07\r\t") & set(printed)


# -- what it writes ------------------------------------------------------------------------------


@pytest.mark.deep
def test_pictures_and_a_text_of_ones_own(train, tmp_path, capsys):
    """A text of four letters in turn is learned quickly."""
    text = tmp_path / "text"
    text.write_bytes(b"abcd" * 500)
    files = ["--text", str(text), "--plot", "new/loss.svg", "--timeline", "new/time.svg"]
    options = "--virtual 4 --mesh pp=2,tp=2 --steps 60 --features 16 --heads 2 --layers 1 "
    options += "--context 16 --lr 0.02 --sample 12 --prompt ab --evaluate 20 --trace-step 2"
    code, results = train(*options.split(), *files)
    assert code == 0
    assert results["sample"] == "ab" + "cdab" * 3
    assert list(results["held_out_losses"]) == ["20", "40", "60"]
    assert results["held_out_losses"]["60"] < 0.2
    ElementTree.parse(tmp_path / "new" / "loss.svg")
    picture = (tmp_path / "new" / "time.svg").read_text()
    ElementTree.fromstring(picture)
    for words in ("Training step 2", "rank 3 · dp=0, pp=1, tp=1"):
        assert words in picture
    printed = capsys.readouterr().out
    assert re.search("^stage 1: .*ColumnParallelLinear$", printed, re.MULTILINE)
    assert len(re.findall(r"^step +\d+/60  loss", printed, re.MULTILINE)) == 11
    # A figure is told once: in the line of a later step it would read as that step's.
    assert re.findall(r"step +(\d+)/60 .* held out \S+ \((\d+)\)", printed) == [
        ("24", "20"),
        ("42", "40"),
        ("60", "60"),
    ]


def test_ranks_read_windows_of_a_text_larger_than_their_memory(launch, tmp_path, monkeypatch):
    """64 GiB, most of it a hole, where a process may have 8 of addresses."""
    text = tmp_path / "text"
    with text.open("wb") as file:
        file.write(b"abcd" * 1000)
        file.truncate(64 << 30)
    program = tmp_path / "limited.py"
    program.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"sys.argv = sys.argv[1:]\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    options = "--mesh dp=2 --steps 3 --features 16 --heads 2 --layers 1 --context 8 --sample 0"
    path = tmp_path / "results.json"
    files = ["--text", str(text), "--json", str(path)]
    result = launch(2, [str(program), str(SCRIPT), *options.split(), *files])
    assert result.returncode == 0, str(result)
    assert len(json.loads(path.read_text())["losses"]) == 3


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "pp=2,dp=2", "dp=2,tp=2"])
def test_each_rank_reads_its_own_windows(train, tmp_path, monkeypatch, mesh):
    """Of the 6 rows of a step 3 each, and the windows that are held out."""
    size, mine = windows_of_ranks(train, tmp_path, monkeypatch, "--virtual", "4", "--mesh", mesh)
    trained = sorted(starts[: 3 * STEPS] for starts in mine)
    assert trained[0] == trained[1] != trained[2] == trained[3]
    drawn = np.concatenate(
        [
            np.random.default_rng([3, step]).integers(0, size - CONTEXT, 6)
            for step in range(1, STEPS + 1)
        ]
    )
    assert sorted(trained[0] + trained[2]) == sorted(drawn)


def windows_of_ranks(train, tmp_path, monkeypatch, *ranks):
    """Train, and return the bytes to train on, and where the windows began that each rank read."""
    data = example_module("gpt.data", monkeypatch)
    opened, read = data.open_text, []

    def counted(path, context):
        text = opened(path, context)
        mine: list[int] = []
        read.append(mine)

        def note(start, count):
            mine.append(start)
            return text.read(start, count)

        return data.Text(text.size, note, context)

    monkeypatch.setattr(data, "open_text", counted)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    size = 256 * 40 - 1024
    code, _ = train(*OPTIONS, *ranks, "--text", str(text))
    assert code == 0
    # What is read ahead of a step that does not come is not counted.
    return size, [[start for start in starts if start < size - CONTEXT] for starts in read]


def test_ranks_in_the_middle_of_a_pipeline_read_no_windows(train, tmp_path, monkeypatch):
    options = "--virtual 4 --mesh pp=4 --layers 4"
    _, read = windows_of_ranks(train, tmp_path, monkeypatch, *options.split())
    assert sorted(map(bool, read)) == [False, False, True, True]


def test_the_rate_that_is_shown_is_of_training_alone(monkeypatch):
    report = example_module("common.report", monkeypatch)
    printed = StringIO()
    console = Console(file=printed, width=80)
    with report.WorkProgress(console, "step", 4, unit="bytes") as progress:
        for step, seconds in enumerate([2.0, 1.0, 1.0, 4.0], 1):
            progress.tell(step, 100.0, seconds, f"loss {step}")
    rates = re.findall(r"([\d.]+) bytes/s", printed.getvalue())
    assert rates == ["50", "100", "100", "25"]


def test_a_picture_of_a_step_that_was_done_before_is_told_to_be_missing(train, capsys):
    command = [*OPTIONS, "--steps", "3", "--checkpoint", "saved", "--timeline", "b.svg"]
    train(*command[:-2])
    capsys.readouterr()
    code, _ = train(*command)
    assert code == 0
    names(capsys.readouterr().out, "b.svg", "step 3")


@pytest.mark.parametrize("ranks", ["", "--virtual 2"])
def test_ctrl_c_ends_it_with_one_line(train, monkeypatch, request, capsys, ranks):
    # A shell lets what it starts in the background ignore the signal, and its children, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    module = example_module("train_gpt", monkeypatch)
    step = module.Training.step

    def interrupted(training, number):
        if number == 2 and training.mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return step(training, number)

    monkeypatch.setattr(module.Training, "step", interrupted)
    code, results = train(*OPTIONS, "--steps", "500", *ranks.split())
    assert (code, results) == (130, None)
    assert capsys.readouterr().err == "train_gpt.py: interrupted\n"


@pytest.mark.deep
def test_half_the_bits_learn_too(train):
    """A scale that is too large at first costs some steps, which the ranks leave out together."""
    options = [*OPTIONS, "--steps", "12", "--lr", "0.02", "--virtual", "2", "--mesh", "tp=2"]
    _, wide = train(*options)
    _, half = train(*options, "--dtype", "float16")
    assert half["losses"][0] == pytest.approx(wide["losses"][0], rel=1e-3)
    assert half["skipped_steps"] < 6
    learned = wide["losses"][0] - wide["losses"][-1]
    assert learned > 0.5
    assert half["losses"][0] - half["losses"][-1] > learned / 2


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1, 0.868198051533946, 0.55, 0.231801948466054, 0.1, 0.1]),
        ("one-cycle", [0.5, 1, 0.868198051533946, 0.55, 0.231801948466054, 0.1, 0.1]),
    ],
)
def test_the_rates_of_six_steps_with_two_of_warm_up(name, shares, monkeypatch):
    """As the formulas have them: a tenth is left after step 6."""
    schedule = example_module("gpt.console", monkeypatch).SCHEDULES[name](2, 6)
    np.testing.assert_allclose([schedule(step) for step in range(1, 8)], shares, rtol=1e-14)


# -- wrong arguments -----------------------------------------------------------------------------

WRONG = {
    "--mesh dp=2,xx=2": ("--mesh", "dp", "pp", "got xx"),
    "--mesh dp=0": ("--mesh", "'dp'", 0),
    "--shard 4": ("--shard", "invalid choice", 4),
    "--heads 5": ("--heads", "--features", "5 heads", "96 features"),
    "--accumulate 17": ("--accumulate", "16 rows", "--batch-size", "17 parts"),
    "--warmup 301": ("--warmup", 301, "--steps 300"),
    "--warmup 9 --decay-steps 8": ("--warmup", 9, "--decay-steps 8"),
    "--mesh tp=4 --heads 3": ("--heads", "3 heads", "4 ranks"),
    "--mesh dp=1 --sequence-parallel": ("--sequence-parallel",),
    "--plot a.png": ("--plot", ".svg", "'a.png'"),
    "--timeline a": ("--timeline", ".svg", "'a'"),
    "--trace-step 301": ("--trace-step", "300 steps"),
    "--temperature 0": ("--temperature", "above 0", "'0'"),
    "--prompt=": ("--prompt", "character"),
    "--dtype int8": ("--dtype", "'int8'"),
    "--lr-schedule step": ("--lr-schedule", "'step'"),
    "--dropout 1": ("--dropout", "below 1", "'1'"),
    "--weight-decay -1": ("--weight-decay", "at least 0", "'-1'"),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_one_line_and_code_2(train, capsys, arguments):
    with pytest.raises(SystemExit) as info:
        train(*arguments.split())
    assert info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert_one_line(printed.err, "train_gpt.py", *WRONG[arguments])


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--mesh dp=3", ("dp=3", 3, 4)),
        ("--mesh dp=4,tp=-1 --sequence-parallel", ("--sequence-parallel",)),
        ("--mesh tp=-1 --heads 3", ("num_heads=3", "4 ranks", "at most 3 ranks")),
        ("--mesh pp=4 --layers 1 --schedule zbv", ("5 layers", 8)),
        ("--text missing", ("missing", "No such file", "rank 0")),
        ("--text .", (".", "directory")),
        ("--text /dev/null", ("64 bytes", "651 bytes", 0)),
        ("--context 60000", ("60000 bytes", "600,011 bytes")),
        ("--plot /dev/null/loss.svg", ("/dev/null/loss.svg",)),
    ],
)
def test_what_does_not_fit_the_ranks(train, capsys, arguments, values):
    code, _ = train("--virtual", "4", *arguments.split())
    assert code == 2
    assert_one_line(capsys.readouterr().err, "train_gpt.py", *values)


@pytest.mark.deep
@pytest.mark.parametrize("arguments", ["--mesh tp=2 --heads 1", "--text missing"])
def test_processes_say_it_once(launch, arguments):
    assert_said_once(launch(2, [str(SCRIPT), *arguments.split()]), "train_gpt.py")
