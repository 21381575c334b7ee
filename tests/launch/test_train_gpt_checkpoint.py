"""Checkpoints of examples/train_gpt.py: going on is as if nothing had happened, on any mesh."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.store.checkpoints import steps_in
from tests.helpers.depth import deep
from tests.launch.example_runs import EXAMPLES, assert_one_line, example_module, in_process

STEPS = 6
TINY = (
    f"--steps {STEPS} --batch-size 4 --layers 1 --features 18 --heads 3 --context 9 --sample 4 "
    "--evaluate 2 --dropout 0.1 --accumulate 2"
).split()
"""Dropout counts the parts of batches; heads, features and places are dealt unevenly."""


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Run the example in this process, on virtual ranks; return its exit code and results."""
    return in_process("train_gpt", monkeypatch, tmp_path)


@pytest.fixture
def stop_in(monkeypatch):
    """Return what has the process told to stop in a step, as a batch system does."""
    module = example_module("train_gpt", monkeypatch)
    step = module.Training.step

    def stop_in(number):
        def told(training, at):
            if at == number and training.mesh.rank == training.mesh.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return step(training, at)

        monkeypatch.setattr(module.Training, "step", told)

    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield stop_in
    for number, handler in before.items():
        signal.signal(number, handler)


def saved_step(folder):
    return steps_in(folder)[-1]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, "--dtype float64 --lr-schedule one-cycle --warmup 2"),
        (4, "--mesh dp=2,tp=2 --shard 3 --sequence-parallel"),
        (4, "--mesh dp=2,pp=2 --zero 1 --tied --schedule interleaved --dtype float16"),
    ],
)
def test_going_on_is_as_if_never_interrupted(train, stop_in, tmp_path, ranks, options):
    """To the bit: weights, the optimizer's state, the scale of the loss, dropout, the sample."""
    command = ["--virtual", str(ranks), *options.split(), *TINY]
    _, whole = train(*command)
    saved = tmp_path / "saved"
    stop_in(3)
    code, results = train(*command, "--checkpoint", str(saved))
    assert (code, results) == (85, None)
    at = saved_step(saved)
    assert 3 <= at < STEPS
    code, parts = train(*command, "--checkpoint", str(saved))
    assert code == 0
    assert parts["resumed_at_step"] == at
    for name in ("losses", "held_out_losses", "skipped_steps", "sample"):
        assert parts[name] == whole[name], name
    # And once more when all is done.
    _, again = train(*command, "--checkpoint", str(saved))
    assert again["resumed_at_step"] == STEPS
    for name in ("losses", "held_out_losses", "skipped_steps", "sample"):
        assert again[name] == whole[name], name


def test_going_on_over_nodes(train, stop_in, tmp_path, nodes_apart):
    """Where a rank has only its part of the weights between steps."""
    command = ["--virtual", "2", "--mesh", "dp=2", "--shard", "3", "--dtype", "float64", *TINY]
    _, whole = train(*command)
    saved = ["--checkpoint", str(tmp_path / "saved")]
    stop_in(3)
    assert train(*command, *saved)[0] == 85
    code, parts = train(*command, *saved)
    assert code == 0
    assert 3 <= parts["resumed_at_step"] < STEPS
    assert parts["losses"] == whole["losses"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *deep(("1 --mesh dp=1", "4 --mesh pp=2,tp=2 --zero 1 --sequence-parallel")),
        ("6 --mesh dp=2,tp=3 --shard 3", "1 --mesh dp=1"),
        *deep(
            ("4 --mesh pp=2,tp=2 --tied", "6 --mesh dp=3,tp=2 --shard 2 --tied"),
            ("8 --mesh tp=2,dp=2,pp=2 --shard 3", "6 --mesh pp=2,tp=3 --schedule zbv"),
        ),
    ],
)
def test_another_mesh_goes_on(train, stop_in, tmp_path, before, after):
    exact = [*TINY, "--dtype", "float64"]
    _, whole = train(*exact, *(["--tied"] if "--tied" in before else []))
    saved = ["--checkpoint", str(tmp_path / "saved")]
    stop_in(2)
    code, _ = train("--virtual", *before.split(), *exact, *saved)
    assert code == 85
    code, results = train("--virtual", *after.split(), *exact, *saved)
    assert code == 0
    assert 2 <= results["resumed_at_step"] < STEPS
    np.testing.assert_allclose(results["losses"], whole["losses"], rtol=0, atol=1e-9)
    for step, loss in whole["held_out_losses"].items():
        assert results["held_out_losses"][step] == pytest.approx(loss, abs=1e-9)


def test_a_checkpoint_of_another_training_is_refused(train, tmp_path, capsys):
    saved = ["--checkpoint", str(tmp_path / "saved")]
    train(*TINY, *saved)
    capsys.readouterr()
    text = tmp_path / "text"
    text.write_bytes(b"another text " * 100)
    code, _ = train("--virtual", "2", *TINY, "--lr", "1", "--text", str(text), *saved)
    assert code == 2
    differences = ("lr 0.003 there, 1.0 here", "text")
    assert_one_line(capsys.readouterr().err, "train_gpt.py", *differences)


