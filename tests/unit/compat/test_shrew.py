"""shrew's ``shrew::distributed``, row by row, against one process and closed formulas."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.compat.shrew import (
    AllReduceOp,
    DataParallel,
    LossScaleConfig,
    MixedPrecisionTrainer,
    ParallelTrainer,
    PipelineParallel,
    PipelineStage,
    reduce_gradients,
)
from mpimesh.errors import MismatchError, ModuleError, ScheduleError, StageError
from mpimesh.parallel import microbatch_rows
from mpimesh.schedule import make_schedule, simulate
from tests.helpers.raises import raises
from tests.helpers.ranks import on

X = np.random.default_rng(0).normal(size=(10, 6)).astype("f4")
Y = np.random.default_rng(1).normal(size=(10, 3)).astype("f4")


def layers():
    return [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)]


def stages():
    first, relu, last = layers()
    return [PipelineStage(0).add_layer(first).add_layer(relu), PipelineStage(1).add_layer(last)]


def whole():
    model = nn.Sequential(*layers())
    model.materialize(seed=0)
    return model


def test_s1_a_stage_is_built_in_a_chain_and_its_number_is_checked():
    stage = PipelineStage(0)
    assert stage.add_layer(nn.Linear(6, 5)) is stage
    assert stage.add_layer(nn.ReLU()).stage_id == 0
    assert len(stage.layers) == 2

    def main(mesh):
        for numbers in ((1, 0), (0, 0), (0, 2)):
            with raises(ScheduleError, "numbered 0 to 1", list(numbers)):
                PipelineParallel([PipelineStage(k) for k in numbers], 2, mesh=mesh)

    on("pp=2", main)


def test_s2_a_stage_runs_its_layers_in_order_and_an_empty_one_is_the_identity():
    stage = PipelineStage(0).add_layer(nn.Linear(6, 5)).add_layer(nn.ReLU())
    stage.materialize(seed=3)
    weight, bias = (one.data for one in stage.parameters())
    assert np.allclose(stage.forward(X), np.maximum(X @ weight.T + bias, 0), atol=1e-6)
    assert PipelineStage(1).forward(X) is X
    assert PipelineStage(1).parameters() == []


def test_s3_stages_and_microbatches_are_checked():
    def main(mesh):
        with raises(ScheduleError, "pipeline needs at least one stage"):
            PipelineParallel([], 4, mesh=mesh)
        wrong: Any
        for wrong in (0, -1, 1.5):
            with pytest.raises(ValueError, match="num_microbatches"):
                PipelineParallel(stages(), wrong, mesh=mesh)
        with raises(ScheduleError, 3, 2):
            PipelineParallel([*stages(), PipelineStage(2)], 4, mesh=mesh)

    on("pp=2", main)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 16])
def test_s4_forward_is_that_of_the_model_in_one_piece(microbatches):
    def main(mesh):
        pipe = PipelineParallel(stages(), microbatches, mesh=mesh)
        return pipe.forward(X), pipe.forward(X, everywhere=True)

    expected = whole().forward(X)
    (first, everywhere), (last, _) = on("pp=2", main)
    assert first is None
    assert np.allclose(last, expected, atol=1e-6)
    assert np.allclose(everywhere, expected, atol=1e-6)


def test_s5_rows_go_to_microbatches_as_in_shrew():
    seen = {10: [3, 3, 3, 1], 9: [3, 3, 3], 5: [2, 2, 1], 6: [2, 2, 2], 3: [1, 1, 1]}
    assert {n: [part.stop - part.start for part in microbatch_rows(n, 4)] for n in seen} == seen

    class Counting(nn.ReLU):
        rows: list[int] = []  # noqa: RUF012

        def forward(self, x, ctx=None):
            self.rows.append(len(x))
            return super().forward(x, ctx)

    def main(mesh):
        pipe = PipelineParallel([PipelineStage(0).add_layer(Counting())], 4, mesh=mesh)
        assert pipe.forward(X[:0]).shape == (0, 6)
        Counting.rows.clear()
        pipe.forward(X)
        assert Counting.rows == [3, 3, 3, 1]
        with pytest.raises(mm.MpimeshError):
            pipe.forward(np.float32(1))

    on("pp=1", main)


def test_s6_parameters_are_in_the_order_of_stages_and_layers():
    def main(mesh):
        pipe = PipelineParallel(stages(), 2, mesh=mesh)
        return [name for name, _ in pipe.named_parameters()], pipe.full_state_dict()

    (first, state), (last, _) = on("pp=2", main)
    reference = whole()
    assert first + last == [name for name, _ in reference.named_parameters()]
    for name, one in reference.named_parameters():
        assert np.array_equal(state[name], one.data)
    # shrew's own test: 58 numbers in Linear(4, 8), Linear(8, 2).
    assert nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).num_parameters() == 58


def test_s7_stages_by_number():
    def main(mesh):
        pipe = PipelineParallel(stages(), 2, mesh=mesh)
        assert pipe.num_stages == 2
        assert [stage and stage.stage_id for stage in map(pipe.stage, range(2))] == [0, 1]
        assert pipe.stage(2) is None

    on("pp=2", main)


def test_s8_a_module():
    model = whole()
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
    assert model.num_parameters() == 6 * 5 + 5 + 5 * 3 + 3
    assert model.trainable_params_count() == model.num_parameters()
    model.layers[0].freeze()
    assert model.trainable_params_count() == 5 * 3 + 3
    assert model.frozen_parameters() == model.parameters()[:2]
    assert not model.eval().is_training()
    assert model.train().is_training()
    model.set_training(False)
    assert not model.layers[0].is_training()
    assert np.array_equal(model(X), model.forward(X))


@pytest.mark.parametrize("rows", [10, 7, 1])
def test_s9_replicas_share_the_rows_of_a_batch(rows):
    def main(mesh):
        module = nn.Sequential(*layers())
        model = DataParallel(module, mesh.size, mesh=mesh)
        assert model.num_workers == 3
        assert model.inner is module
        assert len(model.parameters()) == 4
        assert model.eval().is_training() is False
        result = model.forward(X[:rows])
        with raises(ModuleError, "num_workers is 2", 3):
            DataParallel(module, 2, mesh=mesh)
        assert model.into_inner() is module
        return result

    for result in on("dp=3", main):
        assert np.allclose(result, whole().forward(X[:rows]), atol=1e-6)


def test_s10_gradients_by_name():
    def main(mesh):
        me = mesh.rank
        store = {"all": np.full(2, me + 1.0), "none": None}
        if me > 0:
            store["two"] = np.full(3, 10.0 * me)
        names = ["all", "two", "none", "absent"]
        average = reduce_gradients(store, names, AllReduceOp.Average, group=mesh.group("dp"))
        total = reduce_gradients(store, names, AllReduceOp.Sum, group=mesh.group("dp"))
        assert average.keys() == total.keys() == {"all", "two"}
        assert average["all"].tolist() == [2.0] * 2
        assert average["two"].tolist() == [15.0] * 3  # divided by the two that have it
        assert total["two"].tolist() == [30.0] * 3
        ours = mm.parallel.reduce_gradients(store, mesh.group("dp"))
        assert ours["two"].tolist() == [10.0] * 3  # divided by all three
        with raises(MismatchError, "'all'"):
            reduce_gradients({"all": np.ones(2 + me)}, ["all"], group=mesh.group("dp"))

    on("dp=3", main)


def test_s11_several_batches_make_a_step():
    parts = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[6:], Y[6:])]

    def main(mesh):
        model = DataParallel(nn.Sequential(*layers()), 2, mesh=mesh)
        trainer = ParallelTrainer(model, optim.SGD(model.parameters(), lr=0.1), 2)
        assert trainer.flush() is None
        losses = [trainer.accumulate_step(*part, nn.mse_loss) for part in parts]
        losses.append(trainer.flush())
        return losses, model.state_dict()

    reference, expected = whole(), []
    sgd = optim.SGD(reference.parameters(), lr=0.1)
    for step in (parts[:2], parts[2:]):
        found = []
        for x, y in step:
            ctx = nn.Context()
            out = reference.forward(x, ctx)
            found.append(((out - y) ** 2).mean())
            reference.backward(2 * (out - y) / out.size / len(step), ctx)
        sgd.step()
        sgd.zero_grad()
        expected.append(np.mean(found))
    for losses, state in on("dp=2", main):
        assert losses[0] is losses[2] is None
        assert np.allclose([losses[1], losses[3]], expected, rtol=1e-5)
        for name, one in reference.named_parameters():
            assert np.allclose(state[name], one.data, atol=1e-6)


def test_s12_an_overflow_on_one_rank_skips_the_step_on_all():
    class Exploding(nn.ReLU):
        explode = False

        def backward_input(self, dy, ctx):
            factor = np.inf if self.explode else 1
            dx: Any = super().backward_input(dy, ctx)
            return (dx * factor).astype(dy.dtype)

    def main(mesh):
        layer = Exploding()
        net = nn.Sequential(nn.Linear(6, 5), layer, nn.Linear(5, 3))
        model = DataParallel(net, 2, mesh=mesh, dtype="float16")
        config = LossScaleConfig(init_scale=64.0, growth_interval=2)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        trainer = MixedPrecisionTrainer(model, sgd, np.float16, config)
        assert trainer.model is model
        seen = []
        for step in range(4):
            layer.explode = step == 1 and mesh.rank == 1
            before = [one.data.copy() for one in model.parameters()]
            done = trainer.train_step(X.astype("f2"), Y.astype("f2"), nn.mse_loss)
            moved = any(
                (a != b.data).any() for a, b in zip(before, model.parameters(), strict=True)
            )
            assert moved != done.skipped
            assert done.compute_dtype == trainer.compute_dtype == np.float16
            assert np.isfinite(done.loss)
            seen.append((done.skipped, done.loss_scale, done.total_skipped))
        assert trainer.skipped_steps == 1
        with raises(ModuleError, "compute_dtype is float32", "float16"):
            MixedPrecisionTrainer(model, sgd, "float32")
        return seen

    expected = [(False, 64.0, 0), (True, 32.0, 1), (False, 32.0, 1), (False, 64.0, 1)]
    assert on("dp=2", main) == [expected] * 2
    assert LossScaleConfig() == LossScaleConfig(65536.0, 2.0, 2.0, 2000)


def test_s13_an_error_in_one_stage_reaches_every_rank():
    class Failing(nn.ReLU):
        def forward(self, x, ctx=None):
            raise RuntimeError("out of paper")

    def main(mesh):
        last = PipelineStage(1).add_layer(Failing())
        pipe = PipelineParallel([PipelineStage(0).add_layer(nn.ReLU()), last], 2, mesh=mesh)
        with raises(StageError, "out of paper"):
            pipe.forward(X)

    start = time.monotonic()
    on("pp=2", main)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 16)])
def test_s14_the_promised_schedule_has_the_bubble_of_the_formula(ranks, microbatches):
    for name in ("1f1b", "gpipe"):
        schedule = make_schedule(name, ranks, microbatches)
        idle = (ranks - 1) / (microbatches + ranks - 1)
        assert simulate(schedule, forward_s=1, backward_s=2).bubble_fraction == pytest.approx(idle)
