"""A rank that leaves in the middle of a step ends the job, however the stages hand over."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE
from tests.launch.test_failure_exits import LIMIT_S, failed

_PROGRAM = """
import mpimesh.parallel.links
mpimesh.parallel.links.LENDS = {lends}

class Leaving(mm.nn.Linear):
    calls = 0

    def leave(self, kind):
        if RANK == 1 and kind == {kind!r}:
            self.calls += 1
            if self.calls == 7:  # in the second step
                print("rank 1 goes at", time.time(), flush=True)
                {way}

    def forward(self, x, ctx=None):
        self.leave("F")
        return super().forward(x, ctx)

    def backward_input(self, dy, ctx):
        self.leave("B")
        return super().backward_input(dy, ctx)

with mm.DeviceMesh("pp=3") as mesh:
    stages = [mm.PipelineStage(n).add_layer(Leaving(3000, 3000)) for n in range(3)]
    pipe = mm.PipelineParallel(stages, 4, mesh=mesh, schedule={schedule!r})
    for step in range(100):
        x = np.ones((8, 3000), np.float32)
        pipe.train_step(x, x, loss=mm.nn.mse_loss)
"""

WAYS = {
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", None),
    "_exit": ("os._exit(3)", None),
    "sys.exit": ("sys.exit(3)", 3),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(100)", 128 + signal.SIGINT),
}


@pytest.mark.parametrize("lends", [True, *deep(False)], ids=["lent", "messages"])
@pytest.mark.parametrize(
    ("way", "schedule", "kind"),
    [
        ("kill", "1f1b", "B"),
        *deep(("_exit", "zb1p", "F"), ("sys.exit", "1f1b", "F"), ("interrupt", "zb1p", "B")),
    ],
)
def test_a_rank_that_leaves_within_a_step(launch, lends, way, schedule, kind):
    statement, code = WAYS[way]
    text = textwrap.dedent(PRELUDE) + _PROGRAM.format(
        lends=lends, kind=kind, way=statement, schedule=schedule
    )
    failed(launch(3, text, timeout_s=LIMIT_S), code=code)
