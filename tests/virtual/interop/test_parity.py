"""Training on any mesh beside PyTorch in one process: losses and weights after many steps.

PyTorch gets the first values of the unsplit model and the whole batches, in float64, and does the
sums of each layer by its own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.schedule import schedule_names, stages_per_rank
from tests.helpers.depth import examples
from tests.helpers.parallel_models import on_ranks

torch: Any = pytest.importorskip("torch")
torch.set_num_threads(1)

STEPS = 20
VOCAB = 11
TOKENS = 6
FEATURES = 8
CLASSES = 5
SEED = 4
TOLERANCE = 1e-9

GPTS: dict[str, dict[str, Any]] = {
    "gpt": {"num_heads": 4, "tied": True},
    "llama": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden": 10,
        "norm": "rms",
        "mlp": "swiglu",
        "rotary": True,
        "bias": False,
        "tied": False,
    },
}


@dataclass(frozen=True)
class Program:
    """A training: a model, a mesh, and options.

    Attributes:
        kind: "mlp", or one of `GPTS`.
        dims: Ranks of dp, pp and tp.
        sequence: Whether activations are split along the sequence.
        schedule: That of the pipeline.
        stage: What replicas divide.
        rows: Of a batch.
        num_microbatches: Most parts of a replica's rows.
        parts: Steps whose gradients are added up.
        clip: The largest norm; None clips nothing.
        decay: Weight decay.
        masked: Whether only weights of two axes decay.
        rate: How the learning rate goes.
        steps: How many.
        bucket_bytes: Most bytes of a bucket.
    """

    kind: str = "mlp"
    dims: tuple[int, int, int] = (1, 1, 1)
    sequence: bool = False
    schedule: Any = "1f1b"
    stage: int = 0
    rows: int = 8
    num_microbatches: int = 2
    parts: int = 1
    clip: float | None = 0.3
    decay: float = 0.1
    masked: bool = True
    rate: str = "warm-up and cosine"
    steps: int = STEPS
    bucket_bytes: int = 2000

    @property
    def spec(self) -> str:
        return "dp={},pp={},tp={}".format(*self.dims)


LR = 0.02
SCHEDULES: dict[str, Callable[[int], optim.LRSchedule]] = {
    "constant": lambda steps: optim.ConstantLR(),
    "linear": lambda steps: optim.LinearLR(steps, end=0.5),
    "warm-up and cosine": lambda steps: optim.WarmupLR(2, optim.CosineLR(steps, end=0.1), 0.25),
}


def torch_rates(rate: str, adam: Any, steps: int) -> Any:
    """PyTorch's schedule of the same name."""
    rates = torch.optim.lr_scheduler
    if rate == "constant":
        return rates.ConstantLR(adam, 1.0)
    if rate == "linear":
        return rates.LinearLR(adam, 1.0, 0.5, steps)
    return rates.SequentialLR(
        adam,
        [
            rates.LinearLR(adam, 0.25, 1.0, 2),
            rates.CosineAnnealingLR(adam, steps, eta_min=0.1 * LR),
        ],
        milestones=[2],
    )


def layers_of(program: Program, tp: Any = None) -> list[Any]:
    if program.kind == "mlp":
        return [
            nn.Linear(FEATURES, 12),
            nn.ReLU(),
            nn.Linear(12, 9, bias=False),
            nn.LayerNorm(9),
            nn.GELU(),
            nn.Linear(9, 10),
            nn.SiLU(),
            nn.Linear(10, CLASSES),
        ]
    return mm.parallel.gpt_layers(
        VOCAB,
        FEATURES,
        2,
        max_tokens=TOKENS,
        tp=tp,
        sequence_parallel=program.sequence,
        tokens=TOKENS if program.sequence else None,
        **GPTS[program.kind],
    )


def batch_of(program: Program, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, 5])
    if program.kind == "mlp":
        x = rng.normal(size=(program.rows, FEATURES))
        return x, rng.integers(0, CLASSES, program.rows)
    ids = rng.integers(0, VOCAB, (program.rows, TOKENS + 1))
    return ids[:, :-1], ids[:, 1:]


def cuts(program: Program) -> list[slice]:
    """The rows of the steps whose gradients are added up."""
    edges = np.linspace(0, program.rows, program.parts + 1).astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


# -- mpimesh --------------------------------------------------------------------------------------


