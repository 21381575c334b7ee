"""Models and optimizers stored by their parts: on any mesh, and loaded on any other."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.comm.base import Communicator
from mpimesh.comm.virtual import VirtualCommunicator
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.store.modules import restored_module
from tests.helpers import tensor_models
from tests.helpers.depth import examples
from tests.helpers.parallel_models import SEED, assert_equal, batch, cut, layers, on_ranks
from tests.helpers.parallel_tied import tied_batch, tied_layers
from tests.helpers.part_store import PartStore, names_of

OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01, weight_decay=0.01),
    "adamw": lambda parameters: optim.AdamW(
        parameters, lr=0.01, decay_mask=lambda parameter: len(parameter.shape) > 1
    ),
}
CHUNKS = {"interleaved": 2, "zbv": 2, "looped_bfs": 2, "vhalf": 2}


@dataclass(frozen=True)
class Case:
    """How a model is cut over ranks, and what it is trained by."""

    dims: str = "dp=2"
    kind: str = "layers"
    schedule: str = "1f1b"
    zero: int | None = 1
    bucket_bytes: float = 300
    apart: bool = False
    hybrid: bool = False
    rule: str = "adam"
    several: bool = False
    dtype: str = "float64"
    frozen: tuple[int, ...] = ()

    @property
    def ways(self) -> dict[str, int]:
        return {dim.split("=")[0]: int(dim.split("=")[1]) for dim in self.dims.split(",")}


def run(case: Case, body: Any) -> list[Any]:
    apart = mock.patch.object(VirtualCommunicator, "offer_once", Communicator.offer_once)
    with apart if case.apart else nullcontext():
        return on_ranks(case.dims, body)


@dataclass
class Trainer:
    """A model and its optimizers on one rank."""

    mesh: mm.DeviceMesh
    case: Case
    model: Any = None
    optimizer: Any = None
    plain: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, mesh = self.case, self.mesh
        tp = mesh.group("tp") if mesh.contains_dim("tp") else None
        if case.kind == "tied":
            made = tied_layers()
        elif case.kind == "layers":
            made = layers()
        else:
            made = tensor_models.layers(case.kind, **({} if tp is None else {"tp": tp}))
        for place in case.frozen:
            made[place].freeze()
        count = case.ways.get("pp", 1) * CHUNKS.get(case.schedule, 1)
        self.loss = nn.cross_entropy
        if tp is not None:
            self.loss = mm.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
        self.model = mm.PipelineParallel(
            cut(count, made),
            4,
            mesh=mesh,
            schedule=case.schedule,
            seed=SEED,
            dtype=case.dtype,
            bucket_bytes=case.bucket_bytes,
        )
        if case.hybrid:
            mm.fully_shard(self.model, mesh, stage=3, hybrid=True)
        parameters = self.model.parameters()
        make = OPTIMIZERS[case.rule]
        self.plain = [make(parameters)]
        if case.several:
            wide = {id(one): len(one.shape) > 1 for one in parameters}
            self.plain = [
                make([one for one in parameters if wide[id(one)]]),
                optim.Adam([one for one in parameters if not wide[id(one)]], lr=0.02),
            ]
        if case.zero is not None:
            scaler = None
            if case.dtype == "float16":
                scaler = optim.LossScaler(scale=8.0, growth_interval=2)
            given = self.plain if case.several else self.plain[0]
            self.optimizer = mm.ParallelOptimizer(given, self.model, zero=case.zero, scaler=scaler)

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            x, target = self.batch(step)
            loss = self.model.train_step(x, target, loss=self.loss, optimizer=self.optimizer)
            if self.optimizer is None:
                for one in self.plain:
                    one.step()
            losses.append(float(loss))
        return losses

    def batch(self, step: int) -> Any:
        if self.case.kind == "tied":
            return tied_batch(step, 13)
        if self.case.kind == "layers":
            x, target = batch(step, 13)
            return x.astype(nn.parameter.float_dtype(self.case.dtype)), target
        return tensor_models.batch(step)

    def save(self, store: PartStore) -> None:
        store.save(self.mesh, "model", self.model)
        if self.optimizer is not None:
            store.save(self.mesh, "optimizer", self.optimizer)
        for number, one in enumerate(self.plain if self.optimizer is None else []):
            prefix = f"optimizer.{number}" if self.case.several else "optimizer"
            store.save(self.mesh, prefix, one, names_of(self.model))

    def load(self, store: PartStore, **options: Any) -> int:
        nbytes = store.load(self.mesh, "model", self.model, **options)
        if self.optimizer is not None:
            return nbytes + store.load(self.mesh, "optimizer", self.optimizer, **options)
        for number, one in enumerate(self.plain):
            prefix = f"optimizer.{number}" if self.case.several else "optimizer"
            nbytes += store.load(self.mesh, prefix, one, names_of(self.model), **options)
        return nbytes

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole state of model and optimizers, each on every rank."""
        values = self.model.full_state_dict()
        if self.optimizer is not None:
            return values, self.optimizer.full_state_dict()
        state: dict[str, Any] = {"step": self.model.step}
        for number, one in enumerate(self.plain):
            prefix = f"{number}/" if self.case.several else ""
            own = one.state_dict()
            state |= {f"{prefix}{key}": own[key] for key in own if key != "params"}
        return values, state

    def take(self, values: dict[str, Any], state: dict[str, Any]) -> None:
        self.model.load_state_dict(values)
        self.optimizer.load_state_dict(state)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def check_store(store: PartStore, values: dict[str, Any], state: dict[str, Any]) -> None:
    """Compare what was told with the whole states that were gathered."""
    for name, array in values.items():
        np.testing.assert_array_equal(store.arrays[f"model.{name}"], array, strict=True)
    assert store.values["model.step"] == store.values.get("optimizer.step", state["step"])
    for key, value in state.items():
        name = "optimizer." + key.replace("params/", "").replace("/", ".")
        stored = store.arrays[name] if name in store.arrays else store.values.get(name)
        if key != "step":
            np.testing.assert_array_equal(stored, value, err_msg=name)


