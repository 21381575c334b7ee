"""examples/train_gpt.py: the same training on every mesh, and what it promises around it."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.testing import mpi_vendor

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"

STEPS, WARMUP, RATE, CLIP = 4, 1, 3e-3, 0.5
TINY = (
    f"--steps {STEPS} --warmup {WARMUP} --lr {RATE} --clip {CLIP} --batch-size 6 --layers 2 "
    "--features 18 --heads 3 --context 11 --dtype float64 --sample 40 --seed 3"
).split()
"""Neither heads, features nor places of a sequence can be dealt evenly to two ranks."""


@pytest.fixture
def example(monkeypatch):
    """The example as a module, to be run in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("train_gpt")


@pytest.fixture
def train(example, monkeypatch, tmp_path):
    """Run the example in this process, on virtual ranks; return its exit code and results."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        code = example.main([*arguments, "--json", str(result)])
        return code, json.loads(result.read_text()) if result.exists() else None

    return run


def whole_model(tied=False):
    return nn.Sequential(mm.gpt_layers(256, 18, 2, 3, max_tokens=11, rotary=True, tied=tied))


@cache
def trained_alone(tied=False):
    """Losses of the steps, loss held out after them, state: one process, nothing parallel."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = np.frombuffer(text, np.uint8)
    size = len(data) - len(data) // 10
    model = whole_model(tied)
    model.materialize(seed=3, dtype=np.float64)
    optimizer = optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99))
    losses = []
    # One step of warm-up, then a cosine from 1 down to 0.1.
    for step, share in zip(range(1, STEPS + 1), (1, 0.775, 0.325, 0.1), strict=True):
        starts = np.random.default_rng([3, step]).integers(0, size - 11, 6)
        windows = np.array([data[start : start + 12] for start in starts], np.int64)
        model.zero_grad()
        ctx = nn.Context(step=step)
        y = model(windows[:, :-1], ctx)
        loss, dy = nn.cross_entropy.value_and_grad(y, windows[:, 1:], denominator=6)
        model.backward(dy, ctx)
        optim.clip_grad_norm(model.parameters(), CLIP)
        optimizer.lr = RATE * share
        optimizer.step()
        losses.append(loss)
    held_out = data[size:]
    starts = np.linspace(0, len(held_out) - 12, 32).astype(int)
    windows = np.array([held_out[start : start + 12] for start in starts], np.int64)
    return losses, nn.cross_entropy(model(windows[:, :-1]), windows[:, 1:]), model.state_dict()


def assert_same(results, *, tied=False):
    losses, held_out, _ = trained_alone(tied)
    np.testing.assert_allclose(results["losses"], losses, rtol=0, atol=1e-9)
    assert results["held_out_losses"] == {str(STEPS): pytest.approx(held_out, abs=1e-9)}


# -- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ""),
        (1, "--accumulate 4 --zero 1"),
        (3, "--mesh tp=3 --sequence-parallel"),
        (4, "--mesh pp=2,dp=2 --zero 1 --accumulate 3 --tied"),
        (4, "--mesh pp=2,tp=2 --schedule zbv"),
        (6, "--mesh pp=2,tp=3 --microbatches 3"),
        (6, "--mesh tp=2,dp=3 --zero 1"),
        (8, "--mesh dp=8 --zero 1"),
        (8, "--mesh dp=2,pp=2,tp=2 --zero 1 --tied --sequence-parallel --accumulate 2"),
    ],
)
def test_virtual_ranks_train_as_one_process_does(train, ranks, options):
    code, results = train("--virtual", str(ranks), *options.split(), *TINY)
    assert code == 0
    assert_same(results, tied="--tied" in options)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, "--mesh dp=2,tp=2"),
        (4, "--mesh dp=2,pp=2 --zero 1 --accumulate 2"),
        (4, "--mesh pp=2,tp=2 --sequence-parallel"),
        (8, "--mesh dp=2,pp=2,tp=2"),
    ],
)
def test_processes_train_as_one_does_and_write_the_same(launch, train, tmp_path, ranks, options):
    _, alone = train(*TINY)
    assert alone["sample"].startswith("The ")
    path = tmp_path / "spread.json"
    result = launch(ranks, [str(SCRIPT), *options.split(), *TINY, "--json", str(path)])
    assert result.returncode == 0, str(result)
    assert not result.stderr, str(result)
    results = json.loads(path.read_text())
    assert_same(results)
    assert results["sample"] == alone["sample"]


