"""Pipelines over real MPI, against the unsplit model; what virtual ranks prove, here again."""

from __future__ import annotations

import gc
import time
from functools import partial

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, StageError, StageShapeError
from mpimesh.parallel import links
from mpimesh.schedule import schedule_names, stages_per_rank
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    CLASSES,
    SEED,
    assert_equal,
    assert_same,
    batch,
    cut,
    layers,
    make_pipeline,
    state_of,
    train_alone,
    train_both_ways,
    train_on,
)
from tests.helpers.parallel_traps import (
    Reshaped,
    Trap,
    assert_nothing_left,
    error_of,
    trapped_stages,
)
from tests.helpers.raises import names

MESHES = {1: ["dp=1"], 2: ["dp=2", "pp=2"], 3: ["pp=3"], 4: ["dp=4", "pp=4", "dp=2,pp=2"]}
MESHES[8] = ["dp=2,pp=4"]


def meshes(comm):
    return MESHES.get(comm.size, [f"dp={comm.size}"])


def cut_mesh(comm):
    """The mesh of this world that has both dims, if it can."""
    return meshes(comm)[-1]


@pytest.fixture(params=["messages", "lent"], autouse=True)
def edges(request, monkeypatch):
    """All arrays between stages as messages, and all read in place where a node allows it."""
    monkeypatch.setattr(links, "LENDS", request.param == "lent")
    return request.param


@pytest.mark.parametrize("schedule", ["1f1b", *deep("gpipe")])
@pytest.mark.parametrize("rows", [*deep(32), 13, 1])
def test_every_mesh_trains_the_same(comm, schedule, rows):
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            assert_same(train_on(mesh, 3, rows, schedule=schedule), train_alone(3, rows))


def test_large_activations_and_many_microbatches(comm):
    """Messages that no MPI buffers, in numbers that would fill any buffer of small ones."""

    def made():
        return [nn.Linear(6, 900), nn.ReLU(), nn.Linear(900, 700), nn.Linear(700, CLASSES)]

    alone = nn.Sequential(made())
    alone.materialize(seed=SEED, dtype=np.float64)
    x, target = batch(0, 64)
    expected = alone.forward(x)
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        for count in (2, 64):
            pipe = make_pipeline(mesh, count, stages=cut(num_stages, made()))
            loss = pipe.train_step(x, target, loss=nn.cross_entropy)
            assert loss == pytest.approx(nn.cross_entropy(expected, target), rel=1e-12)
            y = pipe.forward(x, everywhere=True)
            np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [0, *deep(1), 7, *deep(24)])