meshes = st.sampled_from(
    ["dp=1", "dp=2", "dp=3", "pp=2", "pp=4", "dp=2,pp=2", "dp=4,pp=2", "dp=2,pp=4", "pp=2,dp=3"]
)
tp_meshes = st.sampled_from(
    ["dp=1", "tp=2", "tp=3", "dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2", "pp=2", "dp=2,tp=3"]
)
schedules = st.sampled_from(["gpipe", "1f1b", "zb1p", "interleaved", "looped_bfs", "zbv", "vhalf"])


@st.composite
def cuts(draw, kind, meshes=meshes):
    """Draw how a model is cut."""
    dims = draw(meshes)
    zero = draw(st.sampled_from([None, 0, 1, 2, 3]))
    apart = draw(st.booleans())
    return Case(
        dims=dims,
        kind=kind,
        schedule=draw(schedules) if "pp" in dims and "tp" not in dims else "1f1b",
        zero=zero,
        bucket_bytes=draw(st.sampled_from([1, 300, 10**6])),
        apart=apart,
        hybrid=zero == 3 and draw(st.booleans()),
    )


@st.composite
def pairs(draw):
    """Draw how a model is cut when it is saved, and how when it is loaded."""
    kind = draw(st.sampled_from(["layers", "layers", "tied", "plain", "llama"]))
    kinds = tp_meshes if kind in ("plain", "llama") else meshes
    half = kind == "layers"
    common = {
        "rule": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "several": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float64", "float16", "bfloat16"])) if half else "float64",
        "frozen": draw(st.sampled_from([(), (0,), (1,), (0, 1)])),
    }
    saved = draw(cuts(kind, kinds))
    loaded = draw(st.just(saved) | cuts(kind, kinds))
    return replace(saved, **common), replace(loaded, **common)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.sampled_from([0, 1, 2]))
def test_any_mesh_to_any_other(pair, steps):
    """What is told is the whole state; loaded elsewhere, training goes on as it would there."""
    saving, loading = pair
    store = PartStore()

    def save(mesh):
        trainer = Trainer(mesh, saving)
        trainer.train(0, steps)
        trainer.save(store)
        found = trainer.state()
        return found, trainer.train(steps, 2), trainer.state()

    saved = run(saving, save)
    for found, _, _ in saved:
        if saving.zero is not None or saving.ways.get("tp", 1) == saving.ways.get("pp", 1) == 1:
            check_store(store, *found)

    def load(mesh):
        trainer = Trainer(mesh, loading)
        trainer.train(7, 1)  # what is loaded takes the place of something
        trainer.load(store)
        if saving.zero is not None and loading.zero is not None:
            same_state(trainer.state()[0], saved[0][0][0])
            same_state(trainer.state()[1], saved[0][0][1])
        trainer.model.check_replicas()
        assert trainer.model.step == steps
        return trainer.state(), trainer.train(steps, 2), trainer.state()

    def take(mesh):
        trainer = Trainer(mesh, loading)
        trainer.train(7, 1)
        trainer.take(*saved[0][0])
        return trainer.state(), trainer.train(steps, 2), trainer.state()

    loaded = run(loading, load)
    if loading == saving:
        for (_, losses, after), (_, wanted, end) in zip(loaded, saved, strict=True):
            assert losses == wanted
            same_state(after[0], end[0])
            same_state(after[1], end[1])
    elif saving.zero is not None and loading.zero is not None:
        for one, other in zip(loaded, run(loading, take), strict=True):
            assert one[1] == other[1]
            same_state(one[2][0], other[2][0])
            same_state(one[2][1], other[2][1])
