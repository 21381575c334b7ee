"""The state of PyTorch's layers: what `state_dict()` has a checkpoint has, on any mesh."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

torch: Any = pytest.importorskip("torch")

import mpimesh as mm  # noqa: E402
import mpimesh.interop.torch as mt  # noqa: E402
from mpimesh import nn  # noqa: E402
from mpimesh.errors import (  # noqa: E402
    DTypeError,
    MismatchError,
    ModuleError,
    MpimeshError,
    ShapeError,
)
from tests.helpers.depth import examples  # noqa: E402
from tests.helpers.parallel_models import on_ranks  # noqa: E402
from tests.helpers.raises import raises  # noqa: E402
from tests.helpers.torch_models import deal  # noqa: E402

tn: Any = torch.nn
norm = tn.utils.parametrizations


class Own(torch.nn.Module):
    """Buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([0.5, float("nan")], dtype=torch.float16))
        self.register_buffer("brain", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("conj", torch.ones(2, dtype=torch.complex64).conj())
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("later", None)
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.inner = tn.ModuleList([tn.BatchNorm1d(2), tn.Linear(2, 1)])
        self.again = self.inner[0]


LAYERS = {
    "linear": lambda: tn.Linear(3, 4),
    "conv": lambda: tn.Conv2d(2, 3, 2),
    "embedding": lambda: tn.Embedding(5, 3),
    "batch norm": lambda: tn.BatchNorm1d(4),
    "batch norm 2d, all batches": lambda: tn.BatchNorm2d(3, momentum=None),
    "batch norm, no weights": lambda: tn.BatchNorm3d(2, affine=False),
    "batch norm, no statistics": lambda: tn.BatchNorm1d(4, track_running_stats=False),
    "sync batch norm": lambda: tn.SyncBatchNorm(3),
    "instance norm": lambda: tn.InstanceNorm2d(3, track_running_stats=True),
    "group norm": lambda: tn.GroupNorm(2, 4),
    "spectral norm": lambda: norm.spectral_norm(tn.Linear(3, 4)),
    "old spectral norm": lambda: tn.utils.spectral_norm(tn.Linear(3, 4)),
    "weight norm": lambda: norm.weight_norm(tn.Linear(3, 4)),
    "orthogonal": lambda: norm.orthogonal(tn.Linear(3, 3)),
    "lstm": lambda: tn.LSTM(2, 3, bidirectional=True),
    "attention": lambda: tn.MultiheadAttention(4, 2),
    "transformer": lambda: tn.TransformerEncoderLayer(4, 2, 5),
    "softmax": lambda: tn.AdaptiveLogSoftmaxWithLoss(16, 9, [2, 4]),
    "prelu": lambda: tn.PReLU(2),
    "dropout": lambda: tn.Dropout(),
    "own": Own,
    "buffers alone": lambda: tn.Sequential(tn.BatchNorm1d(3, affine=False)),
}
MESHES = ["dp=1", "dp=2", "dp=3", "pp=2", "dp=2,pp=2", "pp=3"]
SPLIT_MESHES = ["dp=1,tp=1", "dp=1,tp=2", "dp=2,tp=2"]
"""Of models that have a layer of mpimesh, split over tp, behind those of PyTorch."""


def filled(names: list[str], seed: int) -> Any:
    """A module of these layers, of which everything has values of its own."""
    torch.manual_seed(seed)
    made = tn.Sequential(*(LAYERS[name]() for name in names))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for value in made.state_dict().values():
            drawn = torch.from_numpy(rng.integers(-9, 9, tuple(value.shape)))
            value.copy_(drawn != 0 if value.dtype == torch.bool else drawn)
    return made


def modelled(source: Any, mesh: Any, stage: int, whole: bool) -> tuple[Any, Any]:
    """A model of a copy of `source`, cut as the mesh says."""
    made = copy.deepcopy(source)
    if mesh.contains_dim("pp"):
        model: Any = mm.PipelineParallel(
            deal(mt.wrap_each(made), mesh.dim_size("pp")), 2, mesh=mesh
        )
    elif mesh.contains_dim("tp"):
        split = mm.parallel.ColumnParallelLinear(4, 6, group=mesh.group("tp"))
        layers = nn.Sequential(*([mt.wrap(made)] if whole else mt.wrap_each(made)), split)
        model = mm.DataParallel(layers, mesh, loss=nn.mse_loss)
    else:
        model = mm.DataParallel(
            mt.wrap(made) if whole else nn.Sequential(mt.wrap_each(made)), mesh, loss=nn.mse_loss
        )
    if stage:
        mm.fully_shard(model, mesh, stage=stage)
    return made, model


def plain(state: Any) -> dict[str, np.ndarray]:
    """A state of PyTorch as bytes, but for second names of one tensor."""
    found, seen = {}, set()
    for name, value in state.items():
        value = value.detach().resolve_conj().contiguous()
        kind = torch.uint8 if value.ndim else value.dtype
        if "again." in name:
            continue
        seen.add(name)
        found[name] = value.clone().view(kind).float().numpy() if value.numel() else np.zeros(0)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**30))