def test_forward_everywhere(comm, rows):
    alone = nn.Sequential(layers())
    alone.materialize(seed=SEED, dtype=np.float64)
    x = batch(5, rows)[0]
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            y = make_pipeline(mesh).forward(x, everywhere=True)
            assert y.shape == (rows, CLASSES)
            np.testing.assert_allclose(y, alone.forward(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [13, *deep(1)])
def test_the_optimizer_inside_a_step_gives_the_same_bits(comm, rows):
    for dims in meshes(comm):
        with mm.DeviceMesh(dims, comm) as mesh:
            train_both_ways(mesh, rows)


@pytest.mark.nprocs(2, 4)
def test_a_failure_leaves_the_parameters_to_the_optimizer_inside(comm):
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        stages, traps = trapped_stages(mesh.dim_size("pp"))
        pipe = make_pipeline(mesh, stages=stages)
        optimizer = optim.SGD(pipe.parameters(), lr=0.1)
        train = partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        train()
        before = state_of(pipe)
        if comm.rank == comm.size - 1:
            traps[mesh.coord("pp")].arm("B", 3)
        assert "boom" in str(error_of(train))
        assert_equal(state_of(pipe), before)
        assert_nothing_left(mesh)
        for trap in traps:
            trap.disarm()
        train()
        pipe.check_replicas()


@pytest.mark.nprocs(2, 3, 4, 8)
def test_ranks_need_only_what_they_use(comm):
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        pipe = make_pipeline(mesh)
        stage, last = mesh.coord("pp"), mesh.dim_size("pp") - 1
        for step in range(3):
            x, target = batch(0, 13 + step)
            pipe.step = 0
            loss = pipe.train_step(
                x if stage == 0 else None,
                target if stage == last else None,
                loss=nn.cross_entropy,
            )
            assert loss == pytest.approx(train_alone(1, 13 + step).losses[0], rel=1e-12)


@pytest.mark.nprocs(2, 3, 4, 8)
@pytest.mark.parametrize("schedule", ["1f1b", *deep("gpipe")])
@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("microbatch", [*deep(0), 3])
def test_a_stage_that_raises(comm, schedule, kind, microbatch):
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        num_stages = mesh.dim_size("pp")
        stages, traps = trapped_stages(num_stages)
        pipe = make_pipeline(mesh, stages=stages, schedule=schedule)
        last_replica = mesh.dim_size("dp") - 1 if mesh.contains_dim("dp") else 0
        on_this_replica = not mesh.contains_dim("dp") or mesh.coord("dp") == last_replica
        for stage in range(num_stages):
            if on_this_replica:
                traps[stage].arm(kind, microbatch)
            start_s = time.perf_counter()
            error = error_of(partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy))
            assert time.perf_counter() - start_s < 5
            assert type(error) is StageError
            rank = last_replica * num_stages + stage
            where = (f"stage {stage}", f"rank {rank}", f"microbatch {microbatch}")
            names(str(error), *where, f"{stage}{kind}{microbatch}", "ValueError", "boom")
            assert_nothing_left(mesh)
            traps[stage].disarm()
            loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            pipe.step = 0
            if stage == 0:
                assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)
        pipe.check_replicas()


@pytest.mark.nprocs(2, 4)
def test_a_failure_with_large_messages_under_way(comm):
    """Sends that wait for their receives are met by receives that nobody needs any more."""
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        trap = Trap()
        wide = [nn.Linear(6, 20000), *[nn.ReLU() for _ in range(comm.size)], trap]
        pipe = make_pipeline(mesh, 8, stages=cut(comm.size, wide))
        x, target = batch(0, 32)[0], np.zeros((32, 20000))
        for _ in range(3):
            trap.arm("F", 0)
            error = error_of(partial(pipe.train_step, x, target, loss=nn.mse_loss))
            names(str(error), "boom")
            assert_nothing_left(mesh)
            trap.disarm()
        assert pipe.train_step(x, target, loss=nn.mse_loss) > 0


@pytest.mark.nprocs(2, 3, 4, 8)
def test_an_output_of_another_shape(comm):
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        odd = Reshaped(lambda x: x)
        stages = cut(mesh.dim_size("pp"))
        stages[0].add_layer(odd)
        pipe = make_pipeline(mesh, stages=stages)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        odd.change = lambda x: np.concatenate([x, x], axis=1)
        error = error_of(partial(pipe.train_step, *batch(1, 16), loss=nn.cross_entropy))
        assert type(error) is StageShapeError
        names(str(error), "stage 0", "stage 1", "shape")
        odd.change = lambda x: x
        assert_nothing_left(mesh)
        pipe.step = 0
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)


@pytest.mark.nprocs(2, 3, 4)
def test_batches_of_different_sizes(comm):
    with mm.DeviceMesh(cut_mesh(comm), comm) as mesh:
        pipe = make_pipeline(mesh)
        rows = 16 if mesh.rank else 9
        error = error_of(partial(pipe.train_step, *batch(0, rows), loss=nn.cross_entropy))
        assert type(error) is MismatchError
        names(str(error), "ranks [0]: 9")
        assert_nothing_left(mesh)
        loss = pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert loss == pytest.approx(train_alone(1, 16).losses[0], rel=1e-12)


def lends(mesh, edges):
    return edges == "lent" and mesh.group("pp").communicator.lending is not None


def lent(mesh):
    """The number of arrays of this rank that others still read."""
    gc.collect()  # an error's traceback goes round in a circle with its frames
    mesh.barrier()
    lending = mesh.group("pp").communicator.lending
    return 0 if lending is None else lending.num_lent


