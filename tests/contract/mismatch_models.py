"""The ways in which replicas come to differ: batches, optimizers, weights and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn, optim
from tests.contract.mismatch_cases import Case

__all__ = ["MODELS"]

_BATCH = np.random.default_rng(0).normal(size=(8, 4))
_TARGET = np.arange(8) % 2


def _net(width: int = 3) -> Any:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def _model(mesh: Any, **options: Any) -> Any:
    options = {"loss": nn.cross_entropy, "dtype": "float64", **options}
    return mm.DataParallel(options.pop("net", None) or _net(), mesh, **options)


def _train(
    mesh: Any,
    *,
    steps: int = 2,
    optimizer: Any = None,
    before: Any = None,
    between: Any = None,
    **options: Any,
) -> None:
    """Take some steps of an optimizer, with something done before and between them."""
    model = _model(mesh, **options)
    made = optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    if before is not None:
        before(model)
    for _ in range(steps):
        model.train_step(_BATCH, _TARGET)
        if between is not None:
            between(model)
        made.step()


def _step(mesh: Any, x: Any = _BATCH, target: Any = _TARGET, **options: Any) -> None:
    _model(mesh).train_step(x, target, **options)


def _set_weight(model: Any, value: float) -> None:
    model.parameters()[0].data[...] = value


def _load(model: Any, factor: float) -> None:
    model.load_state_dict({k: v * factor for k, v in model.full_state_dict().items()})


def _freeze(model: Any, odd: bool) -> None:
    model.parameters()[0].requires_grad = not odd
    model.rebuild_buckets()


def _resume(mesh: Any, odd: bool) -> None:
    def loaded(model: Any) -> Any:
        adam = optim.Adam(model.parameters(), lr=0.1)
        model.train_step(_BATCH, _TARGET, optimizer=adam)
        state = adam.state_dict()
        state["params"] = [
            {k: v * (2 if odd and k == "mean" else 1) for k, v in one.items()}
            for one in state["params"]
        ]
        adam.load_state_dict(state)
        return adam

    _train(mesh, optimizer=loaded)


def _given(mesh: Any, optimizer: Callable[[Any], Any]) -> None:
    """The optimizer is given to the step."""
    model = _model(mesh)
    model.train_step(_BATCH, _TARGET, optimizer=optimizer(model))


def _left_out(mesh: Any, odd: bool) -> None:
    model = _model(mesh)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train_step(_BATCH, _TARGET)
        if not odd:
            sgd.step()


def _last_step(mesh: Any, odd: bool) -> None:
    """Nothing compares after it."""
    model = _model(mesh)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    model.train_step(_BATCH, _TARGET)
    sgd.lr = 0.2 if odd else 0.1
    sgd.step()


def _no_sync(mesh: Any, odd: bool) -> None:
    model = _model(mesh)
    if odd:
        with model.no_sync():
            model.train_step(_BATCH, _TARGET)
    else:
        model.train_step(_BATCH, _TARGET)


def _sgd(odd: bool, **options: Any) -> Callable[[Any], Any]:
    return lambda model: optim.SGD(model.parameters(), **{"lr": 0.1, **(options if odd else {})})


def _pipe(mesh: Any, **options: Any) -> Any:
    stages = [mm.PipelineStage(i).add_layer(nn.Linear(4, 4)) for i in range(mesh.size)]
    options = {"num_microbatches": 2, "dim": "dp", "dtype": "float64", **options}
    return mm.PipelineParallel(stages, mesh=mesh, **options)


def _pipeline(mesh: Any, odd: bool, **options: Any) -> None:
    pipe = _pipe(mesh, **(options if odd else {}))
    pipe.train_step(_BATCH, _BATCH, loss=nn.mse_loss)


def _talking(mesh: Any, odd: bool) -> None:
    """A layer calls a collective over another mesh, and the next stage waits for its result."""
    other = mm.DeviceMesh("other=-1")

    class Talking(nn.Linear):
        def forward(self, x: Any, ctx: Any = None) -> Any:
            other.group().all_reduce(np.ones(2)).resolve()
            return super().forward(x, ctx)

    layers = [Talking(4, 4), *(nn.Linear(4, 4) for _ in range(1, mesh.size))]
    stages = [mm.PipelineStage(i).add_layer(layer) for i, layer in enumerate(layers)]
    pipe = mm.PipelineParallel(stages, 2, mesh=mesh, dim="dp", data_dim=None)
    pipe.train_step(_BATCH, _BATCH, loss=nn.mse_loss)


def _steps(
    mesh: Any,
    *,
    optimizer: Any = None,
    change: Any = None,
    late: int = -1,
    number: int = 3,
    given: bool = False,
    **options: Any,
) -> None:
    """Train a pipeline; `change` is done to model and optimizer before a later step."""
    pipe = _pipe(mesh)
    made = (optimizer or _sgd(False))(pipe)
    for place in range(number):
        if place == 1 and change is not None:
            change(pipe, made)
        if given:
            options["optimizer"] = made
        pipe.train_step(_BATCH, _BATCH, loss=nn.mse_loss, **options)
        if not given and place != late:
            made.step()


def _set_lr(odd: bool) -> Callable[[Any, Any], None]:
    return lambda pipe, made: setattr(made, "lr", 0.2 if odd else 0.1)


def _load_pipe(factor: float) -> Callable[[Any, Any], None]:
    def change(pipe: Any, made: Any) -> None:
        state = {name: factor * np.ones_like(x) for name, x in pipe.full_state_dict().items()}
        pipe.load_state_dict(state)

    return change


class _Scaled(nn.ReLU):
    """A layer of one's own with a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor


