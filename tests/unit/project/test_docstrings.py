"""The examples of docstrings show what really comes out."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import dtensor, layout, nn, optim, schedule


def run_examples(thing: Any) -> tuple[int, int, str]:
    """Run the examples of one docstring; return how many there are and failed, and the report."""
    # Names as a reader has them after `import mpimesh as mm`, and those of the class's own room.
    room = vars(layout if thing.__module__.startswith(layout.__name__) else schedule)
    others = {"PipelineStage": mm.PipelineStage, "Mesh": mm.Mesh}
    names = {"mm": mm, "np": np, "nn": nn, "optim": optim, **room, **others}
    parsed = doctest.DocTestParser().get_doctest(thing.__doc__, names, thing.__name__, None, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    failed, tried = runner.run(parsed, out=report.append)
    return tried, failed, "".join(report)


@pytest.mark.parametrize(
    "thing",
    [
        mm.DeviceMesh,
        mm.DeviceMesh.measure_links,
        mm.DeviceMesh.shared_empty,
        mm.DeviceMesh.budget,
        mm.ProcessGroup.close,
        mm.ProcessGroup.empty_once,
        mm.compat.kapsl.DistributedOps,
        mm.compat.tensorflow.Heartbeat,
        mm.compat.tvm.struct_info,
        mm.compat.kapsl.DeviceMesh,
        mm.compat.tvm.scatter_from_worker0,
        mm.Microbatches,
        mm.PipelineStage,
        mm.local_map,
        mm.shift,
        mm.testing.gradcheck,
        schedule.Costs.joined,
        dtensor.DVariable,
        layout.BoxLayout,
        layout.Layout,
        layout.Placement,
        layout.Shard,
        layout.layout_of_runs,
        layout.plan_redistribution,
        nn.Add,
        nn.Checkpoint,
        nn.Concat,
        optim.LRScheduler,
        optim.LossScaler,
        schedule.Action,
        schedule.Schedule,
        schedule.lower,
        schedule.Edges,
        schedule.most_waiting,
        schedule.partition,
    ],
    ids=lambda thing: thing.__qualname__,
)
def test_the_examples_run_on_one_rank(thing):
    ((tried, failed, report),) = mm.run_virtual(1, run_examples, thing)
    assert tried
    assert not failed, report