# -- what a model writes -------------------------------------------------------------------------


def test_a_sample_follows_the_model(example):
    """A cold one takes the likeliest bytes; a seed draws one text, and another seed another."""
    sample_text = importlib.import_module("gpt.sample").sample_text
    model = whole_model()
    model.materialize(seed=0, dtype=np.float64)
    model.load_state_dict(trained_alone()[2])
    likeliest = list(b"import this")
    for _ in range(5):
        likeliest.append(int(model(np.array([likeliest[-11:]]))[0, -1].argmax()))
    options = {"context": 11, "seed": 1}
    cold = sample_text(model, "import this", 5, temperature=1e-6, **options)
    assert cold == bytes(likeliest).decode(errors="replace")
    drawn = [
        sample_text(model, "a", 30, context=11, temperature=1.0, seed=seed) for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# -- what it writes ------------------------------------------------------------------------------


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


def test_half_the_bits_learn_too(train):
    """A scale that is too large at first costs some steps, which the ranks leave out together."""
    options = [*TINY, "--steps", "12", "--lr", "0.02", "--virtual", "2", "--mesh", "tp=2"]
    _, wide = train(*options)
    _, half = train(*options, "--dtype", "float16")
    assert half["losses"][0] == pytest.approx(wide["losses"][0], rel=1e-3)
    assert half["skipped_steps"] < 6
    learned = wide["losses"][0] - wide["losses"][-1]
    assert learned > 0.5
    assert half["losses"][0] - half["losses"][-1] > learned / 2


# -- wrong arguments -----------------------------------------------------------------------------

WRONG = {
    "--mesh dp=2,xx=2": r"--mesh: this program knows the dims dp \(replicas\), pp .* got xx",
    "--mesh dp=0": "--mesh: ",
    "--zero 2": "--zero: invalid choice: 2",
    "--heads 5": "--heads: must divide --features: 5 heads cannot share 96 features",
    "--accumulate 17": r"--accumulate: 16 rows \(--batch-size\) cannot be cut into 17 parts",
    "--warmup 301": "--warmup: 301 steps of warm-up, but --steps 300",
    "--trace-step 301": "--trace-step: there are 300 steps",
    "--temperature 0": "--temperature: needs a number above 0, got '0'",
    "--prompt=": "--prompt: needs at least one character",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_one_line_and_code_2(train, capsys, arguments):
    with pytest.raises(SystemExit) as info:
        train(*arguments.split())
    assert info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"train_gpt.py: error: .*{WRONG[arguments]}.*\n", printed.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh dp=3", "mesh .*needs 3.* ranks.* has 4; .*"),
        ("--mesh tp=4 --heads 3", "3 heads .* too few for 4 ranks: rank 1 would have none"),
        ("--mesh pp=4 --layers 1 --schedule zbv", ".*5 layers.* 8 .*"),
        ("--text missing", "cannot read missing: No such file or directory"),
        ("--context 60000", "a context of 60000 bytes needs a text of 600,011 bytes, got .*"),
    ],
)
def test_what_does_not_fit_the_ranks(train, capsys, arguments, message):
    code, _ = train("--virtual", "4", *arguments.split())
    assert code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"train_gpt.py: error: {message}\n", error), error


def test_processes_say_it_once(launch):
    result = launch(2, [str(SCRIPT), "--mesh", "tp=2", "--heads", "1"])
    assert result.returncode == 2, str(result)
    lines = (result.stdout + result.stderr).splitlines()
    assert len([line for line in lines if "train_gpt.py: error: " in line]) == 1, str(result)
    assert "Traceback" not in result.stderr
    if mpi_vendor() == "mpich":  # the other one adds a paragraph of its own
        assert len(lines) == 1, str(result)