def test_what_is_no_folder_is_refused_before_the_training(train, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("mine")
    code, _ = train("--virtual", "2", *TINY, "--checkpoint", str(path))
    assert code == 2
    printed = capsys.readouterr()
    assert_one_line(printed.err, "train_gpt.py", path, "folder", "rank 0")
    assert "loss" not in printed.out
    assert path.read_text() == "mine"


@pytest.mark.deep
def test_a_finished_run_goes_on_for_more_steps(train, tmp_path, capsys):
    """With the plan of before it is the training that a longer run with that plan would be."""
    saved = ["--checkpoint", str(tmp_path / "saved")]
    longer = [*TINY, "--steps", "9", "--decay-steps", "6"]
    _, whole = train(*longer)
    assert "the weights are not kept: --checkpoint DIR" in capsys.readouterr().out
    train(*TINY, *saved)
    assert f"after step 6 are saved in {saved[1]}\n" in capsys.readouterr().out
    code, _ = train(*TINY, "--steps", "9", *saved)
    assert code == 2
    cure = ("decay_steps 6 there, 9 here", "--decay-steps 6")
    assert_one_line(capsys.readouterr().err, "train_gpt.py", *cure)
    code, results = train(*longer, *saved)
    assert code == 0
    assert results["resumed_at_step"] == 6
    assert results["losses"] == whole["losses"]
    capsys.readouterr()
    code, _ = train(*TINY, "--steps", "4", "--decay-steps", "6", *saved)
    assert code == 2
    assert_one_line(capsys.readouterr().err, "train_gpt.py", "step 9", "--steps 4")


def last_of(saved):
    return saved / f"step-{saved_step(saved):08}"


@pytest.mark.deep
@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "another", "settings"])
def test_a_damaged_manifest_is_refused(train, tmp_path, capsys, damage):
    saved = tmp_path / "saved"
    command = ["--virtual", "2", *TINY, "--checkpoint", str(saved)]
    train(*command)
    last = last_of(saved)
    path = last / "manifest.json"
    text = path.read_bytes()
    changes = {
        "empty": b"",
        "cut": text[:-100],
        "changed": text.replace(b"16", b"17", 1),
        "another": b"{}",
    }
    if damage == "settings":  # whole, and of another program
        mm.save(last, {"step": 3})
        words = ["settings"]
    else:
        path.write_bytes(changes[damage])
        words = ["manifest.json", "another checkpoint"]
    capsys.readouterr()
    code, _ = train(*command)
    assert code == 2
    error = capsys.readouterr().err
    assert "train_gpt.py: error: " in error
    assert all(word in error for word in [str(last), *words]), error


@pytest.mark.deep
@pytest.mark.parametrize("damage", ["lost", "short", "swapped"])
def test_a_checkpoint_that_is_not_whole_is_refused(train, tmp_path, capsys, damage):
    """Whatever is wrong with one rank's file, all ranks say so, and none goes on with a part."""
    saved = tmp_path / "saved"
    command = ["--virtual", "2", "--mesh", "tp=2", *TINY, "--checkpoint", str(saved)]
    train(*command)
    first, second = sorted(last_of(saved).rglob("*.safetensors"))
    if damage == "lost":
        second.unlink()
    elif damage == "short":
        second.write_bytes(second.read_bytes()[:1000])
    else:
        second.write_bytes(first.read_bytes())
    capsys.readouterr()
    code, _ = train("--virtual", "1", "--mesh", "dp=1", *command[4:])
    assert code == 2
    assert_one_line(capsys.readouterr().err, "train_gpt.py", second, "another checkpoint")


@pytest.mark.deep
def test_an_older_one_is_taken_for_a_damaged_one(train, tmp_path):
    saved = tmp_path / "saved"
    command = ["--virtual", "2", *TINY, "--checkpoint", str(saved), "--checkpoint-steps", "2"]
    _, whole = train(*command)
    next(last_of(saved).rglob("*.safetensors")).unlink()
    with pytest.warns(mm.store.DamagedCheckpointWarning, match="step-00000006"):
        code, results = train(*command)
    assert code == 0
    assert results["resumed_at_step"] == 4
    assert results["losses"] == whole["losses"]


@pytest.mark.deep
def test_a_killed_job_goes_on_from_what_was_saved(launch, train, tmp_path):
    """Without a warning: of the save that was under way nothing is seen."""
    saved = tmp_path / "saved"
    command = [*TINY, "--checkpoint", str(saved), "--checkpoint-steps", "1"]
    program = f"""
import os, runpy, sys
from mpimesh.store import drafts
sys.argv = ["train_gpt.py", "--mesh", "tp=2", *sys.argv[1:]]
sys.path.insert(0, {str(EXAMPLES)!r})

def killed(draft, manifest):
    if draft.path.name == "step-00000003":
        draft._next.write_bytes(manifest.text()[:100])
        os.kill(os.getpid(), 9)
    commit(draft, manifest)

commit, drafts.Draft.commit = drafts.Draft.commit, killed
runpy.run_path({str(EXAMPLES / "train_gpt.py")!r}, run_name="__main__")
"""
    result = launch(2, ["-c", program, *command])
    assert result.returncode != 0
    assert saved_step(saved) == 2
    _, whole = train("--virtual", "2", "--mesh", "tp=2", *TINY)
    code, results = train("--virtual", "2", "--mesh", "tp=2", *command)
    assert code == 0
    assert results["resumed_at_step"] == 2
    np.testing.assert_allclose(results["losses"], whole["losses"], rtol=1e-5)
    names = [f"step-{step:08}" for step in (4, 5, 6)]
    assert sorted(path.name for path in saved.iterdir()) == names