class _Hidden(nn.ReLU):
    """The same, by another name of the attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor


def _layer(name: str, make: Callable[[bool], Any], said: str) -> Case:
    def body(mesh: Any, odd: bool) -> None:
        _model(mesh, net=make(odd), loss=nn.mse_loss)

    return Case(f"layer: {name}", body, said=said)


_LAYERS = [
    _layer("p of a dropout", lambda odd: nn.Dropout(0.9 if odd else 0.1), "p=0.9"),
    _layer("eps", lambda odd: nn.LayerNorm(6, eps=0.5 if odd else 1e-5), "eps=0.5"),
    _layer("kind of a GELU", lambda odd: nn.GELU(approximate="tanh" if odd else "none"), "tanh"),
    _layer("heads", lambda odd: nn.Attention(8, 4 if odd else 2), "=4"),
    _layer("causal", lambda odd: nn.Attention(8, 2, causal=odd), "causal"),
    _layer(
        "base of a rotary embedding",
        lambda odd: nn.Attention(
            8, 2, rotary=nn.RotaryEmbedding(4, base=100.0 if odd else 10000.0)
        ),
        "base=100.0",
    ),
    _layer(
        "a layer within another",
        lambda odd: nn.Checkpoint(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 * odd))),
        "p=0.5",
    ),
    _layer("a number of one's own", lambda odd: _Scaled(1.0 + odd), "factor=2.0"),
    _layer("a number that is not public", lambda odd: _Hidden(1.0 + odd), "factor=2.0"),
    Case(
        "layer: an option of another stage",
        lambda m, odd: mm.PipelineParallel(
            [mm.PipelineStage(i).add_layer(nn.Dropout(0.5 * odd)) for i in range(m.size)],
            2,
            mesh=m,
            dim="dp",
        ),
        said="p=0.5",
    ),
    Case(
        "layer: an option of a loss",
        lambda m, odd: _step(m, loss=nn.CrossEntropy(ignore_index=1 if odd else -1)),
        said="ignore_index",
    ),
]


def _read(mesh: Any, odd: bool, *, more: int = 0, other: bool = False, pipe: bool = False) -> None:
    """Train by batches, of which the odd rank has read some more, or by other ones."""
    model = _pipe(mesh, loss=nn.mse_loss) if pipe else _model(mesh, loss=nn.mse_loss, net=_net())
    wanted = (_BATCH, _BATCH if pipe else np.ones((8, 2)))
    options = {"model": model} if pipe else {}
    both = [mm.data.Batches(wanted, mesh, 4, prefetch=0, **options) for _ in range(2)]
    for _ in range(more if odd else 0):
        both[0].next()
    for _ in range(2):
        model.train_step(*both[int(odd and other)].next())


_STAGES = [
    Case("stages: lr", lambda m, odd: _steps(m, optimizer=_sgd(odd, lr=5.0)), said="lr=5.0"),
    Case(
        "stages: lr, given to the step",
        lambda m, odd: _steps(m, optimizer=_sgd(odd, lr=5.0), given=True),
        said="lr=5.0",
    ),
    Case("stages: lr, set later", lambda m, odd: _steps(m, change=_set_lr(odd)), said="lr=0.2"),
    Case(
        "stages: lr of a ParallelOptimizer",
        lambda m, odd: _steps(
            m, optimizer=lambda pipe: mm.ParallelOptimizer(_sgd(odd, lr=5.0)(pipe), pipe)
        ),
        said="lr=5.0",
    ),
    Case("stages: momentum", lambda m, odd: _steps(m, optimizer=_sgd(odd, momentum=0.9))),
    Case(
        "stages: optimizer",
        lambda m, odd: _steps(
            m, optimizer=lambda pipe: (optim.Adam if odd else optim.SGD)(pipe.parameters(), lr=0.1)
        ),
        said="Adam",
    ),
    Case("stages: a step left out", lambda m, odd: _steps(m, late=1 if odd else -1), said="step"),
    Case(
        "stages: denominator",
        lambda m, odd: _steps(m, denominator=1.0 if odd else 8.0),
        said="8.0",
    ),
    Case(
        "stages: a loaded state",
        lambda m, odd: _steps(m, change=_load_pipe(1.0 + odd)),
        said="loaded",
    ),
    Case("stages: steps", lambda m, odd: _steps(m, number=2 if odd else 3)),
    Case("stages: batches out of step", lambda m, odd: _read(m, odd, more=1, pipe=True)),
    Case("batches: out of step", lambda m, odd: _read(m, odd, more=1), said="batch 1 of Batches"),
    Case("batches: of another loader", lambda m, odd: _read(m, odd, other=True), said="number 2"),
]


def _own_rows(mesh: Any, odd: bool) -> None:
    rows = slice(mesh.rank * 4, mesh.rank * 4 + 4)
    _step(mesh, np.tile(_BATCH, (4, 1))[rows] + mesh.rank, np.tile(_TARGET, 4)[rows])


MODELS = [
    Case("model: rows", lambda m, odd: _step(m, *([_BATCH[:6], _TARGET[:6]] if odd else []))),
    Case("model: values", lambda m, odd: _step(m, _BATCH + odd), said="from_local"),
    Case("model: targets", lambda m, odd: _step(m, target=1 - _TARGET if odd else _TARGET)),
    Case("model: rows of each rank's own", _own_rows, said="from_local"),
    Case("model: dtype of a batch", lambda m, odd: _step(m, _BATCH.astype("f4" if odd else "f8"))),
    Case(
        "model: loss",
        lambda m, odd: _model(m, loss=nn.mse_loss if odd else nn.cross_entropy).train_step(
            _BATCH, np.ones((8, 2)) if odd else _TARGET
        ),
    ),
    Case("model: denominator", lambda m, odd: _step(m, denominator=4.0 if odd else 8.0)),
    Case("model: microbatches", lambda m, odd: _train(m, num_microbatches=2 if odd else 1)),
    Case("model: seed", lambda m, odd: _train(m, seed=int(odd)), said="seed"),
    Case("model: layers", lambda m, odd: _train(m, net=_net(4 if odd else 3))),
    Case("model: dtype", lambda m, odd: _train(m, dtype="float32" if odd else "float64")),
    Case("model: buckets", lambda m, odd: _train(m, bucket_bytes=16 if odd else 1024), "any"),
    Case(
        "model: weights before the first step",
        lambda m, odd: _train(m, before=lambda model: _set_weight(model, 1.0 + odd)),
        said="broadcast=True",
    ),
    Case(
        "model: weights between steps",
        lambda m, odd: _train(m, between=lambda model: _set_weight(model, 1.0 + odd)),
    ),
    Case(
        "model: a loaded state",
        lambda m, odd: _train(m, before=lambda model: _load(model, 1.0 + odd)),
    ),
    Case("model: lr", lambda m, odd: _train(m, optimizer=_sgd(odd, lr=0.2))),
    Case("model: lr, given to the step", lambda m, odd: _given(m, _sgd(odd, lr=0.2)), said="lr"),
    Case("model: momentum", lambda m, odd: _given(m, _sgd(odd, momentum=0.9)), said="momentum"),
    Case("model: decay", lambda m, odd: _train(m, optimizer=_sgd(odd, weight_decay=0.1))),
    Case(
        "model: optimizer",
        lambda m, odd: _given(
            m, lambda model: (optim.Adam if odd else optim.SGD)(model.parameters(), lr=0.1)
        ),
        said="Adam",
    ),
    Case("model: a loaded optimizer", _resume),
    Case("model: an optimizer's step left out", _left_out),
    Case(
        "model: limit of a norm",
        lambda m, odd: _train(m, between=lambda model: model.clip_grad_norm(0.1 + odd)),
        said="0.1",
    ),
    Case(
        "model: limit of an ordinary norm",
        lambda m, odd: _train(
            m, between=lambda model: optim.clip_grad_norm(model.parameters(), 0.01 + odd)
        ),
    ),
    Case(
        "model: clipping left out",
        lambda m, odd: _train(m, between=None if odd else lambda model: model.clip_grad_norm(0.1)),
    ),
    Case(
        "model: lr of a ParallelOptimizer",
        lambda m, odd: _train(
            m, optimizer=lambda model: mm.ParallelOptimizer(_sgd(odd, lr=0.2)(model), model)
        ),
    ),
    Case(
        "model: zero",
        lambda m, odd: _train(
            m,
            optimizer=lambda model: mm.ParallelOptimizer(_sgd(odd)(model), model, zero=int(odd)),
        ),
    ),
    Case(
        "model: lr of a ParallelOptimizer, set later",
        lambda m, odd: _lr_later(m, odd),
    ),
    Case(
        "model: training and evaluation mode",
        lambda m, odd: _train(m, before=lambda model: model.set_training(not odd)),
    ),
    Case(
        "model: training and forward",
        lambda m, odd: _model(m).forward(_BATCH) if odd else _step(m),
    ),
    Case("model: no_sync", _no_sync),
    Case(
        "model: number of the step",
        lambda m, odd: _train(m, before=lambda model: setattr(model, "step", 5 * odd)),
    ),
    Case(
        "model: frozen parameters",
        lambda m, odd: _train(m, before=lambda model: _freeze(model, odd)),
    ),
    Case("model: steps", lambda m, odd: _train(m, steps=1 if odd else 2)),
    Case("wait: a layer and another mesh", _talking, "any", said="waits for rank 1", alone=True),
    Case("model: schedule", lambda m, odd: _pipeline(m, odd, schedule="gpipe"), said="gpipe"),
    Case(
        "model: microbatches of a pipeline",
        lambda m, odd: _pipeline(m, odd, num_microbatches=4),
        said="4 microbatches",
    ),
    Case("model: lr of the last step", _last_step, "silent"),
    *_LAYERS,
    *_STAGES,
]


def _lr_later(mesh: Any, odd: bool) -> None:
    model = _model(mesh)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    optimizer = mm.ParallelOptimizer(sgd, model)
    for _ in range(2):
        sgd.lr = 0.2 if odd else 0.1
        model.train_step(_BATCH, _TARGET, optimizer=optimizer)
