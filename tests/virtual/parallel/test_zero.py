"""Optimizer state divided among replicas: the same training, in a part of the memory."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    BudgetError,
    MismatchError,
    ModuleError,
    ModuleStateError,
    ShapeError,
    StageError,
)
from mpimesh.parallel.bucket import shard_sizes
from mpimesh.parallel.optimizer_shards import runs_of
from tests.helpers.depth import deep, examples
from tests.helpers.parallel_models import (
    STAGE,
    assert_equal,
    assert_same,
    batch,
    cut,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
    train_alone,
    train_by,
    zero_optimizer,
)
from tests.helpers.parallel_tied import tied_batch, tied_pipeline, train_tied_alone
from tests.helpers.parallel_traps import assert_nothing_left, error_of, trapped_stages
from tests.helpers.raises import raises

pytestmark = pytest.mark.usefixtures("stage")

OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01, weight_decay=0.01),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
}


@given(st.integers(0, 500), st.sampled_from([1, 4, 8]), st.integers(1, 9))
def test_shards_cover_a_bucket_in_order(size, itemsize, ranks):
    sizes = shard_sizes(size, itemsize, ranks)
    assert len(sizes) == ranks
    assert sum(sizes) == size
    assert all(one >= other for one, other in pairwise(sizes))
    assert all(one * itemsize % 64 == 0 for one, after in pairwise(sizes) if after)
    assert max(sizes) - size / ranks < 64 / itemsize + 1


@given(
    st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.integers(0, 1)), max_size=12),
)
def test_runs_are_neighbours_of_one_kind(parameters):
    kinds = [None if owner is None else (owner, steps) for owner, steps in parameters]
    runs = runs_of(kinds)
    assert [place for run in runs for place in run] == [
        place for place, kind in enumerate(kinds) if kind is not None
    ]
    for run in runs:
        assert run.step == 1
        assert len({kinds[place] for place in run}) == 1
    for one, after in pairwise(runs):
        assert kinds[one[0]] != kinds[after[0]] or after[0] > one[-1] + 1


def test_an_example_of_runs():
    kinds = [(0, 1), (0, 1), None, (0, 1), (1, 1), (1, 0)]
    assert runs_of(kinds) == [range(2), range(3, 4), range(4, 5), range(5, 6)]


def train_both(mesh, make, *, rows=13, steps=3, inside=False, wrap=None, **options):
    """Train with whole state and with divided state, clipping; return both courses and states."""
    found = []
    num_stages = options.pop("num_stages", None)
    for zero in (None, STAGE[0]):
        stages = None if num_stages is None else cut(num_stages)
        pipe = make_pipeline(mesh, stages=stages, **options)
        optimizer = make(pipe.parameters())
        if zero is not None:
            optimizer = mm.ParallelOptimizer(optimizer, pipe, zero=zero)
        losses = []
        for step in range(steps):
            given = optimizer if inside else None
            x, target = batch(step, rows)
            x = x.astype(options.get("dtype", "float64"))
            losses.append(pipe.train_step(x, target, loss=nn.cross_entropy, optimizer=given))
            if not inside:
                # Bits hang on how squares are added up, so nothing is to be clipped here.
                assert pipe.clip_grad_norm(1e9) > 0
                optimizer.step()
        pipe.check_replicas()
        found.append((losses, state_of(pipe), optimizer.state_dict()))
    return found


def assert_same_state(one, other):
    assert {key: one[key] for key in one if key != "params"} == {
        key: other[key] for key in other if key != "params"
    }
    for mine, theirs in zip(one["params"], other["params"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=name, strict=True)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("bucket_bytes", [*deep(1), 300, *deep(10**6)])
def test_parameters_and_state_are_the_same_bit_for_bit(make, bucket_bytes):
    """On virtual ranks sums go in the order of the ranks either way."""

    def body(mesh):
        one, other = train_both(mesh, make, bucket_bytes=bucket_bytes)
        assert one[0] == other[0]
        assert_equal(one[1], other[1])
        assert_same_state(one[2], other[2])

    on_ranks("dp=3", body, rendezvous=True)


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        *deep(("dp=1", {}), ("dp=2", {"overlap": False})),
        ("dp=4", {"dtype": "float16"}),
        *deep(("pp=2", {"schedule": "zb1p"})),
        ("dp=2,pp=2", {"schedule": "interleaved", "num_stages": 4}),
        *deep(("dp=2,pp=2", {"rows": 1})),
    ],
)
def test_any_mesh_and_schedule(dims, options):
    def body(mesh):
        one, other = train_both(mesh, OPTIMIZERS["adam"], inside=True, **options)
        assert one[0] == other[0]
        assert_equal(one[1], other[1])
        assert_same_state(one[2], other[2])

    on_ranks(dims, body, rendezvous=True)


def train_divided(mesh, make_model, batch_of, rows, steps=3):
    pipe = make_model(mesh)
    optimizer = zero_optimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe)

    def train_step(step):
        return pipe.train_step(*batch_of(step, rows), loss=nn.cross_entropy)

    trained = train_by(
        steps,
        pipe.parameters(),
        train_step,
        clip=lambda: pipe.clip_grad_norm(0.5),
        state=lambda: state_of(pipe),
        outputs=lambda x: pipe.forward(x, everywhere=True),
        optimizer=optimizer,
    )
    pipe.check_replicas()
    return trained


@pytest.mark.parametrize("dims", ["dp=2", "dp=3", "dp=2,pp=2"])
def test_it_trains_like_one_process_with_clipping(dims):
    expected = train_alone(3, 13)
    for trained in on_ranks(dims, partial(train_divided, make_model=make_pipeline, **LIKE_ONE)):
        assert_same(trained, expected)


LIKE_ONE = {"batch_of": batch, "rows": 13}


@pytest.mark.parametrize("dims", ["pp=2", "dp=2,pp=2", "pp=4"])
def test_tied_parameters_are_divided_by_all_that_hold_them(dims):
    expected = train_tied_alone(3, 13)

    def body(mesh):
        pipe = tied_pipeline(mesh)
        optimizer = zero_optimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe)
        norms, losses = [], []
        for step in range(3):
            losses.append(pipe.train_step(*tied_batch(step, 13), loss=nn.cross_entropy))
            norms.append(pipe.clip_grad_norm(0.5))
            optimizer.step()
        pipe.check_replicas()
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-11)
        for name, values in state_of(pipe).items():
            np.testing.assert_allclose(values, expected.state[name], rtol=1e-8, atol=1e-11)

    on_ranks(dims, body, rendezvous=True)


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_steps_that_accumulate_are_one_large_batch(dims):
    def body(mesh):
        x, target = batch(0, 20)
        states = []
        for parts in ([slice(0, 20)], [slice(0, 7), slice(7, 12), slice(12, 20)]):
            pipe = make_pipeline(mesh, stages=without_dropout(mesh))
            optimizer = zero_optimizer(optim.SGD(pipe.parameters(), lr=0.1), pipe)
            for _ in range(2):
                train = partial(pipe.train_step, loss=nn.cross_entropy, denominator=20)
                with pipe.no_sync():
                    for part in parts[:-1]:
                        train(x[part], target[part])
                train(x[parts[-1]], target[parts[-1]], optimizer=optimizer)
            states.append(state_of(pipe))
        for name, values in states[0].items():
            np.testing.assert_allclose(values, states[1][name], rtol=1e-12, atol=1e-15)

    on_ranks(dims, body)


def without_dropout(mesh):
    num_stages = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
    return cut(num_stages, [layer for layer in layers() if not isinstance(layer, nn.Dropout)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_state_takes_a_part_of_the_memory(ranks):
    def body(mesh):
        model = mm.DataParallel(
            nn.Sequential(nn.Linear(100, 150), nn.ReLU(), nn.Linear(150, 10)),
            mesh,
            loss=nn.mse_loss,
            dtype="float64",
            bucket_bytes=40_000,
        )
        adam = optim.Adam(model.parameters())
        optimizer = zero_optimizer(adam, model)
        rng = np.random.default_rng(0)
        model.train_step(rng.normal(size=(8, 100)), rng.normal(size=(8, 10)), optimizer=optimizer)
        held = [
            array.nbytes
            for state in adam.state_dict()["params"]
            for name, array in state.items()
            if name != "steps"
        ]
        whole = sum(8 * parameter.size for parameter in model.parameters())
        assert sum(parameter.size for parameter in adam.params) <= whole / 8 / ranks + 100
        return sum(held), 2 * whole

    held, whole = zip(*on_ranks(f"dp={ranks}", body), strict=True)
    assert sum(held) == whole[0]
    assert max(held) < 1.1 * whole[0] / ranks


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (2, 1), (1, 3)])
@settings(max_examples=examples(3))
@given(data=st.data())
def test_a_state_fits_any_number_of_replicas(before, after, data):
    make = OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))]
    bucket_bytes = data.draw(st.sampled_from([1, 300, 10**6]))

    def start(mesh):
        pipe = make_pipeline(mesh, bucket_bytes=bucket_bytes)
        optimizer = zero_optimizer(make(pipe.parameters()), pipe)
        for step in range(2):
            pipe.train_step(*batch(step, 12), loss=nn.cross_entropy, optimizer=optimizer)
        return pipe.full_state_dict(), optimizer.state_dict()

    def go_on(mesh, divided):
        pipe = make_pipeline(mesh)
        pipe.load_state_dict(values)
        pipe.step = 2
        optimizer: Any = make(pipe.parameters())
        if divided:
            optimizer = zero_optimizer(optimizer, pipe)
        optimizer.load_state_dict(state)
        pipe.train_step(*batch(2, 12), loss=nn.cross_entropy, optimizer=optimizer)
        return state_of(pipe), optimizer.state_dict()

    values, state = on_ranks(f"dp={before}", start)[0]
    divided = on_ranks(f"dp={after}", partial(go_on, divided=True))
    whole = on_ranks(f"dp={after}", partial(go_on, divided=False))
    for one, other in zip(divided, whole, strict=True):
        assert_equal(one[0], other[0])
        assert_same_state(one[1], other[1])


def test_several_optimizers_for_parameters_of_several_kinds():
    def body(mesh):
        states = []
        for zero in (0, STAGE[0]):
            pipe = make_pipeline(mesh)
            named = pipe.named_parameters()
            kinds = [
                optim.AdamW([p for name, p in named if name.endswith("weight")], weight_decay=0.1),
                optim.SGD([p for name, p in named if name.endswith("bias")], lr=0.5, momentum=0.5),
            ]
            optimizer = mm.ParallelOptimizer(kinds, pipe, zero=zero)
            for step in range(3):
                if step == 2:
                    kinds[0].lr = 0.1
                pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            states.append((state_of(pipe), optimizer.state_dict()))
        assert_equal(states[0][0], states[1][0])
        for one, other in zip(states[0][1], states[1][1], strict=True):
            assert_same_state(one, other)

    on_ranks("dp=3", body)


def test_freezing_and_thawing_keeps_the_state():
    """Parameters have other counts of steps afterwards, and the state is that of whole ones."""

    def body(mesh):
        states = []
        for zero in (0, STAGE[0]):
            pipe = make_pipeline(mesh)
            optimizer = mm.ParallelOptimizer(
                optim.Adam(pipe.parameters(), lr=0.01), pipe, zero=zero
            )
            frozen = pipe.parameters()[2]
            for step in range(4):
                if step in (1, 2):
                    frozen.requires_grad = step == 2
                    pipe.rebuild_buckets()
                pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            states.append((state_of(pipe), optimizer.state_dict()))
        assert_equal(states[0][0], states[1][0])
        assert_same_state(states[0][1], states[1][1])
        assert [one["steps"] for one in states[1][1]["params"]].count(3) == 1

    on_ranks("dp=2", body)


def make(mesh, **options):
    pipe = make_pipeline(mesh)
    return pipe, mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe, **options)


@pytest.mark.parametrize(("kind", "failing"), [("F", 0), ("B", 3), ("B", 2)])
def test_a_failure_anywhere_leaves_all_parameters(kind, failing):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        optimizer = zero_optimizer(optim.Adam(pipe.parameters(), lr=0.1), pipe)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        before = state_of(pipe), optimizer.state_dict()
        if mesh.rank == failing:
            # In the last backward, when the sums of others may have begun.
            traps[mesh.coord("pp")].arm(kind, 3)
        assert type(error_of(partial(train, *batch(1, 16)))) is StageError
        assert_equal(state_of(pipe), before[0])
        assert_nothing_left(mesh)
        for trap in traps:
            trap.disarm()
        with raises(ModuleStateError, "train_step()", "step()", "no_sync()"):
            optimizer.step()
        with raises(ModuleStateError, "train_step()", "clip_grad_norm()"):
            pipe.clip_grad_norm(1.0)
        train(*batch(1, 16))
        assert any(np.any(state_of(pipe)[name] != before[0][name]) for name in before[0])
        pipe.check_replicas()

    on_ranks("dp=2,pp=2", body, rendezvous=True)


class Breaks(optim.SGD):
    """Fails at one update of one rank."""

    left = -1
    error: BaseException = FloatingPointError("broken")

    def _update(self, *arguments):
        self.left -= 1
        if not self.left:
            raise self.error
        super()._update(*arguments)


def test_an_update_that_raises_ends_the_step_on_all_ranks_and_the_replicas_stay_equal():
    def body(mesh):
        pipe = make_pipeline(mesh)
        broken = Breaks(pipe.parameters(), lr=0.1, momentum=0.9)
        optimizer = zero_optimizer(broken, pipe)
        train = partial(pipe.train_step, loss=nn.cross_entropy)
        train(*batch(0, 16), optimizer=optimizer)
        values, state = pipe.full_state_dict(), optimizer.full_state_dict()
        broken.left = 2 if mesh.rank == 1 else -1
        train(*batch(1, 16))
        with pytest.raises(FloatingPointError, match="broken"):
            optimizer.step()
        pipe.check_replicas()
        # Ranks have counted different numbers of steps, and each of them knows that it is so.
        train(*batch(2, 16))
        for what in (
            optimizer.step,
            optimizer.state_dict,
            optimizer.full_state_dict,
            pipe.tune_buckets,
        ):
            with raises(ModuleStateError, f"rank {mesh.rank}", "load_state_dict()"):
                what()
        pipe.load_state_dict(values)
        optimizer.load_state_dict(state)
        train(*batch(1, 16), optimizer=optimizer)
        pipe.tune_buckets()
        train(*batch(2, 16), optimizer=optimizer)
        pipe.check_replicas()
        steps = [own["steps"] for own in optimizer.state_dict()["params"]]
        assert steps == [3] * len(steps)
        return state_of(pipe)

    def expected(mesh):
        pipe = make_pipeline(mesh)
        optimizer = zero_optimizer(optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9), pipe)
        for step in range(3):
            pipe.train_step(*batch(step, 16), loss=nn.cross_entropy, optimizer=optimizer)
        return state_of(pipe)

    for found, wanted in zip(on_ranks("dp=3", body), on_ranks("dp=3", expected), strict=True):
        assert_equal(found, wanted)


def test_an_update_that_is_interrupted_ends_the_step_on_all_ranks():
    def body(mesh):
        pipe = make_pipeline(mesh)
        broken = Breaks(pipe.parameters(), lr=0.1)
        broken.left, broken.error = 2 if mesh.rank == 1 else -1, KeyboardInterrupt()
        optimizer = zero_optimizer(broken, pipe)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with pytest.raises(KeyboardInterrupt if mesh.rank == 1 else ModuleStateError):
            optimizer.step()
        pipe.check_replicas()

    on_ranks("dp=3", body)


def test_a_budget_of_one_rank_is_told_when_the_step_is_done():
    def body(mesh):
        pipe, optimizer = make(mesh, scaler=optim.LossScaler(2.0))
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        if mesh.rank == 1:
            with mesh.budget(bytes=0), pytest.raises(BudgetError):
                optimizer.step()
        else:
            optimizer.step()
        pipe.check_replicas()
        pipe.train_step(*batch(1, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.check_replicas()

    on_ranks("dp=3", body)


def test_gradients_are_hidden_between_steps_and_states_say_when():
    def body(mesh):
        pipe, optimizer = make(mesh)
        with raises(ModuleStateError, "train_step()", "step()"):
            optimizer.step()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        optimizer.step()
        with raises(ModuleStateError, "train_step()", "step()"):
            optimizer.step()
        with pipe.no_sync():
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            with raises(ModuleStateError, "train_step()", "step()", "no_sync()"):
                optimizer.step()
            assert all(parameter.grad is not None for parameter in pipe.parameters())
        # What was added up is forgotten, and does not come into the next step.
        optimizer.zero_grad()
        before = state_of(pipe)
        pipe.train_step(*batch(1, 16), loss=nn.cross_entropy, denominator=1e300)
        assert pipe.clip_grad_norm(1.0) < 1e-290
        pipe.parameters()[0].data = pipe.parameters()[0].data.copy()
        with raises(ModuleStateError, pipe.parameters()[0], "parameter.data[...]"):
            optimizer.step()
        assert_equal(state_of(pipe), before)
        assert optimizer.lr == 0.01
        assert "Adam" in repr(optimizer)
        with raises(ModuleStateError, "Adam", "ParallelOptimizer", "step()"):
            optimizer.optimizers[0].step()

    on_ranks("dp=2", body)


class WholeNorm(optim.SGD):
    elementwise = False


def test_wrong_arguments_are_refused():
    def body(mesh):
        pipe = make_pipeline(mesh)
        parameters = pipe.parameters()
        other = nn.Linear(2, 2)
        wrong: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = [
            ([optim.SGD(parameters, lr=1)], {"zero": 4}, ("zero", 0, 3, 4)),
            ([optim.SGD(parameters, lr=1)], {"zero": -1}, ("zero", 0, 3, -1)),
            ([optim.SGD(parameters, lr=1)], {"zero": 1.0}, ("zero", 0, 3, 1.0)),
            ([WholeNorm(parameters, lr=1)], {}, ("WholeNorm", "zero=0")),
            (
                [optim.SGD(other.parameters(), lr=1)],
                {},
                (other.parameters()[0], "model.parameters()"),
            ),
            ([optim.SGD(parameters, lr=1)] * 2, {}, (parameters[0], "two optimizers")),
            (["adam"], {}, ("optimizer", "mpimesh.optim", "str")),
            ([], {}, ("optimizer", "none")),
        ]
        for optimizers, options, values in wrong:
            with raises(ModuleError, "ParallelOptimizer", *values):
                mm.ParallelOptimizer(optimizers, pipe, **options)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        plain = optim.SGD(parameters, lr=1)
        optimizer = mm.ParallelOptimizer(WholeNorm(parameters, lr=1), pipe, zero=0)
        with raises(ModuleError, "model", "ParallelOptimizer", "list"):
            zero_optimizer(plain, pipe)
        with raises(ModuleError, "model", "ParallelOptimizer", "optimizer=", plain):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=plain)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        with raises(ModuleError, "max_norm", "got 0"):
            pipe.clip_grad_norm(0)

    on_ranks("dp=2", body)


def test_what_is_wrong_on_one_rank_is_told_on_all():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with raises(MismatchError, "rank 0", "zero=1", "rank 1", "zero", 2):
            mm.ParallelOptimizer(optim.Adam(pipe.parameters()), pipe, zero=1 + mesh.rank)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("zero", [0, 1])
def test_clipping_is_of_one_step_only(zero):
    """Also where buckets are made anew, whose sums are counted from the first again."""

    def body(mesh):
        states = []
        for then in ("", "other sums", "other buckets"):
            pipe = make_pipeline(mesh)
            sgd = optim.SGD(pipe.parameters(), lr=0.1)
            optimizer = mm.ParallelOptimizer(sgd, pipe, zero=zero)
            if then:
                pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
                pipe.clip_grad_norm(1e-3)
                pipe.step = 0
            if then == "other buckets":
                pipe.rebuild_buckets()
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
            optimizer.step()
            states.append(state_of(pipe))
        assert_equal(states[0], states[1])
        assert_equal(states[0], states[2])

    on_ranks("dp=2", body)


def test_gradients_under_way_are_not_divided():
    def body(mesh):
        pipe = make_pipeline(mesh)
        with pipe.no_sync():
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with raises(ModuleStateError, f"rank {mesh.rank}", "synchronize()", "no_sync()"):
            zero_optimizer(optim.Adam(pipe.parameters()), pipe)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("what", ["kind", "zero", "order"])
def test_ranks_that_differ_are_told(what):
    def body(mesh):
        pipe = make_pipeline(mesh)
        odd = mesh.rank == 1
        kind = optim.AdamW if odd and what == "kind" else optim.Adam
        zero = 0 if odd and what == "zero" else 1
        parameters = pipe.parameters()
        # The same numbers of parameters, but others.
        at = 2 if odd and what == "order" else 4
        two = [kind(parameters[:at]), kind(parameters[at:])]
        with pytest.raises(MismatchError):
            mm.ParallelOptimizer(two, pipe, zero=zero)

    on_ranks("dp=2", body)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_state_that_does_not_fit_changes_nothing(zero):
    def body(mesh):
        pipe = make_pipeline(mesh)
        parameters = pipe.parameters()
        two = [optim.Adam(parameters[:4], lr=0.01), optim.SGD(parameters[4:], lr=0.1, momentum=0.9)]
        optimizer = mm.ParallelOptimizer(two, pipe, zero=zero)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        good = optimizer.state_dict()
        good = [{**one, "params": [copied(state) for state in one["params"]]} for one in good]
        adam, sgd = good
        bad = [
            (ModuleError, [adam]),
            (ModuleError, [sgd, adam]),
            (ModuleError, [adam, {**sgd, "params": sgd["params"][1:]}]),
            (ModuleError, [{**adam, "lr": 0.5}, {**sgd, "lr": -1.0}]),
            (ShapeError, [adam, {**sgd, "params": sgd["params"][::-1]}]),
        ]
        for error, states in bad:
            with pytest.raises(error):
                optimizer.load_state_dict(states)
            assert two[0].lr == 0.01
            for one, before in zip(optimizer.state_dict(), good, strict=True):
                for state, expected in zip(one["params"], before["params"], strict=True):
                    assert_equal(state, expected)
        train(*batch(1, 16))
        pipe.check_replicas()

    on_ranks("dp=2", body)


def copied(state):
    return {name: np.copy(value) for name, value in state.items()}


def test_zero_grad_of_the_optimizer_that_was_given_does_no_harm():
    def body(mesh):
        states = []
        for zeroed in (False, True):
            pipe, optimizer = make(mesh)
            for step in range(2):
                if zeroed:
                    optimizer.optimizers[0].zero_grad()
                pipe.train_step(*batch(step, 16), loss=nn.cross_entropy, optimizer=optimizer)
            states.append(state_of(pipe))
        assert_equal(*states)

    on_ranks("dp=2", body)


def test_a_whole_model_loads_into_divided_memory():
    def body(mesh):
        pipe, optimizer = make(mesh)
        values = pipe.full_state_dict()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.load_state_dict(values)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        other = make_pipeline(mesh)
        adam = optim.Adam(other.parameters(), lr=0.01)
        other.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=adam)
        other.load_state_dict(values)
        other.step = pipe.step - 1
        other.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=adam)
        assert_equal(state_of(pipe), state_of(other))

    on_ranks("dp=2,pp=2", body)


def test_stages_with_nothing_to_train():
    """One has no parameters, one frozen ones only."""

    def body(mesh):
        stages = [
            mm.PipelineStage(0).add_layer(nn.Linear(6, 8)),
            mm.PipelineStage(1).add_layer(nn.ReLU()),
            mm.PipelineStage(2).add_layer(nn.Linear(8, 5)),
        ]
        for parameter in stages[0].parameters():
            parameter.requires_grad = False
        pipe = make_pipeline(mesh, stages=stages)
        adam = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer = zero_optimizer(adam, pipe, scaler=optim.LossScaler(4.0))
        before = state_of(pipe)
        for step in range(2):
            pipe.train_step(*batch(step, 16), loss=nn.cross_entropy)
            assert pipe.clip_grad_norm(1.0) > 0
            optimizer.step()
            tuned = pipe.tune_buckets()
            assert (tuned is not None) == (mesh.coord("pp") == 2)
        changed = [bool((before[name] != values).any()) for name, values in state_of(pipe).items()]
        assert changed == [[False] * 2, [], [True] * 2][mesh.coord("pp")]
        optimizer.load_state_dict(optimizer.state_dict())
        pipe.check_replicas()

    on_ranks("dp=2,pp=3", body)