@pytest.mark.nprocs(2, 3, 4)
def test_what_was_lent_comes_back(comm, edges):
    """After every step, be it a failed one, and the slots are used again."""
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        stages, traps = trapped_stages(comm.size)
        pipe = make_pipeline(mesh, stages=stages)
        for step in range(20):
            if step % 2:
                traps[step % comm.size].arm("FB"[step // 2 % 2], step % 4)
                error_of(partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy))
                traps[step % comm.size].disarm()
                traps[step % comm.size].error = ValueError()  # the one raised has its frames
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            assert lent(mesh) == 0
        # Each microbatch in both directions, what is posted ahead, and as much that the frames of
        # an error hold.
        assert pipe._engine.pool.nbytes <= 2 * (2 * 4 + 2 * 2) * 256
        assert (mesh.group().communicator.lending is not None) or edges == "messages"


class Seen(nn.Module):
    """The identity, which keeps what it saw."""

    num_layers = 0

    def __init__(self):
        self.inputs = []

    def forward(self, x, ctx=None):
        self.inputs.append(x)
        return x

    def backward_input(self, dy, ctx):
        return dy


@pytest.mark.nprocs(2, 3, 4)
def test_a_layer_may_keep_what_it_got(comm, edges):
    """Arrays in use are not written over by later steps, nor after the mesh's end."""
    seen = Seen()
    stages = cut(comm.size)
    stages[-1] = mm.PipelineStage(comm.size - 1).add_layer(seen)
    for layer in cut(comm.size)[-1].layers:
        stages[-1].add_layer(layer)
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        pipe = make_pipeline(mesh, stages=stages)
        for step in range(4):
            pipe.train_step(*batch(step, 16), loss=nn.cross_entropy)
            if step == 0:
                kept = [np.array(x) for x in seen.inputs]
        again = make_pipeline(mesh)
        again.train_step(*batch(9, 16), loss=nn.cross_entropy)
        for x in seen.inputs:
            assert not x.flags.writeable or edges == "messages"
    with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
        make_pipeline(mesh).train_step(*batch(5, 16), loss=nn.cross_entropy)
    for got, was in zip(seen.inputs, kept, strict=False):
        np.testing.assert_array_equal(got, was)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "forward"])
def test_both_kinds_of_edges_give_the_same_bits(comm, monkeypatch, schedule):
    def trained(lends):
        monkeypatch.setattr(links, "LENDS", lends)
        with mm.DeviceMesh(f"pp={comm.size}", comm) as mesh:
            stages = cut(stages_per_rank(schedule) * comm.size)
            pipe = make_pipeline(mesh, stages=stages, schedule=schedule)
            losses = [pipe.train_step(*batch(s, 13), loss=nn.cross_entropy) for s in range(2)]
            return losses, [np.array(parameter.grad) for parameter in pipe.parameters()]

    (losses, gradients), (others, other_gradients) = trained(True), trained(False)
    assert losses == others
    for one, other in zip(gradients, other_gradients, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.nprocs(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_receives_are_posted_as_far_ahead_as_they_can_serve(comm, edges, monkeypatch, schedule):
    """A receive takes a slot, so there are two; what is lent is not received at all."""
    posted = []

    def counted(self, *arguments):
        posted.append(arguments)
        return irecv(self, *arguments)

    with mm.DeviceMesh("pp=2", comm) as mesh:
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, 8, stages=stages, schedule=schedule)
        x, target = batch(0, 16)
        pipe.train_step(x, target, loss=nn.cross_entropy)  # which announces the interface
        irecv = links.Links.irecv
        monkeypatch.setattr(links.Links, "irecv", counted)
        traps[1].arm("F", 0)
        error_of(partial(pipe.train_step, x, target, loss=nn.cross_entropy))
        if mesh.rank == 1:
            # The first was received, and another posted in its place if there was one left.
            assert len(posted) == (0 if lends(mesh, edges) else 3)
