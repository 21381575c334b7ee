"""Every schedule on the executor, bit for bit against one process that adds up microbatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.parallel.microbatch import microbatch_rows
from mpimesh.schedule import auto, make_schedule, schedule_names
from tests.helpers.depth import deep, deep_but
from tests.helpers.parallel_models import (
    SEED,
    assert_same,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    train_alone,
    train_on,
)

TRAINING = [name for name in schedule_names() if name != "forward"]
VEES = ("zbv", "vhalf", "vmin", "dualpipev")
SEVERAL = ("interleaved", "looped_bfs", "auto")


def cases():
    """Each schedule on one rank, and on more; three stages on each where it can."""
    for name in TRAINING:
        chunks = 2 if name in (*VEES, *SEVERAL) else 1
        yield from ((name, 1, chunks), (name, 2, chunks), (name, 4, chunks))
        if name in SEVERAL:
            yield from ((name, 3, 1), (name, 2, 3))


# Each on as many ranks as show its order; three stages on a rank, and stages in another order.
QUICK = [
    ("gpipe", 2, 1),
    ("1f1b", 4, 1),
    ("interleaved", 2, 3),
    ("looped_bfs", 2, 2),
    ("zb1p", 4, 1),
    ("zb2p", 2, 1),
    ("zbv", 4, 2),
    ("vhalf", 2, 2),
    ("vmin", 1, 2),
    ("dualpipev", 4, 2),
    ("auto", 3, 1),
]


def add_up(rows: int, num_microbatches: int):
    """Loss and gradients of a batch, by one process, one microbatch after another; its outputs."""
    model = nn.Sequential(layers())
    model.materialize(seed=SEED, dtype=np.float64)
    x, target = batch(0, rows)
    loss, outputs = 0.0, []
    for part in microbatch_rows(rows, num_microbatches):
        context = nn.Context(step=0, first_row=part.start, training=True)
        y = model.forward(x[part], context)
        value, gradient = nn.cross_entropy.value_and_grad(y, target[part], denominator=rows)
        loss += float(value)
        model.backward(gradient, context)
        outputs.append(model.forward(x[part]))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss, gradients, np.concatenate(outputs)


@pytest.mark.parametrize(("name", "num_ranks", "chunks"), deep_but(cases(), *QUICK))
@pytest.mark.parametrize(("rows", "num_microbatches"), [*deep((26, 8)), (13, 5), (4, 1)])
def test_every_schedule_gives_the_same_bits(name, num_ranks, chunks, rows, num_microbatches):
    num_stages = num_ranks * chunks
    loss, gradients, outputs = add_up(rows, num_microbatches)

    def body(mesh: mm.DeviceMesh):
        pipe = make_pipeline(mesh, num_microbatches, schedule=name, stages=cut(num_stages))
        got = pipe.train_step(*batch(0, rows), loss=nn.cross_entropy)
        assert got == loss
        mine = dict(pipe.named_parameters())
        for parameter_name, parameter in mine.items():
            np.testing.assert_array_equal(
                parameter.grad, gradients[parameter_name], err_msg=parameter_name, strict=True
            )
        y = pipe.forward(batch(0, rows)[0], everywhere=True)
        np.testing.assert_array_equal(y, outputs)
        return list(mine)

    names = [one for part in on_ranks(f"pp={num_ranks}", body, rendezvous=True) for one in part]
    assert sorted(names) == sorted(gradients)


def test_auto_with_measured_times_runs_under_its_cap():
    times: dict[str, Any] = {"forward_s": [1, 4, 1, 2], "backward_input_s": 2.0, "message_s": 0.5}
    schedule = partial(auto, num_ranks=2, max_in_flight=3, **times)
    loss, gradients, _ = add_up(26, 8)

    def body(mesh: mm.DeviceMesh):
        pipe = make_pipeline(mesh, 8, schedule=schedule, stages=cut(4))
        assert pipe.schedule().peak_in_flight(mesh.coord("pp")) <= 3
        assert pipe.train_step(*batch(0, 26), loss=nn.cross_entropy) == loss
        for name, parameter in pipe.named_parameters():
            np.testing.assert_array_equal(parameter.grad, gradients[name], err_msg=name)

    on_ranks("pp=2", body, rendezvous=True)


@pytest.mark.parametrize("name", [*VEES, "interleaved"])
def test_frozen_stages_have_no_backward(name):
    """A schedule without the backward of the first stages still runs."""

    def body(mesh: mm.DeviceMesh):
        stages = cut(4)
        for stage in stages[:2]:
            for parameter in stage.parameters():
                parameter.requires_grad = False
        pipe = make_pipeline(mesh, 5, schedule=name, stages=stages)
        loss = pipe.train_step(*batch(0, 13), loss=nn.cross_entropy)
        return loss, {n: p.grad for n, p in pipe.named_parameters() if p.requires_grad}

    loss, gradients, _ = add_up(13, 5)
    trained = {}
    for got, parts in on_ranks("pp=2", body, rendezvous=True):
        assert got == loss
        trained.update(parts)
    assert sorted(trained) == ["4.bias", "4.weight", "6.bias", "6.weight", "7.bias", "7.weight"]
    for parameter_name, gradient in trained.items():
        np.testing.assert_array_equal(gradient, gradients[parameter_name])


@pytest.mark.parametrize("name", [*VEES, *SEVERAL])
def test_replicas_of_pipelines_with_several_stages_on_a_rank(name):
    """Buckets of two stages fill while both still run; three steps with an optimizer."""

    def body(mesh: mm.DeviceMesh):
        return train_on(mesh, 3, 13, schedule=name, stages=cut(4))

    for trained in on_ranks("dp=2,pp=2", body, rendezvous=True):
        assert_same(trained, train_alone(3, 13))


def test_a_mesh_that_does_not_fit_a_vee_is_told():
    made = make_schedule("zbv", 4, 4)

    def body(mesh: mm.DeviceMesh):
        for schedule in ("zbv", made):
            with pytest.raises(mm.errors.ScheduleError, match=r"\btwice\b|\b4\b"):
                make_pipeline(mesh, 4, schedule=schedule, stages=cut(4))

    on_ranks("pp=4", body)
