"""Batches from a file on real ranks, each reading its own rows."""

from __future__ import annotations

import os

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.data import Batches, shuffled
from mpimesh.errors import StageError
from mpimesh.parallel import DataParallel, PipelineParallel, PipelineStage
from tests.helpers.parallel_models import CLASSES, FEATURES, SEED, layers

ROWS = 29


def test_a_training_reads_a_file(comm, tmp_path):
    """The path is rank 0's, for all; the training is that of one process."""
    path = comm.bcast(os.fspath(tmp_path / "rows.bin"))
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES))
    target = np.random.default_rng(1).integers(0, CLASSES, ROWS)
    if comm.rank == 0:
        x.tofile(path)
    comm.barrier()
    alone = nn.Sequential(layers())
    alone.materialize(seed=SEED, dtype=np.float64)
    adam = optim.Adam(alone.parameters(), lr=0.01)
    expected = []
    for step in range(8):
        context = nn.Context(step=step)
        order = shuffled(np.arange(ROWS), ROWS, (5, step // 4))
        rows = order[step % 4 * 8 : step % 4 * 8 + 8]
        adam.zero_grad()
        value, gradient = nn.cross_entropy.value_and_grad(
            alone.forward(x[rows], context), target[rows], denominator=len(rows)
        )
        alone.backward(gradient, context)
        adam.step()
        expected.append(value)
    with mm.DeviceMesh(f"dp={comm.size}", comm) as mesh:
        model = DataParallel(
            nn.Sequential(layers()), mesh, loss=nn.cross_entropy, seed=SEED, dtype="float64"
        )
        adam = optim.Adam(model.parameters(), lr=0.01)
        source = (np.memmap(path, np.float64, "r", shape=x.shape), target)
        losses = []
        with Batches(source, mesh, 8, seed=5) as batches:
            losses += [model.train_step(*batch, optimizer=adam) for batch in batches]
            state = batches.state_dict()
        with Batches(source, mesh, 8, seed=5) as batches:
            batches.load_state_dict(state)
            losses += [model.train_step(*batch, optimizer=adam) for batch in batches]
        assert losses == pytest.approx(expected, rel=1e-10)
        model.check_replicas()


@pytest.mark.nprocs(2, 4)
@pytest.mark.limit(20)
@pytest.mark.parametrize("dims", ["dp=-1", "dp=1,pp=-1", "dp=2,pp=-1"])
def test_an_error_of_one_rank_s_reading_is_raised_on_all(comm, dims):
    """By the first batch, and by steps that take later ones; then training goes on."""
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES))
    target = np.random.default_rng(1).integers(0, CLASSES, ROWS)
    with mm.DeviceMesh(dims, comm) as mesh:
        stages = [
            PipelineStage(number) for number in range(mesh.dim_size("pp") if "pp" in dims else 1)
        ]
        for layer in layers():
            stages[0].add_layer(layer)
        model = PipelineParallel(stages, 1, mesh=mesh, seed=SEED, dtype="float64")
        broken = {"now": mesh.rank == comm.size - 1}

        def read(rows):
            if broken["now"]:
                raise OSError("the disk is gone")
            return x[rows], target[rows]

        with Batches(read, mesh, 8, rows=ROWS, prefetch=0, model=model) as batches:
            with pytest.raises(OSError, match="the disk is gone"):
                batches.next()
            assert batches.position == 0
            for number in range(6):
                broken["now"] = mesh.rank == comm.size - 1 and number in (1, 2, 4)
                batch = batches.next()
                if number in (1, 2, 4):
                    with pytest.raises(
                        StageError, match=f"rank {comm.size - 1}: OSError: the disk"
                    ):
                        model.train_step(*batch, loss=nn.cross_entropy)
                else:
                    model.train_step(*batch, loss=nn.cross_entropy)
            assert batches.position == 6
        model.check_replicas()
