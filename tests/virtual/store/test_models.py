"""Models and optimizers stored by their parts: on any mesh, and loaded on any other."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.comm.base import Communicator
from mpimesh.comm.virtual import VirtualCommunicator
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.store.modules import optimizer_parts
from mpimesh.store.parts import Saved
from tests.helpers import tensor_models
from tests.helpers.depth import examples
from tests.helpers.parallel_models import SEED, batch, cut, layers, on_ranks
from tests.helpers.parallel_tied import tied_batch, tied_layers
from tests.helpers.part_store import PartStore, names_of
from tests.helpers.raises import raises

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
    schedule: Any = "1f1b"
    zero: int | None = 1
    bucket_bytes: int = 300
    apart: bool = False
    hybrid: bool = False
    rule: str = "adam"
    several: bool = False
    dtype: Any = "float64"
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
            self.loss = mm.parallel.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
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


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
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


# -- nothing is gathered, and nobody has more than its part ---------------------------------------


def received(mesh):
    return sum(nbytes for nbytes, _ in mesh.traffic().received.values())


@pytest.mark.usefixtures("nodes_apart")
def test_over_nodes_each_rank_saves_and_loads_its_part_and_receives_nothing():
    case = Case(dims="dp=4", zero=3, rule="adam")
    store = PartStore()

    def body(mesh):
        trainer = Trainer(mesh, case)
        trainer.train(0, 1)
        before = received(mesh)
        store.save(mesh, "model", trainer.model)
        store.save(mesh, "optimizer", trainer.optimizer)
        nbytes = trainer.load(store)
        after = received(mesh)
        assert all(one.data is None for one in trainer.model.parameters())
        return nbytes, after, before

    everyone = on_ranks(case.dims, body)
    whole = sum(array.nbytes for array in store.arrays.values())
    assert sum(nbytes for nbytes, _, _ in everyone) == whole
    for nbytes, after, before in everyone:
        assert nbytes < 0.5 * whole
        assert after == before


def test_on_a_node_each_rank_writes_its_part_of_the_values():
    """`PartStore.load` finds ranks that would write the same memory."""
    case = Case(dims="dp=3", zero=3, frozen=(0,))
    store = PartStore()

    def body(mesh):
        trainer = Trainer(mesh, case)
        trainer.train(0, 1)
        store.save(mesh, "model", trainer.model)
        return store.load(mesh, "model", trainer.model)

    everyone = on_ranks(case.dims, body)
    assert sum(everyone) == sum(array.nbytes for array in store.arrays.values())


# -- layers without a mesh ------------------------------------------------------------------------


def saved_model(**options):
    store = PartStore()

    def body(mesh):
        trainer = Trainer(mesh, Case(**options))
        trainer.train(0, 2)
        trainer.save(store)
        return trainer.model.full_state_dict()

    return store, run(Case(**options), body)[0]


def alone(dtype="float64"):
    model = nn.Sequential(layers())
    model.materialize(seed=9, dtype=dtype)
    return model


def test_a_layer_without_ranks_loads_what_a_pipeline_saved():
    store, values = saved_model(dims="dp=2,pp=2", zero=3, rule="adamw")
    model = alone()
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def body(mesh):
        store.load(mesh, "model", model)
        store.load(mesh, "optimizer", optimizer, names_of(model))

    on_ranks("dp=1", body)
    same_state(model.state_dict(), values)
    assert optimizer.steps == 2
    for (name, _), own in zip(
        model.named_parameters(), optimizer.state_dict()["params"], strict=True
    ):
        np.testing.assert_array_equal(own["mean"], store.arrays[f"optimizer.{name}.mean"])


def test_values_are_rounded_to_the_dtype_of_the_model():
    store, values = saved_model()
    model = alone("float32")
    on_ranks("dp=1", lambda mesh: store.load(mesh, "model", model))
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[name].astype("float32"))


def loading(store, prefix, make):
    """Return the error of loading on one rank, after which nothing has changed."""

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=1"))
        trainer.train(0, 1)
        before = trainer.state()
        obj = {"model": trainer.model, "optimizer": trainer.optimizer}[prefix]
        saved = make(store.under(prefix))
        try:
            obj._restored_parts(saved, strict=True)
        except mm.MpimeshError as error:
            after = trainer.state()
            same_state(before[0], after[0])
            same_state(before[1], after[1])
            return error
        raise AssertionError("it was loaded")

    return on_ranks("dp=1", body)[0]


@pytest.mark.parametrize(
    ("prefix", "change", "kind", "words"),
    [
        ("model", {"0.weight": None}, ModuleError, r"missing: \['0.weight'\], unknown: none"),
        ("model", {"9.weight": 1}, ModuleError, r"missing: none, unknown: \['9.weight'\]"),
        ("model", {"0.weight": 1}, ModuleError, "'0.weight' was saved as int, and is an array"),
        ("model", {"0.weight": Saved((6, 8), np.dtype("f8"))}, ShapeError, r"0.weight.*\(6, 8\)"),
        ("model", {"0.weight": Saved((8, 6), np.dtype("i8"))}, DTypeError, "0.weight.*int64"),
        ("model", {"step": "three"}, ModuleError, "step must be a whole number"),
        ("optimizer", {"lr": None}, ModuleError, r"lacks \['lr'\]"),
        ("optimizer", {"lr": -1.0}, ModuleError, "lr must be"),
        ("optimizer", {"optimizer": "SGD"}, ModuleError, "does not fit Adam"),
        ("optimizer", {"0.weight.mean": None}, ModuleError, r"'weight'\) lacks \['mean'\]"),
        ("optimizer", {"0.weight.steps": None}, ModuleError, r"lacks \['0.weight.steps'\]"),
        ("optimizer", {"0.weight.steps": -2}, ModuleError, "'steps' in the state of .*0.weight"),
        ("optimizer", {"0.weight.mean": Saved((6,), np.dtype("f8"))}, ShapeError, "'mean'.*0.wei"),
        ("optimizer", {"0.weight.mean": Saved((8, 6), np.dtype("i4"))}, DTypeError, "'mean'"),
        ("optimizer", {"0.weight.mean": 3}, ModuleError, "'mean'.*saved as int"),
        ("optimizer", {"9.weight.steps": 3}, ModuleError, r"unknown: \['9.weight.steps'\]"),
        (
            "optimizer",
            {"0.weight.other": Saved((8, 6), np.dtype("f8"))},
            ModuleError,
            r"unknown: \['0.weight.other'\]",
        ),
        ("optimizer", {"beta": 3}, ModuleError, r"unknown: \['beta'\]"),
        ("optimizer", {"step": -1}, ModuleError, "step must be a whole number"),
        ("optimizer", {"1.optimizer": "Adam", "0.optimizer": "Adam"}, ModuleError, "of 2 optimiz"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(prefix, change, kind, words):
    if not SAVED:
        SAVED.extend(saved_model())
    store, _ = SAVED

    def make(saved):
        changed = {**saved, **change}
        return {key: value for key, value in changed.items() if value is not None}

    error = loading(store, prefix, make)
    assert isinstance(error, kind), repr(error)
    assert re.search(words, str(error)), str(error)


SAVED: list[Any] = []


def test_without_strict_what_is_missing_stays_and_what_is_unknown_is_passed_over():
    store, values = saved_model()

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=2", zero=2))
        trainer.train(0, 1)
        before = trainer.state()
        for name in [*store.arrays, *store.values]:
            if ".0.weight" in name or name == "optimizer.lr":
                with store._lock:
                    store.arrays.pop(name, None)
                    store.values.pop(name, None)
        store.values["model.other"] = 3
        mesh.group().barrier()
        trainer.optimizer.lr = 0.25
        trainer.load(store, strict=False)
        return before, trainer.state(), trainer.optimizer.lr, trainer.train(2, 1)

    for (before, state), (after, changed), lr, _ in on_ranks("dp=2", body):
        assert lr == 0.25
        np.testing.assert_array_equal(after["0.weight"], before["0.weight"])
        np.testing.assert_array_equal(after["0.bias"], values["0.bias"])
        assert changed["params/0.weight/steps"] == 1
        assert changed["params/0.bias/steps"] == 2
        mean = "params/0.weight/mean"
        np.testing.assert_array_equal(changed[mean], state[mean])
        np.testing.assert_array_equal(
            changed["params/0.bias/mean"], store.arrays["optimizer.0.bias.mean"]
        )


def test_a_state_without_master_values_takes_those_of_the_model():
    store, values = saved_model(dtype="float16", zero=1)
    for name in [name for name in store.arrays if name.endswith(".master")]:
        del store.arrays[name]

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=2", dtype="float16", zero=2))
        trainer.train(5, 2)
        trainer.load(store)
        return trainer.state()[1]

    state = on_ranks("dp=2", body)[0]
    for name, value in values.items():
        np.testing.assert_array_equal(state[f"params/{name}/master"], value.astype("f4"))


def test_the_scale_of_losses_comes_along():
    store, _ = saved_model(dtype="float16")
    assert store.values["optimizer.scaler.scale"] == 16.0

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=1", dtype="float16"))
        trainer.load(store)
        return trainer.optimizer.scaler.state_dict()

    (state,) = on_ranks("dp=1", body)
    assert state == {"scale": 16.0, "good_steps": 0, "skipped_steps": 0}


def test_an_optimizer_without_its_model_and_one_that_was_given_away_are_refused():
    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=1"))
        with pytest.raises(ModuleStateError, match="given to a ParallelOptimizer"):
            optimizer_parts(trainer.plain[0], names_of(trainer.model))

    on_ranks("dp=1", body)
    model = alone()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ModuleError, match=r'one tree, \{"model": model'):
        optimizer_parts(optimizer, {})
    with pytest.raises(ModuleError, match="several models"):
        optimizer_parts(optimizer, dict.fromkeys(names_of(model), "0.weight"))


@pytest.mark.usefixtures("nodes_apart")
def test_values_are_not_loaded_under_somebody_who_has_all_of_them():
    store, _ = saved_model()

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=2", zero=3))
        with trainer.model.gathered():
            with pytest.raises(ModuleStateError, match="gathered"):
                store.load(mesh, "model", trainer.model)
            whole = PartStore()
            whole._add("model", trainer.model._stored_parts())
        return whole.arrays["model.0.weight"]

    on_ranks("dp=2", body)


def test_a_half_done_update_is_not_saved_but_loaded_over():
    store, _ = saved_model()

    def body(mesh):
        trainer = Trainer(mesh, Case(dims="dp=2"))
        trainer.optimizer._is_half_done = True
        with pytest.raises(ModuleStateError, match="load a state of both"):
            trainer.optimizer._stored_parts()
        trainer.load(store)
        return trainer.train(2, 1)

    on_ranks("dp=2", body)


def test_states_of_schedulers_scalers_and_batches_are_json():
    def body(mesh):
        model = mm.DataParallel(alone(), mesh, loss=nn.cross_entropy)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        scheduler = optim.LRScheduler(optimizer, optim.WarmupLR(2, optim.CosineLR(9)))
        batches = mm.data.Batches(np.zeros((9, 2)), mesh, batch_size=3, seed=1)
        scheduler.step()
        return [one.state_dict() for one in (scheduler, optim.LossScaler(), batches)]

    for states in on_ranks("dp=2", body):
        assert json.loads(json.dumps(states)) == states


@pytest.mark.parametrize(("before", "stage"), [("dp=1", 0), ("dp=2", 3)])
def test_what_is_loaded_of_a_model_is_a_state_with_its_steps(before, stage, tmp_path):
    x, target = np.ones((4, 2), np.float32), np.ones((4, 3), np.float32)

    def main(mesh):
        def make(seed):
            net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3))
            return mm.fully_shard(net, mesh, stage=stage, loss=nn.mse_loss, seed=seed)

        model, other = make(0), make(1)
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(3):
            model.train_step(x, target, optimizer=optimizer)
        mm.save(tmp_path / "run", {"model": model}, mesh=mesh)
        state = mm.load(tmp_path / "run")["model"]
        other.load_state_dict(state)
        assert other.step == model.step == 3
        for name, value in model.full_state_dict().items():
            assert np.array_equal(other.full_state_dict()[name], value)
        with raises(ModuleError, "step", -1):
            other.load_state_dict({**state, "step": -1})
        assert other.step == 3

    on_ranks(before, main)
