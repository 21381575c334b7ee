"""Pipelines and replicas whose arrays live on a device, with and without one that moves them."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.parallel import PipelineStage
from tests.devices.fake_cuda import installed
from tests.helpers.depth import deep
from tests.helpers.fake_cupy import FakeArray, FakeCupy
from tests.helpers.parallel_models import batch, make_pipeline, on_ranks
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of, trapped_stages
from tests.helpers.tensor_models import VOCAB, batch as tokens, layers as split_layers


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    runtime = SimpleNamespace(getDeviceCount=lambda: 0, CUDARuntimeError=RuntimeError)
    monkeypatch.setattr(fake, "cuda", SimpleNamespace(runtime=runtime), raising=False)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", None)
    return fake


@pytest.mark.parametrize("dims", ["dp=1", "dp=2,pp=2", "dp=3"])
def test_training_on_a_device(cupy, dims):
    def body(mesh):
        on_host = make_pipeline(mesh)
        on_device = make_pipeline(mesh, xp=cupy)
        for step in range(3):
            x, target = batch(step, 13)
            expected = on_host.train_step(x, target, loss=nn.cross_entropy)
            loss = on_device.train_step(
                cupy.asarray(x), cupy.asarray(target), loss=nn.cross_entropy
            )
            assert loss == pytest.approx(expected, rel=1e-12)
            assert on_device.clip_grad_norm(0.1) == pytest.approx(on_host.clip_grad_norm(0.1))
            for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
                assert isinstance(one.grad, FakeArray)
                np.testing.assert_allclose(one.grad.on_host, other.grad, rtol=1e-9, atol=1e-15)
                one.data -= one.grad
                other.data -= other.grad
        x = batch(9, 7)[0]
        y = on_device.forward(cupy.asarray(x), everywhere=True)
        assert isinstance(y, FakeArray)
        expected = on_host.forward(x, everywhere=True)
        np.testing.assert_allclose(y.on_host, expected, rtol=1e-8, atol=1e-12)
        state = on_device.full_state_dict()
        assert all(isinstance(values, np.ndarray) for values in state.values())
        on_device.load_state_dict(on_host.full_state_dict())

    on_ranks(dims, body)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_divided_state_on_a_device(cupy, dims, dtype):
    def body(mesh):
        trained = []
        for xp in (np, cupy):
            pipe = make_pipeline(mesh, xp=xp, dtype=dtype)
            adam = optim.Adam(pipe.parameters(), lr=0.01)
            scaler = optim.LossScaler(16.0)
            optimizer = mm.ParallelOptimizer(adam, pipe, scaler=scaler)
            for step in range(3):
                x, target = batch(step, 13)
                x = x.astype(dtype)
                pipe.train_step(xp.asarray(x), xp.asarray(target), loss=nn.cross_entropy)
                pipe.clip_grad_norm(0.1)
                optimizer.step()
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
                    assert pipe.tune_buckets() is not None
            assert all(isinstance(p.data, np.ndarray) == (xp is np) for p in pipe.parameters())
            trained.append((pipe.full_state_dict(), scaler.skipped_steps))
        assert trained[0][1] == trained[1][1]
        for name, values in trained[0][0].items():
            np.testing.assert_allclose(trained[1][0][name], values, rtol=1e-2, atol=1e-3)
            if dtype == "float64":
                np.testing.assert_allclose(trained[1][0][name], values, rtol=1e-9, atol=1e-12)

    on_ranks(dims, body)


# -- messages that stay on the device --------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", None)
    with installed() as fake:
        yield fake


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("dims", ["pp=3", "dp=2,pp=2"])
def test_activations_and_gradients_stay_on_the_device(device, dims, schedule, monkeypatch):
    in_step = threading.local()
    copies: list[object] = []

    def asnumpy(x):
        if getattr(in_step, "now", False):
            copies.append(x)
        return x.get()

    monkeypatch.setattr(device, "asnumpy", asnumpy)

    def body(mesh):
        on_host = make_pipeline(mesh, schedule=schedule)
        on_device = make_pipeline(mesh, schedule=schedule, xp=device)
        for step in range(2):
            x, target = batch(step, 13)
            expected = on_host.train_step(x, target, loss=nn.cross_entropy)
            given = device.asarray(x), device.asarray(target)
            in_step.now = True
            loss = on_device.train_step(*given, loss=nn.cross_entropy)
            in_step.now = False
            assert loss == pytest.approx(expected, rel=1e-12)
            for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
                assert isinstance(one.grad, device.ndarray)
                np.testing.assert_allclose(one.grad.get(), other.grad, rtol=1e-9, atol=1e-15)
        assert not copies
        y = on_device.forward(device.asarray(batch(9, 7)[0]), everywhere=True)
        expected = on_host.forward(batch(9, 7)[0], everywhere=True)
        np.testing.assert_allclose(y.get(), expected, rtol=1e-8, atol=1e-12)

    on_ranks(dims, body)


@pytest.mark.parametrize("schedule", ["1f1b", *deep("gpipe")])
@pytest.mark.parametrize("stage", [0, *deep(1), 2])
@pytest.mark.parametrize(("kind", "microbatch"), [*deep(("F", 0)), ("F", 2), ("B", 1)])
def test_a_failed_step_leaves_nothing_behind_on_the_device(
    device, schedule, stage, kind, microbatch
):
    def body(mesh):
        stages, traps = trapped_stages(3)
        on_device = make_pipeline(mesh, schedule=schedule, xp=device, stages=stages)
        on_host = make_pipeline(mesh, schedule=schedule, stages=trapped_stages(3)[0])
        for step in range(3):
            x, target = batch(step, 9)
            given = device.asarray(x), device.asarray(target)
            if step == 1:
                traps[stage].arm(kind, microbatch)
                error = error_of(lambda: on_device.train_step(*given, loss=nn.cross_entropy))  # noqa: B023
                assert f"stage {stage} failed" in str(error)
                traps[stage].disarm()
                assert_nothing_left(mesh)
                continue
            expected = on_host.train_step(x, target, loss=nn.cross_entropy)
            loss = on_device.train_step(*given, loss=nn.cross_entropy)
            # The failed step did not count, so both are in the same one.
            assert loss == pytest.approx(expected, rel=1e-12)

    on_ranks("pp=3", body)


def test_stages_on_both_kinds_of_memory_meet_on_the_host(device):
    def body(mesh):
        xp = device if mesh.rank == 1 else np
        pipe, alone = make_pipeline(mesh, xp=xp), make_pipeline(mesh)
        x, target = batch(0, 9)
        mine = target if xp is np else device.asarray(target)
        loss = pipe.train_step(x, mine, loss=nn.cross_entropy)
        expected = alone.train_step(x, target, loss=nn.cross_entropy)
        assert loss == pytest.approx(expected, rel=1e-12)

    on_ranks("pp=2", body)


@pytest.mark.parametrize("cut", [False, True])
def test_tuples_inputs_and_skips_stay_on_the_device(device, cut):
    """Integers that enter in the middle, pass on as a tuple, and a skip beside them."""

    def made():
        return [
            PipelineStage(0).add_layer(nn.Linear(6, 4)),
            PipelineStage(1, inputs=("ids",)),
            PipelineStage(2, skips=(0,)).add_layer(Flat()).add_layer(nn.Linear(9, 5)),
        ]

    def given(to):
        x, target = batch(0, 9)
        values = [to(x), to(target), to(np.arange(9).reshape(9, 1))]
        if cut:
            values = [mm.Microbatches([one[:5], one[5:6], one[6:]]) for one in values]
        return values

    def body(mesh):
        on_host, on_device = (make_pipeline(mesh, stages=made(), xp=xp) for xp in (np, device))
        for _ in range(2):
            losses = []
            for pipe, to in ((on_host, np.asarray), (on_device, device.asarray)):
                x, target, ids = given(to)
                inputs = {"ids": ids}
                losses.append(pipe.train_step(x, target, loss=nn.cross_entropy, inputs=inputs))
            assert losses[1] == pytest.approx(losses[0], rel=1e-12)
            for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
                np.testing.assert_allclose(one.grad.get(), other.grad, rtol=1e-9, atol=1e-15)
        assert_nothing_left(mesh)

    on_ranks("pp=3", body)


class Flat(nn.Module):
    """``((x, ids), skip)`` as one array; its gradient built like that."""

    num_layers = 0

    def __init__(self):
        self.concat = nn.Concat()

    def forward(self, x, ctx=None):
        (first, ids), skip = x
        return self.concat.forward((first, ids, skip), ctx)

    def backward_input(self, dy, ctx):
        first, ids, skip = self.concat.backward_input(dy, ctx)
        return (first, ids), skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dims", ["tp=3", "pp=2,tp=2"])
def test_a_split_model_on_a_device(cupy, dims, sequence_parallel):
    def body(mesh):
        tp = mesh.group("tp")
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)

        def made(xp):
            layers = split_layers("llama", tp=tp, sequence_parallel=sequence_parallel)
            count = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
            stages = [PipelineStage(number) for number in range(count)]
            for number, layer in enumerate(layers):
                stages[number * count // len(layers)].add_layer(layer)
            return mm.PipelineParallel(stages, 2, mesh=mesh, xp=xp, dtype=np.float64)

        on_host, on_device = made(np), made(cupy)
        x, target = tokens(0)
        expected = on_host.train_step(x, target, loss=loss)
        got = on_device.train_step(cupy.asarray(x), cupy.asarray(target), loss=loss)
        assert got == pytest.approx(expected, rel=1e-12)
        for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
            assert isinstance(one.grad, FakeArray)
            np.testing.assert_allclose(one.grad.on_host, other.grad, rtol=1e-9, atol=1e-13)
        assert on_device.clip_grad_norm(0.1) == pytest.approx(on_host.clip_grad_norm(0.1))
        on_device.load_state_dict(on_host.full_state_dict())
        state = on_device.full_state_dict()
        assert all(isinstance(values, np.ndarray) for values in state.values())

    on_ranks(dims, body)


def test_a_rank_that_fails_within_a_split_model_on_a_device(device):
    """Collectives that the others have started are made by all, from where their arrays are."""

    def body(mesh):
        def model(xp):
            tp, trap = mesh.group("tp"), Trap()
            stage = PipelineStage(0).add_layer(mm.parallel.ColumnParallelLinear(4, 6, group=tp))
            stage.add_layer(trap).add_layer(mm.parallel.RowParallelLinear(6, 4, group=tp))
            return trap, mm.PipelineParallel([stage], 2, mesh=mesh, xp=xp, dtype=np.float64)

        trap, on_device = model(device)
        x = np.random.default_rng(0).normal(size=(5, 4))
        given = device.asarray(x), device.asarray(-x)
        for kind, microbatch in (("F", 1), ("B", 0), ("B", 1)):
            if mesh.rank == 1:
                trap.arm(kind, microbatch)
            assert "boom" in str(error_of(lambda: on_device.train_step(*given, loss=nn.mse_loss)))
            trap.disarm()
        expected = model(np)[1].train_step(x, -x, loss=nn.mse_loss)
        assert on_device.train_step(*given, loss=nn.mse_loss) == pytest.approx(expected, rel=1e-12)

    on_ranks("tp=3", body)