def trained(program: Program, mesh: mm.DeviceMesh) -> tuple[list[float], dict[str, np.ndarray]]:
    tp = mesh.group("tp") if program.kind != "mlp" else None
    made = layers_of(program, tp)
    count = program.dims[1] * stages_per_rank(program.schedule)
    stages = [mm.PipelineStage(number) for number in range(count)]
    for place, layer in enumerate(made):
        stages[place * count // len(made)].add_layer(layer)
    pipe = mm.PipelineParallel(
        stages,
        program.num_microbatches,
        mesh=mesh,
        schedule=program.schedule,
        seed=SEED,
        dtype="float64",
        bucket_bytes=program.bucket_bytes,
    )
    mm.fully_shard(pipe, mesh, stage=program.stage)
    adam = optim.AdamW(
        pipe.parameters(),
        lr=LR,
        weight_decay=program.decay,
        decay_mask=(lambda one: len(one.shape) > 1) if program.masked else None,
    )
    optimizer = mm.ParallelOptimizer(adam, pipe, zero=program.stage)
    loss: Any = nn.cross_entropy
    if tp is not None:
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)
    rates = optim.LRScheduler(optimizer, SCHEDULES[program.rate](program.steps))
    losses = []
    for step in range(program.steps):
        x, target = batch_of(program, step)
        *before, last = cuts(program)
        options = {"loss": loss, "denominator": program.rows}
        with pipe.no_sync():
            value = sum(pipe.train_step(x[part], target[part], **options) for part in before)
        value += pipe.train_step(x[last], target[last], **options)
        losses.append(value)
        if program.clip is not None:
            pipe.clip_grad_norm(program.clip)
        optimizer.step()
        rates.step()
    pipe.check_replicas()
    return losses, pipe.full_state_dict()


# -- PyTorch --------------------------------------------------------------------------------------


def trained_by_torch(program: Program) -> tuple[list[float], dict[str, np.ndarray]]:
    model = nn.Sequential(layers_of(replace(program, sequence=False)))
    model.materialize(seed=SEED, dtype=np.float64)
    weights = {
        name: torch.tensor(values, requires_grad=True)
        for name, values in model.state_dict().items()
    }
    groups = [
        {
            "params": [one for one in weights.values() if (one.dim() > 1) == wide],
            "weight_decay": program.decay if wide or not program.masked else 0.0,
        }
        for wide in (False, True)
    ]
    adam = torch.optim.AdamW(groups, lr=LR)
    rates = torch_rates(program.rate, adam, program.steps)
    losses = []
    for step in range(program.steps):
        x, target = (torch.from_numpy(np.ascontiguousarray(one)) for one in batch_of(program, step))
        adam.zero_grad()
        y = forward(model, weights, x)
        loss = torch.nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), target.reshape(-1))
        loss.backward()
        losses.append(float(loss.detach()))
        if program.clip is not None:
            norm = math.sqrt(sum(float((one.grad**2).sum()) for one in weights.values()))
            for one in weights.values():
                one.grad *= min(1.0, program.clip / norm)
        adam.step()
        rates.step()
    return losses, {name: one.detach().numpy() for name, one in weights.items()}


def forward(model: nn.Sequential, weights: dict[str, Any], x: Any) -> Any:
    """What a model of these layers gives, by PyTorch's functions."""
    tied = {id(parameter): name for name, parameter in model.named_parameters()}
    for place, layer in enumerate(model.layers):
        names = {
            parameter.name: weights[tied[id(parameter)]]
            for parameter in getattr(layer, "_own_parameters", list)()
        }
        own = {
            name.removeprefix(f"{place}."): values
            for name, values in weights.items()
            if name.startswith(f"{place}.")
        }
        x = one_layer(layer, {**names, **own}, x)
    return x