def test_what_a_state_dict_has_comes_back_on_another_mesh(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.choice(list(LAYERS), 4)]
    source, other = filled(names, seed % 1000), filled(names, seed % 1000 + 1)
    whole = bool(rng.integers(2))
    is_split = not rng.integers(4)
    before, after = (str(dims) for dims in rng.choice(SPLIT_MESHES if is_split else MESHES, 2))
    path = tmp_path_factory.mktemp("c") / "c"
    stages = [int(stage) for stage in rng.integers(0, 4, 2)]
    wanted = plain(source.state_dict())

    def save(mesh):
        model = modelled(source, mesh, stages[0], whole)[1]
        mm.save(path, {"model": model})
        return model.full_state_dict()

    def load(mesh):
        made, model = modelled(other, mesh, stages[1], whole)
        mm.load(path, {"model": model})
        return check(mesh, made, model)

    def take(state, mesh):
        made, model = modelled(other, mesh, stages[1], whole)
        model.load_state_dict(state)
        return check(mesh, made, model)

    def check(mesh, made, model):
        whole_state = model.full_state_dict()
        with model.gathered():
            places = [
                place
                for place in range(len(made))
                if "pp" not in mesh.dim_names
                or place * mesh.dim_size("pp") // len(made) == mesh.group("pp").rank
            ]
            mine: dict[str, Any] = {}
            for place in places:
                mine |= {
                    f"{place}.{name}": values
                    for name, values in plain(made[place].state_dict()).items()
                }
            mesh.group().barrier()
        assert whole_state  # a stage of Dropout alone has none
        for name, values in mine.items():
            np.testing.assert_array_equal(values, wanted[name], err_msg=name)
        return whole_state

    states = on_ranks(before, save)
    prefix = "0." if whole and "pp" not in before else ""
    saved = mm.load(path)["model"]
    behind = {f"{1 if whole else len(names)}.{name}" for name in ("weight", "bias") if is_split}
    assert {f"{prefix}{name}" for name in wanted} | behind == saved.keys() - {"step"}
    assert states[0].keys() == saved.keys() - {"step"}
    if ("pp" in before) != ("pp" in after) and whole:
        return  # the modules have other names
    for loaded in (on_ranks(after, load), on_ranks(after, lambda mesh: take(states[-1], mesh))):
        for state in loaded:
            assert state.keys() == states[0].keys()
            for name, values in state.items():
                np.testing.assert_array_equal(values, states[0][name], err_msg=name)


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_statistics_of_the_first_replica_are_the_model_s(dims, tmp_path):
    """Each replica has those of its rows; what is saved and given are the first one's."""
    source = tn.Sequential(tn.BatchNorm1d(3), tn.Linear(3, 3), tn.BatchNorm1d(3), tn.Linear(3, 1))
    rng = np.random.default_rng(0)
    x, y = rng.normal(5.0, 3.0, (8, 3)).astype("f4"), np.zeros((8, 1), "f4")

    def body(mesh):
        made, model = modelled(source, mesh, 0, False)
        for _ in range(3):
            model.train_step(x, y, loss=nn.mse_loss)
        mm.save(tmp_path / "c", {"model": model})
        state = model.full_state_dict()
        again, fresh = modelled(source, mesh, 0, False)
        mm.load(tmp_path / "c", {"model": fresh})
        return made, state, again, fresh.full_state_dict()

    found = on_ranks(dims, body)
    saved = mm.load(tmp_path / "c")["model"]
    first = tn.BatchNorm1d(3)  # what PyTorch alone makes of the first replica's rows
    parts = np.array_split(x[:4], 2) if "pp" in dims else [x[:4]]
    for part in parts * 3:
        first(torch.from_numpy(part))
    for _, state, _, again in found:
        for name, values in first.state_dict().items():
            np.testing.assert_allclose(state[f"0.{name}"], values, rtol=1e-6)
        for name, values in saved.items():
            if name != "step":
                np.testing.assert_array_equal(state[name], values)
                np.testing.assert_array_equal(again[name], values)
    # All replicas have loaded them; before each had its own.
    firsts = [one for one in found if one[0][0].num_batches_tracked]
    assert len({one[0][0].running_mean.numpy().tobytes() for one in firsts}) == 2
    assert len({one[2][0].running_mean.numpy().tobytes() for one in firsts}) == 1


