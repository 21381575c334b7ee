"""An error that a rank keeps until all ranks meet is shown first, whatever ends the job before."""

from __future__ import annotations

import re

import pytest

from mpimesh.runtime.watchdog import EXIT_CODE
from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE
from tests.launch.test_failure_exits import LIMIT_S

_MODEL = """
from mpimesh import nn, optim

FAILS, LATE, WITHIN = {fails!r}, {late!r}, {within!r}
steps = 0

def fails(where):
    if RANK == 1 and steps == 2 and where == FAILS:
        while LATE and WITHIN == "forward" and not os.path.exists("within"):
            time.sleep(0.01)  # else rank 2 hears of the failure before it begins
        print("rank 1 fails at", time.time(), flush=True)
        raise OSError("the cause")

def shown():
    end_s = time.monotonic() + 20
    while "the cause" not in open("stderr").read() and time.monotonic() < end_s:
        time.sleep(0.05)

def late(where):
    if RANK == 2 and steps == 2 and where == WITHIN:
        open("within", "w").close()
        exec(LATE)

class Layer(nn.Module):
    def forward(self, x, ctx=None):
        fails("forward")
        late("forward")
        if FAILS == "forward":
            x = x - mesh.group().all_reduce(x.mean(), "mean").resolve()
        return x

    def backward(self, dy, ctx):
        fails("backward")
        return dy

def read(rows):
    fails("reader")
    return np.ones((len(rows), 4), np.float32)

with mm.DeviceMesh("dp=-1") as mesh:
    net = nn.Sequential(nn.Linear(4, 4), Layer())
    if {sharded}:
        model = mm.fully_shard(net, mesh, loss=nn.mse_loss)
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    else:
        model = mm.DataParallel(net, mesh, loss=nn.mse_loss)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
    batches = mm.data.Batches(read, mesh, 6, rows=60, prefetch=0)
    for steps in range(4):
        late("step")
        x = batches.next()
        model.train_step(x, x, optimizer=optimizer)
"""


def run(launch, fails, late="", *, within="step", sharded=False, timeout_s=0.0, checks="0"):
    text = PRELUDE + _MODEL.format(fails=fails, late=late, within=within, sharded=sharded)
    environment = {"MPIMESH_CHECKS": checks}
    if timeout_s:
        environment["MPIMESH_TIMEOUT_S"] = str(timeout_s)
    result = launch(3, text, env=environment, timeout_s=LIMIT_S)
    assert not result.timed_out, str(result)
    assert result.returncode not in (0, None), str(result)
    lines = [line for line in result.stderr.splitlines() if line.startswith("[rank")]
    causes = [place for place, line in enumerate(lines) if "OSError: the cause" in line]
    others = [
        place
        for place, line in enumerate(lines)
        if re.search(r"errors\.\w+: |longer than|without ending MPI|ZeroDivisionError", line)
    ]
    assert causes, str(result)
    # Or in one line, where all ranks have met and raise the cause.
    assert not others or causes[0] <= others[0], str(result)
    return result, lines[: others[0]] if others else lines


@pytest.mark.parametrize(
    ("sharded", "checks"), [(False, "0"), *deep((True, "0"), (False, "1"), (True, "1"))]
)
def test_of_a_layer_that_talks_over_the_mesh(launch, sharded, checks):
    """The others wait in the layer, this rank in the end of the step: a mismatch ends both."""
    result, before = run(launch, "forward", sharded=sharded, checks=checks)
    # Or all have met at the end of the step before, and raise the cause with its rank.
    met = "StageError: stage 0 failed on rank 1" in result.stderr
    assert met or all(line.startswith("[rank 1]") for line in before), str(result)


@pytest.mark.parametrize(("fails", "within"), deep(("reader", "step"), ("backward", "forward")))
def test_the_watchdog_ends_the_job(launch, fails, within):
    result, _ = run(launch, fails, "time.sleep(100)", within=within, timeout_s=4)
    assert result.returncode == EXIT_CODE, str(result)
    assert "missing: rank 2\n" in result.stderr, str(result)
    assert result.stderr.count("OSError: the cause") == 1, str(result)


ENDS = {
    "kill": "shown(); os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "shown(); sys.exit(3)",
    "raise": "shown(); 1 / 0",
}


@pytest.mark.deep
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("fails", "within"), [("reader", "step"), ("backward", "forward")])
def test_another_rank_ends_the_job(launch, fails, within, end):
    if (within, end) != ("forward", "raise"):  # which the step tells
        run(launch, fails, ENDS[end], within=within)


@pytest.mark.deep
def test_it_is_shown_soon_where_another_rank_comes_late(launch):
    """And raised on all ranks when that one has come."""
    late = "shown(); print('rank 2 comes at', time.time(), flush=True)"
    result, _ = run(launch, "reader", late)
    assert result.stderr.count("has failed, and waits for the other ranks") == 1, str(result)
    assert "mpimesh.errors.StageError: rank 1: OSError: the cause" in result.stderr, str(result)
