"""A stage that raises ends the step on all ranks alike, wherever it stood, and leaves nothing."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.arguments import rank_names
from mpimesh.errors import ShapeError, StageError
from tests.helpers.depth import deep
from tests.helpers.parallel_models import (
    batch,
    make_pipeline,
    on_ranks,
    train_alone,
)
from tests.helpers.parallel_traps import assert_nothing_left, error_of, trapped_stages
from tests.helpers.raises import names


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("microbatch", [0, *deep(1, 2), 3])
@pytest.mark.parametrize("stage", [0, *deep(1), 2])
@pytest.mark.parametrize("replicas", [(1,), *deep(((0, 1),))])
def test_wherever_it_fails(schedule, kind, microbatch, stage, replicas):
    """In the first step, which announces interfaces and counts gradients, and in a later one."""
    expected = train_alone(1, 16).losses[0]

    def body(mesh):
        stages, traps = trapped_stages(3)
        pipe = make_pipeline(mesh, stages=stages, schedule=schedule)
        losses = []
        for step in range(3):
            if step in (0, 2):
                if mesh.coord("dp") in replicas:
                    traps[stage].arm(kind, microbatch)
                start_s = time.perf_counter()
                error = error_of(partial(pipe.train_step, *batch(step, 16), loss=nn.cross_entropy))
                assert time.perf_counter() - start_s < 5
                assert type(error) is StageError
                assert error.agreed
                # Of two that fail alike, the first may have ended the step before the other.
                headline = str(error).splitlines()[0]
                action = f"{stage}{kind}{microbatch}"
                names(headline, f"stage {stage}", f"microbatch {microbatch}", action, "boom")
                ranks = [f"rank {3 * replica + stage} " for replica in replicas]
                assert any(rank in headline for rank in ranks), headline
                assert "raise self.error" in str(error)
                if len(replicas) == 1:
                    failed_here = mesh.coord("dp") in replicas and mesh.coord("pp") == stage
                    assert isinstance(error.__context__, ValueError) == failed_here
                    shown = "".join(traceback.format_exception(error))
                    assert shown.count("raise self.error") == 1  # in the text, not as a cause
                    assert str(error).count("  File ") == 2  # the layer's two functions
                assert not any(p.grad is not None and p.grad.any() for p in pipe.parameters())
                assert_nothing_left(mesh)
                traps[stage].disarm()
            losses.append(pipe.train_step(*batch(step, 16), loss=nn.cross_entropy))
            pipe.clip_grad_norm(1.0)
        pipe.check_replicas()
        return str(error), losses

    results = on_ranks("dp=2,pp=3", body, rendezvous=bool(microbatch))
    assert len({text for text, _ in results}) == 1
    for _, losses in results:
        assert losses[0] == pytest.approx(expected, rel=1e-12)
        assert losses == results[0][1]


def test_a_failed_step_does_not_count():
    """With the step made again, the whole training is that of a run without a failure."""

    def run(mesh, *, fail):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        losses = []
        for step in range(4):
            if fail and step == 2:
                traps[1].arm("B", 1)
                error_of(partial(pipe.train_step, *batch(step, 13), loss=nn.cross_entropy))
                traps[1].disarm()
            losses.append(pipe.train_step(*batch(step, 13), loss=nn.cross_entropy))
            for parameter in pipe.parameters():
                parameter.data -= 0.1 * parameter.grad
        return losses, [parameter.data for parameter in pipe.parameters()]

    def body(mesh):
        with_failure, without = run(mesh, fail=True), run(mesh, fail=False)
        assert with_failure[0] == without[0]
        for one, other in zip(with_failure[1], without[1], strict=True):
            assert np.array_equal(one, other)

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("rendezvous", [False, True])
def test_two_ranks_fail_at_once_with_different_errors(rendezvous):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        if mesh.rank == 0:
            traps[0].arm("F", 1, ValueError("here"))
        if mesh.rank == 2:
            traps[0].arm("F", 1, KeyError("there"))
        error = error_of(lambda: pipe.train_step(*batch(0, 16), loss=nn.cross_entropy))
        assert_nothing_left(mesh)
        traps[0].disarm()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        return str(error)

    texts = on_ranks("dp=2,pp=2", body, rendezvous=rendezvous)
    assert len(set(texts)) == 1
    # One may have ended the step before the other got there.
    sentence = texts[0].splitlines()[0]
    told = ("rank 0", "ValueError: here") if "here" in sentence.split() else ("rank 2", "'there'")
    names(sentence, "stage 0", "0F1", "microbatch 1", *told)


@pytest.mark.parametrize("everywhere", [False, True])
def test_inference_fails_as_well(everywhere):
    def body(mesh):
        stages, traps = trapped_stages(3)
        pipe = make_pipeline(mesh, stages=stages)
        x = batch(0, 16)[0]
        expected = pipe.forward(x, everywhere=True)
        traps[1].arm("F", 2)
        error = error_of(lambda: pipe.forward(x, everywhere=everywhere))
        names(str(error).splitlines()[0], "1F2", "microbatch 2", "ValueError: boom")
        assert_nothing_left(mesh)
        traps[1].disarm()
        assert np.array_equal(pipe.forward(x, everywhere=True), expected)

    on_ranks("dp=2,pp=3", body)


def test_a_failure_while_accumulating_drops_what_was_added():
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        for _ in range(2):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with pipe.no_sync():
            pipe.train_step(*batch(1, 16), loss=nn.cross_entropy)
            traps[1].arm("B", 0)
            error_of(lambda: pipe.train_step(*batch(2, 16), loss=nn.cross_entropy))
            traps[1].disarm()
        assert not any(p.grad is not None and p.grad.any() for p in pipe.parameters())
        pipe.step = 0
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        expected = [parameter.grad.copy() for parameter in pipe.parameters()]
        pipe.step = 0
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
            assert np.array_equal(parameter.grad, gradient)

    on_ranks("dp=2,pp=2", body)


def test_a_loss_that_raises_names_the_last_stage():
    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        target[9] = 99
        error = error_of(lambda: pipe.train_step(x, target, loss=nn.cross_entropy))
        # Row 9 is row 1 of the second replica.
        names(str(error), "stage 1", "rank 3", "forward", "microbatch 0", "1F0", "ModuleError", 99)

    on_ranks("dp=2,pp=2", body)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UnprintableError(), "UnprintableError: its text could not be made: RuntimeError"),
        (ValueError("x" * 100_000), "ValueError: " + "x" * 2000 + "\n"),
        (ValueError("\udcff\N{SNOWMAN}"), "ValueError: \udcff\N{SNOWMAN}"),
        (StopIteration("early"), "StopIteration: early"),
        (MemoryError(), "MemoryError: "),
    ],
)
def test_any_exception_can_be_told(error, text):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        traps[0].arm("F", 0, error)
        raised = error_of(partial(pipe.train_step, *batch(0, 8), loss=nn.cross_entropy))
        assert type(raised) is StageError
        assert text in str(raised)

    on_ranks("pp=2", body)


def test_a_failure_of_a_whole_stage_names_no_microbatch():
    """Such as a transport that cannot start the sums of its gradients."""

    def body(mesh):
        stages, _ = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)

        refusing = patch.object(pipe.buckets, "complete", side_effect=ValueError("no way"))
        with refusing if mesh.rank == 1 else nullcontext():
            error = error_of(partial(pipe.train_step, *batch(0, 16), loss=nn.cross_entropy))
        assert type(error) is StageError
        headline = str(error).splitlines()[0]
        names(headline, "stage 1", "rank 1", "1REDUCE_GRAD", "ValueError", "no way")
        assert "microbatch" not in headline
        assert_nothing_left(mesh)

    on_ranks("dp=2,pp=2", body)


def test_what_several_ranks_found_is_told_once():
    """Each rank had a line with the same sentence, and its number twice in it."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        odd = mesh.rank == 3
        return error_of(
            lambda: pipe.train_step(
                None if odd else x, None if not odd else target, loss=nn.cross_entropy
            )
        )

    for error in on_ranks("dp=4", body):
        assert type(error) is ShapeError
        first, same, also = str(error).splitlines()
        names(first, "rank 0", "target")
        assert rank_names([1, 2]) in same
        names(also, "rank 3", " x")
        # The class is that of the error.
        assert "ShapeError" not in str(error)


def test_a_layer_that_talks_over_the_mesh_shows_what_it_raised_first():
    """The others wait in the layer, and what ends that is no error of theirs."""

    def program():
        with mm.DeviceMesh("dp=3") as mesh:

            class Talks(nn.Module):
                def forward(self, x, ctx=None):
                    if mesh.rank == 1:
                        raise OSError("the cause")
                    return x - mesh.group().all_reduce(x.mean(), "mean").resolve()

                def backward(self, dy, ctx):
                    return dy

            model = mm.DataParallel(Talks(), mesh, loss=nn.mse_loss)
            model.train_step(np.ones((6, 2)), np.ones((6, 2)))

    with pytest.raises(mm.MpimeshError) as raised:
        mm.run_virtual(3, program)
    assert "the cause" in "".join(traceback.format_exception(raised.value))