def test_a_checkpoint_without_buffers_is_told_and_loaded_if_that_is_wished(tmp_path):
    source = filled(["batch norm", "linear"], 1)

    def body(mesh):
        made, model = modelled(source, mesh, 0, False)
        state = model.full_state_dict()
        old = {name: value for name, value in state.items() if "running" not in name}
        mm.save(tmp_path / "old", {"model": old}, mesh=mesh)
        mm.save(tmp_path / "more", {"model": {**state, "0.mean": np.ones(3)}}, mesh=mesh)
        missing = ("missing: ['0.running_mean', '0.running_var']", "buffers", "strict=False")
        with raises(ModuleError, *missing):
            mm.load(tmp_path / "old", {"model": model})
        with raises(ModuleError, "0.mean"):
            mm.load(tmp_path / "more", {"model": model})
        with raises(ModuleError, *missing[:2], "full_state_dict"):
            model.load_state_dict(old)
        with raises(ShapeError, "0.running_mean", (4,), (3,)):
            model.load_state_dict({**state, "0.running_mean": np.ones(3)})
        with raises(DTypeError, "0.num_batches_tracked", "int64", "float64"):
            model.load_state_dict({**state, "0.num_batches_tracked": np.ones(())})
        made[0].running_mean += 1
        mm.load(tmp_path / "old", {"model": model}, strict=False)
        np.testing.assert_array_equal(made[0].running_mean, state["0.running_mean"] + 1)
        model.load_state_dict({**state, **old})
        np.testing.assert_array_equal(made[0].running_mean, state["0.running_mean"])
        return True

    assert on_ranks("dp=2", body) == [True] * 2


def test_buffers_that_differ_at_first_are_refused_or_broadcast():
    def body(mesh):
        made = tn.Sequential(tn.BatchNorm1d(3))
        made[0].running_mean += mesh.rank
        with raises(MismatchError, "buffer 0.running_mean", "broadcast=True"):
            mm.DataParallel(mt.wrap_each(made)[0], mesh)
        model = mm.DataParallel(mt.wrap_each(made)[0], mesh, broadcast=True)
        return model.state_dict()["0.running_mean"].tolist()

    assert on_ranks("dp=2", body) == [[0.0] * 3] * 2


class Extra(torch.nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}


@pytest.mark.parametrize("make", [lambda: Extra(2, 2), lambda: Sparse()], ids=["extra", "sparse"])
def test_what_no_checkpoint_can_hold_trains_and_is_refused_when_saved(make, tmp_path):
    def body(mesh):
        model = mm.DataParallel(mt.wrap(make()), mesh, loss=nn.mse_loss, broadcast=True)
        model.train_step(np.ones((4, 2), "f4"), np.ones((4, 2), "f4"))
        for save in (lambda: mm.save(tmp_path / "c", {"model": model}), model.full_state_dict):
            with pytest.raises(MpimeshError, match=make().__class__.__name__):
                save()
        return True

    assert on_ranks("dp=2", body) == [True] * 2


class Sparse(torch.nn.Linear):
    """A module with a buffer that no array can be."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("links", torch.eye(2).to_sparse())


def test_a_layer_is_saved_with_its_buffers_without_a_model(tmp_path):
    source, other = (filled(["batch norm", "own"], seed) for seed in (0, 1))
    layer, again = (nn.Sequential(mt.wrap_each(one)) for one in (source, other))
    mm.save(tmp_path / "c", {"layer": layer})
    mm.load(tmp_path / "c", {"layer": again})
    wanted, found = plain(source.state_dict()), plain(other.state_dict())
    np.testing.assert_equal(found, wanted)
    third = filled(["batch norm", "own"], 2)
    nn.Sequential(mt.wrap_each(third)).load_state_dict(layer.state_dict())
    np.testing.assert_equal(plain(third.state_dict()), wanted)
