"""A step of training that ran on virtual ranks, beside what its schedule predicts."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import TraceError
from mpimesh.parallel import PipelineParallel, PipelineStage
from mpimesh.parallel.step import last_step
from mpimesh.schedule import ActionKind
from mpimesh.trace import Event
from tests.helpers.parallel_models import batch, cut, make_pipeline, on_ranks
from tests.helpers.parallel_schedules import halves, looped
from tests.helpers.raises import raises

SVG = "{http://www.w3.org/2000/svg}"
FORWARD_S, BACKWARD_S = 0.004, 0.008


class Sleeping(nn.Linear):
    """A layer that takes its time."""

    def forward(self, x, ctx=None):
        time.sleep(FORWARD_S)
        return super().forward(x, ctx)

    def backward(self, dy, ctx):
        time.sleep(BACKWARD_S)
        return super().backward(dy, ctx)


def sleeping_step(mesh: mm.DeviceMesh, num_microbatches: int, schedule: Any, path):
    stages = [PipelineStage(n).add_layer(Sleeping(6, 6)) for n in range(mesh.dim_size("pp"))]
    tracer = mm.Tracer(mesh.rank)
    pipe = PipelineParallel(stages, num_microbatches, mesh=mesh, schedule=schedule, tracer=tracer)
    x, target = batch(0, 4 * num_microbatches)
    for _ in range(2):  # what is reported is the last one
        pipe.train_step(x.astype(np.float32), target, loss=nn.cross_entropy)
    pipe.forward(x.astype(np.float32))  # inference is no step of training
    return pipe.step_picture(path)


def test_a_picture_of_another_kind_is_refused_on_every_rank(tmp_path):
    def body(mesh):
        pipe = make_pipeline(mesh, tracer=mm.Tracer(mesh.rank))
        with raises(TraceError, "step.png", "SVG", "end in .svg"):
            pipe.step_picture(tmp_path / "step.png")

    on_ranks("pp=2", body)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_prediction_is_that_of_the_measured_means(schedule, tmp_path):
    p, m = 3, 6
    path = tmp_path / "step.svg"
    reports = on_ranks(f"pp={p}", lambda mesh: sleeping_step(mesh, m, schedule, path))
    report = reports[0]
    assert reports[1:] == [None] * (p - 1)
    assert report.step == 2
    measured, predicted = report.measured, report.predicted
    for rank in range(p):
        # A step lasts as long as each rank works, and the means sum up to the same work.
        assert m * (FORWARD_S + BACKWARD_S) <= measured.busy_s(rank) <= measured.step_s
        assert predicted.busy_s(rank) == pytest.approx(measured.busy_s(rank), rel=1e-9)
        parts = measured.idle(rank).parts()
        assert sum(parts.values()) == pytest.approx(measured.bubble_s(rank), abs=1e-9)
        assert all(part_s >= -1e-9 for part_s in parts.values())
    means = {
        kind: [
            fmean(e - s for a, s, e in measured.computing(rank) if a.kind is kind)
            for rank in range(p)
        ]
        for kind in (ActionKind.F, ActionKind.B)
    }
    forward_s, backward_s = means[ActionKind.F], means[ActionKind.B]
    # At least the formula for the fastest times, at most that for the slowest.
    least = (m + p - 1) * (min(forward_s) + min(backward_s))
    assert predicted.step_s >= least * (1 - 1e-9)
    messages = [
        timed.end_s - timed.start_s
        for actions in measured.ranks
        for timed in actions
        if timed.action.kind.is_send
    ]
    message_s = max(0.0, *messages)
    most = (m + p - 1) * (max(forward_s) + max(backward_s) + 2 * message_s)
    assert predicted.step_s <= most * (1 + 1e-9)
    root = ET.fromstring(path.read_text())
    boxes = [
        (box.findtext(f"{SVG}title") or "").split(":")[0]
        for row in root.findall(f"{SVG}g")
        for box in row.iter(f"{SVG}rect")
    ]
    names = [f"{stage}{kind}{n}" for stage in range(p) for kind in "FB" for n in range(m)]
    assert sorted(boxes) == sorted(2 * names)  # once measured, once predicted
    seen = [one.text for one in root.iter(f"{SVG}text")]
    assert seen[0] == f"Training step 2: {schedule}, 3 stages, 6 microbatches"
    assert {"measured", "predicted"} <= set(seen)


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ("pp=1", {}),
        ("dp=2,pp=2", {"num_microbatches": 3}),
        ("pp=2", {"schedule": looped, "stages": 4}),
        ("pp=2", {"schedule": halves}),
        ("dp=3", {"rows": 4}),
    ],
)
def test_pipelines_of_any_shape_have_a_report(dims, options):
    options = dict(options)
    rows, num_stages = options.pop("rows", 12), options.pop("stages", None)

    def body(mesh):
        if num_stages is not None:
            options["stages"] = cut(num_stages)
        pipe = make_pipeline(mesh, tracer=mm.Tracer(mesh.rank), **options)
        pipe.train_step(*batch(0, rows), loss=nn.cross_entropy)
        return pipe.step_report(), pipe.schedule()

    (report, schedule), *others = on_ranks(dims, body)
    assert [one for one, _ in others] == [None] * len(others)
    done = report.measured.schedule
    assert done.placement == schedule.placement
    for rank in range(done.num_ranks):
        computed = [action for action, _, _ in report.measured.computing(rank)]
        assert computed == [action for action, _, _ in report.predicted.computing(rank)]
        assert len(computed) == len(set(computed)) > 0
    assert done.num_microbatches == (2 if dims == "dp=3" else schedule.num_microbatches)
    lines = str(report).splitlines()
    assert [line.split()[2] for line in lines] == ["measured", "predicted", "cost"]
    assert report.overhead_s > 0
    if report.predicted.schedule.num_ranks > 1:
        assert "waiting for gradients" in lines[1]


def test_stages_that_are_frozen_have_no_backward_in_the_report():
    def body(mesh):
        stages = cut(3)
        stages[0].freeze()
        pipe = make_pipeline(mesh, stages=stages, tracer=mm.Tracer(mesh.rank))
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        return pipe.step_report()

    report = on_ranks("pp=3", body)[0]
    for timetable in (report.measured, report.predicted):
        kinds = [{a.kind for a, _, _ in timetable.computing(rank)} for rank in range(3)]
        assert kinds == [{ActionKind.F}] + 2 * [{ActionKind.F, ActionKind.B}]


@pytest.mark.parametrize(("capacity", "missing"), [(None, ()), (9, ("rank 0", "0F0", "1f1b"))])
def test_tracers_that_hold_no_whole_step_are_told_on_every_rank(capacity, missing):
    def body(mesh):
        tracer = None if capacity is None else mm.Tracer(mesh.rank, capacity=capacity)
        pipe = make_pipeline(mesh, tracer=tracer)
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        with raises(TraceError, *missing, "tracer=Tracer(mesh.rank)", "train_step") as caught:
            pipe.step_report()
        assert caught.value.agreed
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)

    on_ranks("pp=2", body)


def test_the_last_step_is_between_the_ends_of_steps():
    step = ["end of step", "gradients"]
    names = ["a", *step, "opt", "b", "c", *step, "opt", "d", "end of step"]
    events = [
        Event(rank, name, "wait" if name in step else "other", place, 1.0)
        for rank in (0, 1)
        for place, name in enumerate(names)
    ]
    found = [event.name for event in last_step(events) if event.rank == 1]
    assert found == ["gradients", "opt", "b", "c", "end of step"]
    assert [e.name for e in last_step(events[:3])] == ["a", "end of step"]
    assert last_step(events[:2]) == []


def test_a_tracer_without_a_rank_takes_that_of_its_mesh_or_model():
    def program():
        own = mm.Tracer(7)
        with mm.DeviceMesh("dp=3", tracer=(tracer := mm.Tracer())) as mesh:
            mesh.barrier()
            of_model = mm.Tracer()
            net = nn.Linear(2, 2)
            mm.fully_shard(net, mesh, loss=nn.mse_loss, tracer=of_model)
            mm.DataParallel(nn.Linear(2, 2), mesh, loss=nn.mse_loss, tracer=own)
            return [one.rank for one in (tracer, of_model, own)], mesh.rank

    for ranks, rank in mm.run_virtual(3, program):
        assert ranks == [rank, rank, 7]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_picture_of_replicas_has_a_row_for_each_rank(stage, tmp_path):
    x, target = np.ones((8, 6), np.float32), np.ones((8, 3), np.float32)

    def main(mesh):
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        model = mm.fully_shard(net, mesh, stage=stage, loss=nn.mse_loss, tracer=mm.Tracer())
        optimizer = mm.ParallelOptimizer(mm.optim.SGD(model.parameters(), lr=0.1), model)
        with raises(TraceError, "tracer=mm.Tracer()"):
            model.step_picture(tmp_path / "step.svg")
        with raises(TraceError, ".svg"):
            model.step_picture(tmp_path / "step.png")
        for _ in range(3):
            model.train_step(x, target, optimizer=optimizer)
        model.step_picture(tmp_path / "step.svg")

    on_ranks("dp=3", main)
    text = (tmp_path / "step.svg").read_text()
    assert "Training step 3 on dp=3" in text
    assert all(f"rank {rank}" in text for rank in range(3))
    assert len(ET.fromstring(text).findall(".//{*}rect")) > 6
