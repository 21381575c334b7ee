"""Every public call of layers, losses and optimizers, with one wrong argument at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mpimesh import Mesh, nn, optim
from mpimesh.layout import Layout
from tests.helpers.wrong_arguments import Case, outcomes, uncovered

X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(2, 3, 4)
ROWS = X.reshape(6, 4)
IDS = np.array([[0, 2, 1], [3, 3, 0]])


def parameter() -> nn.Parameter:
    made = nn.Parameter("weight", (3, 2), nn.Constant(1.0))
    made.materialize(seed=0)
    made.accumulate(np.ones((3, 2), np.float32))
    return made


LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "Add": ({}, (ROWS, ROWS)),
    "Attention": (
        {
            "features": 4,
            "num_heads": 2,
            "num_kv_heads": 1,
            "causal": True,
            "rotary": False,
            "bias": True,
            "dropout": 0.0,
        },
        X,
    ),
    "BertBlock": ({"features": 4, "num_heads": 2, "hidden": 8, "eps": 1e-5, "dropout": 0.0}, X),
    "BertEmbedding": (
        {
            "vocabulary": 4,
            "features": 4,
            "max_tokens": 3,
            "token_types": 2,
            "eps": 1e-5,
            "dropout": 0.0,
        },
        IDS,
    ),
    "Checkpoint": ({"layer": nn.Linear(4, 2)}, ROWS),
    "Concat": ({"axis": -1}, (ROWS, ROWS)),
    "Dropout": ({"p": 0.5}, ROWS),
    "Embedding": ({"num_embeddings": 4, "features": 4, "std": 0.5}, IDS),
    "FeedForward": ({"features": 4, "hidden": 8, "activation": None, "bias": True}, ROWS),
    "GELU": ({"approximate": "none"}, ROWS),
    "GptBlock": (
        {
            "features": 4,
            "num_heads": 2,
            "num_kv_heads": 1,
            "hidden": 8,
            "norm": "rms",
            "mlp": "swiglu",
            "rotary": True,
            "causal": True,
            "bias": False,
            "eps": 1e-5,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        X,
    ),
    "LayerNorm": ({"features": 4, "eps": 1e-5}, ROWS),
    "PositionalEmbedding": ({"max_tokens": 3, "features": 4, "std": 0.5}, X),
    "Linear": ({"in_features": 4, "out_features": 2, "bias": True}, ROWS),
    "MeanPool": ({}, X),
    "Normalize": ({"eps": 1e-5}, ROWS),
    "RMSNorm": ({"features": 4, "eps": 1e-5}, ROWS),
    "ReLU": ({}, ROWS),
    "RotaryEmbedding": (
        {"head_dim": 4, "base": 100.0, "interleaved": False},
        X.reshape(2, 1, 3, 4),
    ),
    "Sequential": ({}, ROWS),
    "SiLU": ({}, ROWS),
    "SwiGLU": ({"features": 4, "hidden": 8, "bias": True}, ROWS),
    "Tanh": ({}, ROWS),
}


def layer(name: str) -> nn.Module:
    made = (
        nn.Sequential(nn.ReLU()) if name == "Sequential" else getattr(nn, name)(**LAYERS[name][0])
    )
    made.materialize(seed=0)
    return made


def forward(name: str) -> Case:
    return layer(name), {"x": LAYERS[name][1], "ctx": nn.Context()}


def backward(name: str) -> Case:
    made, ctx = layer(name), nn.Context()
    y = made.forward(LAYERS[name][1], ctx)
    return made.backward, {"dy": np.ones_like(y), "ctx": ctx}


def loading(name: str) -> Case:
    made = layer(name)
    return made.load_state_dict, {"state": made.state_dict()}


def stepped(kind: Any, **numbers: Any) -> optim.Optimizer:
    made: optim.Optimizer = kind([parameter()], **numbers)
    made.step()
    return made


def scheduler() -> optim.LRScheduler:
    return optim.LRScheduler(optim.SGD([parameter()], lr=0.1), optim.LinearLR(4))


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decay_mask": None}
SCALER = {
    "scale": 8.0,
    "growth": 2.0,
    "backoff": 0.5,
    "growth_interval": 3,
    "min_scale": 1.0,
    "max_scale": 64.0,
}

CASES: dict[str, Any] = {
    **{name: lambda name=name: (getattr(nn, name), LAYERS[name][0]) for name in LAYERS},
    **{f"{name}.forward": partial(forward, name) for name in LAYERS},
    **{f"{name}.backward": partial(backward, name) for name in LAYERS},
    "Constant": lambda: (nn.Constant, {"value": 1.0}),
    "Normal": lambda: (nn.Normal, {"std": 1.0}),
    "Uniform": lambda: (nn.Uniform, {"bound": 1.0}),
    "Context": lambda: (nn.Context, {"step": 1, "first_row": 2, "training": True}),
    "CrossEntropy": lambda: (nn.CrossEntropy(), {"y": ROWS, "target": np.zeros(6, int)}),
    "CrossEntropy.count": lambda: (nn.CrossEntropy().count, {"target": np.zeros(6, int)}),
    "cross_entropy": lambda: (
        nn.cross_entropy.value_and_grad,
        {"y": ROWS, "target": np.zeros(6, int), "denominator": 6},
    ),
    "MeanSquaredError": lambda: (nn.MeanSquaredError(), {"y": ROWS, "target": ROWS}),
    "mse_loss": lambda: (nn.mse_loss.value_and_grad, {"y": ROWS, "target": ROWS, "denominator": 6}),
    "Module.materialize": lambda: (
        nn.Linear(4, 2).materialize,
        {"seed": 0, "dtype": "float32", "xp": np, "index": 1},
    ),
    "Module.load_state_dict": lambda: loading("Linear"),
    "Module.set_training": lambda: (layer("Linear").set_training, {"training": True}),
    "Sequential.append": lambda: (nn.Sequential().append, {"layer": nn.ReLU()}),
    "Parameter": lambda: (
        nn.Parameter,
        {
            "name": "w",
            "shape": (3, 2),
            "initializer": nn.Constant(0.0),
            "requires_grad": True,
        },
    ),
    "Parameter.materialize": lambda: (
        nn.Parameter("w", (3, 2), nn.Constant(0.0)).materialize,
        {"seed": 0, "dtype": "float32", "xp": np, "index": 1},
    ),
    "Parameter.set_layout": lambda: (
        nn.Parameter("w", (3, 2), nn.Constant(0.0)).set_layout,
        {"layout": Layout(Mesh("tp=2"), "S0"), "rank": 1},
    ),
    "Parameter.accumulate": lambda: (parameter().accumulate, {"g": np.ones((3, 2), np.float32)}),
    "Parameter.accumulate_rows": lambda: (
        parameter().accumulate_rows,
        {"rows": np.array([0, 2]), "g": np.ones((2, 2), np.float32)},
    ),
    "Parameter.attach_grad": lambda: (
        parameter().attach_grad,
        {"view": np.ones((3, 2), np.float32)},
    ),
    "SGD": lambda: (
        optim.SGD,
        {
            "params": [parameter()],
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 0.1,
            "decay_mask": None,
        },
    ),
    "Adam": lambda: (optim.Adam, {"params": [parameter()], **ADAM}),
    "AdamW": lambda: (optim.AdamW, {"params": [parameter()], **ADAM}),
    "LossScaler": lambda: (optim.LossScaler, SCALER),
    "LossScaler.update": lambda: (optim.LossScaler().update, {"overflowed": True}),
    "LossScaler.load_state_dict": lambda: (
        optim.LossScaler().load_state_dict,
        {"state": optim.LossScaler().state_dict()},
    ),
    "ConstantLR": lambda: (optim.ConstantLR, {"share": 0.5}),
    "LinearLR": lambda: (optim.LinearLR, {"steps": 4, "start": 1.0, "end": 0.5}),
    "CosineLR": lambda: (optim.CosineLR, {"steps": 4, "end": 0.5}),
    "WarmupLR": lambda: (
        optim.WarmupLR,
        {"steps": 4, "then": optim.ConstantLR(), "start": 0.5},
    ),
    "OneCycleLR": lambda: (
        optim.OneCycleLR,
        {"steps": 4, "warmup": 0.5, "start": 0.1, "end": 0.01},
    ),
    "LRScheduler": lambda: (
        optim.LRScheduler,
        {
            "optimizer": optim.SGD([parameter()], lr=0.1),
            "schedule": optim.LinearLR(4),
            "any_schedule": False,
        },
    ),
    "LRScheduler.load_state_dict": lambda: (
        scheduler().load_state_dict,
        {"state": scheduler().state_dict()},
    ),
    "Optimizer.load_state_dict": lambda: (
        stepped(optim.Adam).load_state_dict,
        {"state": stepped(optim.Adam).state_dict()},
    ),
    "clip_grad_norm": lambda: (
        optim.clip_grad_norm,
        {"params": [parameter()], "max_norm": 1.0, "all_sum": None, "copies": ()},
    ),
}

LEFT_OUT = {
    # What layers, contexts and models say to each other.
    *(f"Context.{name}" for name in ["offer", "empty", "once", "save", "peek", "take", "defer"]),
    "Context.take_deferred",
    "Context.drop",
    *(f"{kind}.draw" for kind in ("Constant", "Normal", "Uniform")),
    *(f"{name}.{half}" for name in LAYERS for half in ("backward_input", "backward_weight")),
    *(
        f"{name}.{way}"
        for name in (*LAYERS, "Module")
        for way in ("set_place", "set_part", "set_sequence", "set_split", "add_gradients")
    ),
    "Parameter.put_away",
    "Optimizer.check_state",
    "Optimizer.exchange_params",
    "Optimizer.step_at",
    # Tested as those of Module and Linear.
    "Attention.materialize",
    "Dropout.materialize",
    "Sequential.materialize",
    *(f"Module.{name}" for name in ("forward", "backward", "backward_input", "backward_weight")),
    "Module",
    "Optimizer",
    "LRSchedule",
    # Protocols.
    "Initializer",
    "Loss",
    "SupportsLayer",
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_are_refused_by_name(name):
    also = {"ctx": "Context", "g": "gradient", "params": "parameters"}
    also |= {"view": "gradient memory", "x": "mask|ids"}
    with np.errstate(all="ignore"):
        found = list(outcomes(CASES[name], also=also))
    assert not found, "\n" + "\n".join(found)


def test_every_public_call_is_tried():
    missing = [*uncovered(nn, CASES, LEFT_OUT), *uncovered(optim, CASES, LEFT_OUT)]
    assert missing == []
