"""examples/train_digits.py: the same training on every mesh, and all that it promises around it."""

from __future__ import annotations

import json
import os
import re
import signal
from xml.etree import ElementTree

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MpimeshError
from mpimesh.store.checkpoints import steps_in
from tests.helpers.depth import deep
from tests.helpers.raises import names
from tests.launch import digits_oracle
from tests.launch.example_runs import (
    EXAMPLES,
    assert_one_line,
    assert_said_once,
    example_module,
    in_process,
)

SCRIPT = EXAMPLES / "train_digits.py"
PLAIN = ["env"]
"""Instead of mpiexec: Python alone."""

EXACT = digits_oracle.OPTIONS


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Run the example in this process, on virtual ranks; return its exit code and results."""
    return in_process("train_digits", monkeypatch, tmp_path)


@pytest.fixture
def run_script(launch, tmp_path):
    """Run the example as a program of its own; return how it ended, and its results."""

    def run(nprocs, *arguments, **options):
        path = tmp_path / "result.json"
        path.unlink(missing_ok=True)
        files = ["--out", str(tmp_path / "out"), "--json", str(path)]
        result = launch(nprocs, [str(SCRIPT), *arguments, *files], **options)
        return result, json.loads(path.read_text()) if path.exists() else None

    return run


def assert_same_training(results, epochs):
    expected = digits_oracle.losses(epochs)
    assert len(results["losses"]) == len(expected)
    np.testing.assert_allclose(results["losses"], expected, rtol=1e-10)


# -- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "mesh", "schedule"),
    [
        *deep((1, "dp=1", "1f1b"), (2, "dp=2", "1f1b")),
        (4, "dp=4", "gpipe"),
        *deep((2, "pp=2", "1f1b"), (2, "pp=2", "gpipe"), (3, "pp=3", "gpipe"), (4, "pp=4", "1f1b")),
        (4, "pp=2,dp=2", "gpipe"),
        *deep((8, "dp=2,pp=4", "gpipe"), (6, "pp=6", "1f1b"), (2, "pp=2", "zbv")),
        *deep((4, "dp=2,pp=2", "interleaved")),
        (3, "pp=3", "vhalf"),
    ],
)
def test_virtual_ranks_train_as_plain_numpy_does(train, ranks, mesh, schedule):
    options = ["--virtual", str(ranks), "--mesh", mesh, "--schedule", schedule, "--epochs", "2"]
    code, results = train(*options, *EXACT)
    assert code == 0
    assert_same_training(results, 2)


@pytest.mark.deep
@pytest.mark.parametrize("microbatches", [1, 3, 64])
def test_any_number_of_microbatches_trains_alike(train, microbatches):
    options = ["--virtual", "4", "--mesh", "dp=2,pp=2", "--epochs", "1"]
    _, results = train(*options, "--microbatches", str(microbatches), *EXACT)
    assert_same_training(results, 1)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ranks", "mesh", "schedule"),
    [
        (3, "pp=3", "1f1b"),
        (4, "dp=2,pp=2", "gpipe"),
        (4, "dp=2,pp=2", "zbv"),
        (8, "dp=2,pp=4", "1f1b"),
    ],
)
def test_processes_train_as_plain_numpy_does(run_script, ranks, mesh, schedule):
    options = ["--mesh", mesh, "--schedule", schedule, "--epochs", "2"]
    result, results = run_script(ranks, *options, *EXACT)
    assert result.returncode == 0, str(result)
    assert_same_training(results, 2)


@pytest.mark.deep
def test_sgd_and_clipping_train_alike_on_two_meshes(train):
    options = ["--epochs", "1", "--optimizer", "sgd", "--lr", "0.1", "--clip", "0.05", *EXACT]
    _, alone = train("--virtual", "1", *options)
    _, spread = train("--virtual", "6", "--mesh", "dp=2,pp=3", *options)
    np.testing.assert_allclose(spread["losses"], alone["losses"], rtol=1e-10)
    _, unclipped = train("--virtual", "1", *options, "--clip", "1e9")
    assert abs(unclipped["losses"][-1] / alone["losses"][-1] - 1) > 1e-3


# -- the main job --------------------------------------------------------------------------------


def test_the_main_job(run_script, tmp_path):
    command = (
        "--mesh dp=2,pp=2 --microbatches 8 --schedule 1f1b --epochs 30 --dtype float32 --seed 0"
    )
    result, results = run_script(4, *command.split())
    assert result.returncode == 0, str(result)
    assert results["test_accuracy"] >= 0.96
    expected = {
        "mesh": "dp=2,pp=2",
        "ranks": 4,
        "schedule": "1f1b",
        "microbatches": 8,
        "epochs": 30,
        "batch_size": 128,
        "dtype": "float32",
        "seed": 0,
        "steps_per_epoch": 12,
        "resumed_at_step": 0,
    }
    assert {name: results[name] for name in expected} == expected
    assert len(results["losses"]) == 360
    assert results["losses"][0] == pytest.approx(np.log(10), abs=0.1)
    assert results["losses"][-1] < 0.2
    assert results["images_per_s"] == pytest.approx(30 * 1437 / results["seconds"])
    # Each stage sends as much as the other gets back: 256 float32 a row and epoch, and no more.
    sent_bytes = [traffic["bytes"]["pipeline send"] for traffic in results["traffic"]]
    assert sent_bytes[0] + sent_bytes[2] >= 30 * 1437 * 256 * 4
    assert sent_bytes[1] + sent_bytes[3] == 30 * 1437 * 256 * 4
    assert_says_what_it_did(result.stdout, results, tmp_path)
    assert_pictures(tmp_path / "out")


def test_it_is_said_how_much_faster_the_ranks_are(train, capsys):
    _, results = train(
        "--virtual", "2", "--mesh", "dp=2", "--epochs", "1", "--compare", "--device", "auto"
    )
    together, alone = results["median_images_per_s"]
    said = capsys.readouterr().out
    assert f"2 ranks are {together / alone:.2f} times as fast" in said
    assert "computing with" in said


def test_the_device_is_asked_of_every_rank(monkeypatch):
    """What this machine has or not: a table of devices stands for it."""
    device = example_module("common.device", monkeypatch)
    cpu, cuda = (mm.mesh.Device(0, "some", mm.mesh.DeviceBackend(name)) for name in ("cpu", "cuda"))

    class OfTable:
        def __init__(self, *devices):
            self.devices = devices

        def all_devices(self):
            return self.devices

        def use_device(self):
            return self.devices[0]

    monkeypatch.setattr(device, "find_spec", lambda name: None)
    for devices, choice, text in (
        ((cpu, cpu), "cpu", "NumPy on CPUs"),
        ((cuda, cuda), "cpu", "NumPy on CPUs"),
        ((cuda, cpu), "auto", "not every rank has a GPU"),
        ((cuda, cuda), "auto", "pip install cupy-cuda13x"),
    ):
        xp, said = device.array_library(OfTable(*devices), choice)
        assert xp is np
        assert text in said
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setattr(device, "import_module", lambda name: name)
    assert device.array_library(OfTable(cuda, cuda), "auto") == (
        "cupy",
        "computing with CuPy on GPUs, such as some",
    )
    with pytest.raises(MpimeshError, match="--device gpu: not every rank has a GPU") as caught:
        device.array_library(OfTable(cuda, cpu), "gpu")
    assert caught.value.agreed


def assert_says_what_it_did(text, results, tmp_path):
    lines = text.splitlines()
    assert "mesh dp=2,pp=2 of 4 ranks" in lines[0]
    for rank, place in enumerate(["dp=0, pp=0", "dp=0, pp=1", "dp=1, pp=0", "dp=1, pp=1"]):
        assert sum(f" {rank} " in line and place in line for line in lines) == 1
    epochs = [line for line in lines if line.startswith("epoch")]
    assert 5 <= len(epochs) <= 12
    assert re.fullmatch(r"epoch  30/30  loss 0\.\d{4} +[\d,]+ images/s", epochs[-1])
    assert f"test accuracy {results['test_accuracy']:.4f}" in text
    for name in ("timeline.svg", "trace.json", "step.svg", "loss.svg"):
        assert str(tmp_path / "out" / name) in lines[-1]
    assert str(tmp_path / "result.json") in lines[-1]
    assert "the weights are not kept: --checkpoint DIR" in text
    crowded = len(os.sched_getaffinity(0)) < 4
    assert ("4 ranks take turns on" in text) == crowded
    assert "\x1b" not in text


def assert_pictures(out):
    timeline = ElementTree.fromstring((out / "timeline.svg").read_text())
    assert timeline.tag.endswith("svg")
    text = "".join(timeline.itertext())
    assert "1f1b, 8 microbatches" in text
    for rank in range(4):
        assert f"rank {rank} · replica {rank // 2}, stage {rank % 2}" in text
    step = "".join(ElementTree.fromstring((out / "step.svg").read_text()).itertext())
    assert "1f1b, 2 stages, 8 microbatches" in step
    assert step.count("1B7: ") == 2  # measured and predicted
    assert ElementTree.fromstring((out / "loss.svg").read_text()).tag.endswith("svg")
    trace = json.loads((out / "trace.json").read_text())["traceEvents"]
    done = {(event["pid"], event["name"]) for event in trace if event["ph"] == "X"}
    actions = {
        (rank, f"{rank % 2}{kind}{i}") for rank in range(4) for kind in "FB" for i in range(8)
    }
    assert actions <= done
    assert {(rank, "optimizer") for rank in range(4)} <= done


@pytest.mark.deep
def test_without_mpiexec(run_script, tmp_path):
    result, results = run_script(1, "--epochs", "1", launcher=PLAIN)
    assert result.returncode == 0, str(result)
    assert (results["mesh"], results["ranks"]) == ("dp=1,pp=1", 1)
    result, results = run_script(1, "--epochs", "1", "--virtual", "4", launcher=PLAIN)
    assert result.returncode == 0, str(result)
    assert (results["mesh"], results["ranks"]) == ("dp=2,pp=2", 4)


@pytest.mark.deep
def test_the_step_to_draw_can_be_chosen(train, tmp_path):
    train("--epochs", "1", "--trace-step", "3")
    assert "Training step 3 on dp=1,pp=1" in (tmp_path / "out" / "timeline.svg").read_text()


def test_a_training_that_fails_to_converge_is_valid_json(train, tmp_path):
    with np.errstate(all="ignore"):
        _, results = train("--epochs", "1", "--optimizer", "sgd", "--lr", "1e30")
    assert None in results["losses"]
    assert "NaN" not in (tmp_path / "result.json").read_text()


# -- wrong arguments -----------------------------------------------------------------------------

WRONG = {
    "--mesh dp=0": ("--mesh", "'dp'", 0),
    "--mesh dp=2,xx=2": ("--mesh", "dp", "pp", "got xx"),
    "--mesh dp": ("--mesh", "'dp'"),
    "--mesh dp=-1,pp=-1": ("--mesh", "size -1", "dp=-1,pp=-1"),
    "--schedule zigzag": ("--schedule", "'zigzag'", "1f1b"),
    "--microbatches 0": ("--microbatches", "at least 1", "'0'"),
    "--epochs 1.5": ("--epochs", "at least 1", "'1.5'"),
    "--seed -1": ("--seed", "at least 0", "'-1'"),
    "--lr nan": ("--lr", "above 0", "'nan'"),
    "--clip 0": ("--clip", "above 0", "'0'"),
    "--dtype int8": ("--dtype", "'int8'"),
    "--bogus": ("--bogus",),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_one_line_and_code_2(train, capsys, arguments):
    with pytest.raises(SystemExit) as info:
        train(*arguments.split())
    assert info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert_one_line(printed.err, "train_digits.py", *WRONG[arguments])


def test_a_mesh_that_does_not_fit_virtual_ranks(train, capsys):
    code, _ = train("--virtual", "4", "--mesh", "dp=3")
    assert code == 2
    assert_one_line(capsys.readouterr().err, "train_digits.py", "dp=3", 3, 4)


@pytest.mark.deep
@pytest.mark.parametrize("arguments", ["--mesh dp=3,pp=2", "--schedule zigzag", "--virtual 2"])
def test_processes_say_it_once(launch, arguments):
    assert_said_once(launch(2, [str(SCRIPT), *arguments.split()]), "train_digits.py")


def test_help_is_shown_once(launch):
    result = launch(3, [str(SCRIPT), "--help"])
    assert result.returncode == 0, str(result)
    assert result.stdout.count("usage: train_digits.py") == 1


# -- checkpoints ---------------------------------------------------------------------------------

RANKS = ["--virtual", "4", "--mesh", "dp=2,pp=2"]


def test_going_on_is_as_if_never_interrupted(train, tmp_path):
    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-epochs", "1"]
    _, whole = train(*RANKS, "--epochs", "3")
    train(*RANKS, "--epochs", "1", *saved)
    _, parts = train(*RANKS, "--epochs", "3", *saved)
    assert parts["resumed_at_step"] == whole["steps_per_epoch"]
    assert parts["losses"] == whole["losses"]  # to the bit
    assert parts["test_accuracy"] == whole["test_accuracy"]
    _, again = train(*RANKS, "--epochs", "3", *saved)
    assert again["losses"] == whole["losses"]
    assert again["images_per_s"] is None


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,pp=3", "pp=4"])
def test_another_mesh_can_go_on(train, tmp_path, mesh):
    saved = ["--checkpoint", str(tmp_path / "saved"), *EXACT]
    train(*RANKS, "--epochs", "1", *saved)
    ranks = {"dp=1": "1", "dp=2,pp=3": "6", "pp=4": "4"}[mesh]
    _, results = train("--virtual", ranks, "--mesh", mesh, "--epochs", "2", *saved)
    assert results["resumed_at_step"] == results["steps_per_epoch"]
    assert_same_training(results, 2)


@pytest.mark.deep
def test_a_checkpoint_of_another_training_is_refused(train, tmp_path, capsys):
    saved = ["--checkpoint", str(tmp_path / "saved")]
    train(*RANKS, "--epochs", "1", *saved)
    capsys.readouterr()
    code, _ = train(*RANKS, "--epochs", "2", "--hidden", "32", "--seed", "7", *saved)
    assert code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    names(error, "hidden 256", 32, "seed 0", 7)


@pytest.mark.deep
def test_a_damaged_checkpoint_is_refused(train, tmp_path, capsys):
    saved = tmp_path / "saved"
    train(*RANKS, "--epochs", "1", "--checkpoint", str(saved))
    (part,) = saved.glob("step-*/data-*/00001-*.safetensors")
    part.write_bytes(part.read_bytes()[:1000])
    code, _ = train(*RANKS, "--epochs", "2", "--checkpoint", str(saved))
    assert code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    names(error, part, "another checkpoint")


@pytest.mark.deep
def test_a_save_that_fails_leaves_the_one_before(train, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "saved"
    train(*RANKS, "--epochs", "1", "--checkpoint", str(saved))
    (saved / "step-00000024").write_text("in the way of the folder")
    code, _ = train(*RANKS, "--epochs", "2", "--checkpoint", str(saved))
    assert code == 2
    assert "step-00000024 is a file" in capsys.readouterr().err
    (saved / "step-00000024").unlink()
    code, results = train(*RANKS, "--epochs", "2", "--checkpoint", str(saved))
    assert code == 0
    assert results["resumed_at_step"] == 12
    assert steps_in(saved) == [12, 24]


SIGNALLED = f"""
import os, runpy, signal, sys, threading, time

def send():
    # Once the handler stands; one rank only, in the middle of some step.
    while not callable(signal.getsignal({{number}})):
        time.sleep(0.01)
    time.sleep(1)
    os.kill(os.getpid(), {{number}})

import mpimesh as mm
if mm.runtime.Launch.detect().rank == 2:
    threading.Thread(target=send, daemon=True).start()
sys.argv = ["train_digits.py", "--mesh", "dp=2,pp=2", "--epochs", "2000", *sys.argv[1:]]
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.deep
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(launch, train, tmp_path, name):
    saved = ["--checkpoint", str(tmp_path / "saved"), *EXACT]
    program = SIGNALLED.format(number=int(getattr(signal, name)))
    result = launch(4, ["-c", program, *saved])
    assert result.returncode == 85, str(result)
    assert "Traceback" not in result.stderr
    steps = steps_in(tmp_path / "saved")[-1]
    assert f"stopped after step {steps}, saved in " in result.stdout
    # On virtual ranks to the end of the next epoch but one.
    epochs = steps // 15 + 2
    code, results = train(*RANKS, "--epochs", str(epochs), *saved)
    assert code == 0
    assert results["resumed_at_step"] == steps
    assert_same_training(results, epochs)
