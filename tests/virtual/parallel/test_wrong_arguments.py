"""Every public call of parallel models, with one wrong argument at a time, on all ranks alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim, parallel
from tests.helpers.depth import deep_but
from tests.helpers.parallel_models import on_ranks
from tests.helpers.wrong_arguments import Case, outcomes, uncovered

X = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4)
TARGET = np.array([0, 1, 2, 0])
OPTIONS: dict[str, Any] = {
    "seed": 0,
    "dtype": "float32",
    "grad_dtype": None,
    "xp": np,
    "bucket_bytes": 1000,
    "overlap": True,
    "broadcast": False,
    "tracer": None,
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))


def replicas(mesh: mm.DeviceMesh) -> mm.DataParallel:
    return mm.DataParallel(net(), mesh, loss=nn.cross_entropy)


def trained(mesh: mm.DeviceMesh) -> tuple[mm.DataParallel, mm.ParallelOptimizer]:
    model = replicas(mesh)
    optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    model.train_step(X, TARGET)
    return model, optimizer


def stages() -> list[mm.PipelineStage]:
    return [
        mm.PipelineStage(0).add_layer(nn.Linear(4, 3)),
        mm.PipelineStage(1).add_layer(nn.Linear(3, 3)),
    ]


def pipeline(mesh: mm.DeviceMesh) -> mm.PipelineParallel:
    return mm.PipelineParallel(stages(), 2, mesh=mesh)


def loaded(mesh: mm.DeviceMesh) -> Case:
    _, optimizer = trained(mesh)
    return optimizer.load_state_dict, {"state": optimizer.full_state_dict()}


STEP = {
    "x": X,
    "target": TARGET,
    "loss": nn.cross_entropy,
    "denominator": 4.0,
    "rows": "whole",
}

REPLICAS: dict[str, Any] = {
    "DataParallel": lambda mesh: (
        mm.DataParallel,
        {
            "module": net(),
            "mesh": mesh,
            "dim": "dp",
            "loss": nn.cross_entropy,
            "num_microbatches": 2,
            **OPTIONS,
        },
    ),
    "DataParallel.train_step": lambda mesh: (
        replicas(mesh).train_step,
        {**STEP, "optimizer": None},
    ),
    "DataParallel.evaluate": lambda mesh: (replicas(mesh).evaluate, STEP),
    "DataParallel.forward": lambda mesh: (replicas(mesh).forward, {"x": X}),
    "DataParallel.set_training": lambda mesh: (replicas(mesh).set_training, {"training": True}),
    "DataParallel.load_state_dict": lambda mesh: (
        replicas(mesh).load_state_dict,
        {"state": net_state()},
    ),
    "DataParallel.clip_grad_norm": lambda mesh: (
        trained(mesh)[0].clip_grad_norm,
        {"max_norm": 1.0},
    ),
    "ParallelOptimizer": lambda mesh: given_optimizer(mesh),
    "ParallelOptimizer.clip_grad_norm": lambda mesh: (
        trained(mesh)[1].clip_grad_norm,
        {"max_norm": 1.0},
    ),
    "ParallelOptimizer.load_state_dict": loaded,
    "fully_shard": lambda mesh: (
        mm.fully_shard,
        {"model": ready(), "mesh": mesh, "dim": "dp", "stage": 3},
    ),
    "GradientBuckets": lambda mesh: (
        parallel.GradientBuckets,
        {
            "parameters": ready().parameters(),
            "group": mesh.group("dp"),
            "mesh": mesh,
            "bucket_bytes": 1000,
            "op": "sum",
            "names": None,
            "overlap": True,
            "groups": None,
            "plan": None,
            "grad_dtype": None,
        },
    ),
    "clip_grad_norm": lambda mesh: (
        parallel.clip_grad_norm,
        {
            "parameters": ready().parameters(),
            "max_norm": 1.0,
            "group": mesh.group("dp"),
            "copies": (),
        },
    ),
    "measure_layers": lambda mesh: (
        parallel.measure_layers,
        {
            "layers": net(),
            "x": X,
            "mesh": mesh,
            "dim": "pp",
            "dtype": "float32",
            "xp": np,
            "bytes_per_s": 1e9,
            "latency_s": 1e-6,
            "repeats": 1,
        },
    ),
}


def net_state() -> dict[str, Any]:
    return ready().state_dict()


def ready() -> nn.Sequential:
    made = net()
    made.materialize(seed=0)
    return made


def given_optimizer(mesh: mm.DeviceMesh) -> Case:
    model = replicas(mesh)
    return mm.ParallelOptimizer, {
        "optimizer": optim.SGD(model.parameters(), lr=0.1),
        "model": model,
        "zero": 1,
        "scaler": None,
        "group": None,
    }


PIPELINES: dict[str, Any] = {
    "PipelineParallel": lambda mesh: (
        mm.PipelineParallel,
        {
            "stages": stages(),
            "num_microbatches": 2,
            "mesh": mesh,
            "dim": "pp",
            "data_dim": "dp",
            "loss": nn.cross_entropy,
            "schedule": "1f1b",
            **OPTIONS,
        },
    ),
    "PipelineParallel.evaluate": lambda mesh: (pipeline(mesh).evaluate, STEP),
    "PipelineParallel.forward": lambda mesh: (pipeline(mesh).forward, {"x": X}),
    "PipelineParallel.train_step": lambda mesh: (
        pipeline(mesh).train_step,
        {**STEP, "inputs": None, "optimizer": None},
    ),
    "PipelineParallel.partition": lambda mesh: (
        mm.PipelineParallel.partition,
        {"layers": net(), "num_stages": 2, "mesh": mesh, "dim": "pp", "times": [1, 1, 1]},
    ),
    "PipelineParallel.stage": lambda mesh: (pipeline(mesh).stage, {"number": 1}),
    "PipelineParallel.schedule": lambda mesh: (
        pipeline(mesh).schedule,
        {"num_microbatches": 2, "training": True},
    ),
}

ALONE: dict[str, Any] = {
    "PipelineStage": lambda: (
        mm.PipelineStage,
        {"stage_id": 2, "inputs": ("mask",), "skips": (0,)},
    ),
    "PipelineStage.add_layer": lambda: (mm.PipelineStage(0).add_layer, {"layer": nn.ReLU()}),
    "Microbatches": lambda: (mm.Microbatches, {"parts": [X]}),
    "microbatch_rows": lambda: (parallel.microbatch_rows, {"rows": 5, "num_microbatches": 2}),
    "replica_rows": lambda: (parallel.replica_rows, {"rows": 5, "parts": 2, "part": 1}),
    "split_microbatches": lambda: (parallel.split_microbatches, {"x": X, "num_microbatches": 2}),
    "gpt_layers": lambda: (
        parallel.gpt_layers,
        {
            "vocab_size": 5,
            "features": 4,
            "num_layers": 1,
            "num_heads": 2,
            "max_tokens": 3,
            "num_kv_heads": 1,
            "hidden": 8,
            "norm": "rms",
            "mlp": "gelu",
            "rotary": True,
            "bias": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "tied": True,
            "tp": None,
            "sequence_parallel": False,
            "tokens": None,
        },
    ),
}

LEFT_OUT = {
    "MetricsCallback",
    "TrainingMetrics",  # test_metrics.py
    "TrainingMetrics.step",
    # Results, and layers and what they say to each other: see test_tensor_failures.py.
    "Bucket",
    "BucketTuning",
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelFeedForward",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "SequenceSplit",
    "StepReport",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "sum_shared_gradients",
    "tensor_parallel",
    # What models and gradients do by themselves.
    *(
        f"GradientBuckets.{name}"
        for name in [
            "agree_on_closed",
            "begin",
            "submit",
            "complete",
            "synchronize",
            "cancel",
            "divide",
            "tuned_plan",
        ]
    ),
    # Its argument has no effect.
    "ParallelOptimizer.zero_grad",
    # See test_accumulation.py.
    "Accumulation",
    "Accumulation.flush",
    "Accumulation.train_step",
    "reduce_gradients",
    # Writes a file.
    "DataParallel.step_picture",
    "PipelineParallel.step_picture",
}

# What messages may name instead: the thing that does not fit.
ALSO = {
    "module": "layer",
    "model": "layer",
    "parts": "Microbatches",
    "x": "rows|microbatch",
    "part": "parts",
    "op": "reduction",
}
ALSO |= {"stages": "stage|PipelineStage", "rows": "rows", "times": "layers|both", "layers": "layer"}


def check(make: Any, *given: Any) -> str:
    with np.errstate(all="ignore"):
        found = list(outcomes(lambda: make(*given), also=ALSO))
    return "\n".join(found)


@pytest.mark.parametrize("name", ALONE)
def test_local_calls(name):
    found = check(ALONE[name])
    assert not found, "\n" + found


@pytest.mark.parametrize(
    "name", deep_but(REPLICAS, "DataParallel", "DataParallel.train_step", "fully_shard")
)
def test_calls_of_replicas(name):
    found = on_ranks("dp=2", lambda mesh: check(REPLICAS[name], mesh))
    assert not found[0], "\n" + found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", PIPELINES)
def test_calls_of_pipelines(name):
    found = on_ranks("pp=2", lambda mesh: check(PIPELINES[name], mesh))
    assert not found[0], "\n" + found[0]
    assert found[0] == found[1]


def test_every_public_call_is_tried():
    assert uncovered(parallel, {**ALONE, **REPLICAS, **PIPELINES}, LEFT_OUT) == []