def one_layer(layer: Any, own: dict[str, Any], x: Any) -> Any:
    functions = torch.nn.functional
    if isinstance(layer, nn.GptBlock):
        return block(layer, own, x)
    if isinstance(layer, nn.Linear):
        return functions.linear(x, own["weight"], own.get("bias"))
    if isinstance(layer, nn.Embedding):
        return functions.embedding(x, own["weight"])
    if isinstance(layer, nn.PositionalEmbedding):
        return x + own["weight"][: x.shape[1]]
    if isinstance(layer, nn.LayerNorm):
        return functions.layer_norm(x, (x.shape[-1],), own["weight"], own["bias"], layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return functions.rms_norm(x, (x.shape[-1],), own["weight"], layer.eps)
    if isinstance(layer, nn.GELU):
        return functions.gelu(x, approximate="tanh" if layer.approximate == "tanh" else "none")
    simple = {nn.ReLU: functions.relu, nn.SiLU: functions.silu, nn.Dropout: lambda x: x}
    return simple[type(layer)](x)


def block(layer: Any, own: dict[str, Any], x: Any) -> Any:
    def within(name: str) -> dict[str, Any]:
        return {
            key.removeprefix(f"{name}."): values
            for key, values in own.items()
            if key.startswith(f"{name}.")
        }

    y = one_layer(layer.attention_norm, within("attention_norm"), x)
    x = x + attention(layer.attention, within("attention"), y)
    y = one_layer(layer.mlp_norm, within("mlp_norm"), x)
    mlp = within("mlp")

    def linear(name: str, y: Any) -> Any:
        return torch.nn.functional.linear(y, mlp[f"{name}.weight"], mlp.get(f"{name}.bias"))

    if isinstance(layer.mlp, nn.SwiGLU):
        inner = torch.nn.functional.silu(linear("gate", y)) * linear("up", y)
    else:
        inner = one_layer(layer.mlp.activation, {}, linear("up", y))
    return x + linear("down", inner)


def attention(layer: Any, own: dict[str, Any], x: Any) -> Any:
    def linear(name: str, x: Any) -> Any:
        return torch.nn.functional.linear(x, own[f"{name}.weight"], own.get(f"{name}.bias"))

    q, k, v = (
        linear(name, x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    if layer.rotary is not None:
        q, k = turned(layer.rotary, q), turned(layer.rotary, k)
    k, v = (one.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for one in (k, v))
    read = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear("output", read.transpose(1, 2).flatten(2))


def turned(rotary: Any, x: Any) -> Any:
    half = rotary.head_dim // 2
    speeds = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(
        torch.ones(1, dtype=torch.float64), torch.arange(x.shape[2])[:, None] * speeds
    )
    both = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([both.real, both.imag], -1)


# -- both -----------------------------------------------------------------------------------------


def compare(program: Program) -> None:
    expected_losses, expected = trained_by_torch(program)
    losses, state = on_ranks(program.spec, lambda mesh: trained(program, mesh))[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        scale = np.abs(values).max()
        np.testing.assert_allclose(
            state[name], values, rtol=0, atol=TOLERANCE * scale, err_msg=name
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["mlp", *GPTS])
@pytest.mark.parametrize("dims", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)])
def test_meshes_and_stages(dims, kind, stage):
    compare(Program(kind, dims if kind != "mlp" else (*dims[:2], 1), stage=stage))


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "forward"])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_every_schedule(schedule, kind):
    compare(Program(kind, (2, 2, 1), schedule=schedule, num_microbatches=4, stage=3))


@pytest.mark.parametrize("kind", GPTS)
@pytest.mark.parametrize("dims", [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 4), (2, 2, 2)])
def test_sequence_parallelism(dims, kind):
    compare(Program(kind, dims, sequence=True, stage=3))


@st.composite
def programs(draw: Any) -> Program:
    kind = draw(st.sampled_from(["mlp", *GPTS]))
    most_tp = 1 if kind == "mlp" else 4
    meshes = [
        (dp, pp, tp)
        for dp in (1, 2, 3, 4)
        for pp in (1, 2, 3)
        for tp in (1, 2, 4)
        if tp <= most_tp and dp * pp * tp <= 8
    ]
    dims = draw(st.sampled_from(meshes))
    names = [name for name in schedule_names() if name != "forward"]
    schedule = draw(st.sampled_from(names))
    if stages_per_rank(schedule) * dims[1] > 6:
        schedule = "1f1b"
    return Program(
        kind,
        dims,
        sequence=dims[2] > 1 and draw(st.booleans()),
        schedule=schedule,
        stage=draw(st.integers(0, 3)),
        rows=draw(st.integers(1, 9)),
        num_microbatches=draw(st.integers(1, 4)),
        parts=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([None, 0.1, 1.0])),
        decay=draw(st.sampled_from([0.0, 0.1])),
        masked=draw(st.booleans()),
        rate=draw(st.sampled_from(sorted(SCHEDULES))),
        steps=3,
        bucket_bytes=draw(st.sampled_from([1, 500, 10**6])),
    )


@pytest.mark.timeout(900)
@settings(max_examples=examples(300))
@given(programs())
def test_random_programs(program):
    compare(program)
