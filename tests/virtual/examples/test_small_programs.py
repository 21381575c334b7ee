"""The examples of one file on virtual ranks, against other libraries and closed formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from tests.launch.example_runs import example_module


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Return what imports an example, which then writes into an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda name: example_module(name, monkeypatch)


def on_ranks(size, main, *args):
    """Return the results of the ranks, which are to be equal, once."""
    first, *others = mm.run_virtual(size, main, *args)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    return first


def whole(make, *args):
    """Return a split array of an example as one of NumPy."""

    def main():
        with mm.DeviceMesh("rows=1") as mesh:
            return make(mesh, *args).full()

    return mm.run_virtual(1, main)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_pca_is_the_svd_of_numpy(program, ranks):
    pca = program("pca")
    variances, components = on_ranks(ranks, pca.main, 500)
    x = whole(pca.make_data, 500)
    _, singular, vectors = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(variances, singular**2 / 499, rtol=1e-9)
    cosines = np.abs((components[:3] * vectors[:3]).sum(axis=1))
    np.testing.assert_allclose(cosines, 1, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_kmeans_is_that_of_scikit_learn(program, ranks):
    cluster = pytest.importorskip("sklearn.cluster")
    kmeans = program("kmeans")
    centres, history = on_ranks(ranks, kmeans.main, 2000)
    points = whole(kmeans.make_points, 2000)
    start = points[: kmeans.CENTRES]
    theirs = cluster.KMeans(
        kmeans.CENTRES, init=start, n_init=1, tol=0, algorithm="lloyd", max_iter=50
    ).fit(points)
    np.testing.assert_allclose(centres, theirs.cluster_centers_, rtol=1e-9)
    np.testing.assert_allclose(history[-1] * len(points), theirs.inertia_, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_conjugate_gradients_solve_the_system(program, ranks):
    cg = program("conjugate_gradients")
    found = mm.run_virtual(ranks, cg.main, 10, 1e-9, 1)
    line = np.diag(np.ones(9), 1) + np.diag(np.ones(9), -1)
    matrix = 4 * np.eye(100) - np.kron(np.eye(10), line) - np.kron(line, np.eye(10))
    exact = np.linalg.solve(matrix, cg.right_side(10, slice(0, 10)).reshape(-1))
    assert {*found[0]} == {"split arrays", "blocks and plans"}
    for name in found[0]:
        x = np.concatenate([results[name][0] for results in found]).reshape(-1)
        np.testing.assert_allclose(x, exact, atol=1e-8)
        assert {results[name][1] < 1e-9 for results in found} == {True}


@pytest.mark.parametrize("ranks", [1, 3])
def test_poisson_has_the_exact_solution(program, ranks):
    poisson = program("poisson_fft")
    errors = mm.run_virtual(ranks, poisson.main, (6, 12, 24))[0]
    assert errors[0] > errors[1]
    assert errors[1] < 1e-3
    assert errors[2] < 1e-11


def by_hand(layers, x, target, steps, lr=0.001):
    """Return the losses of a chain of linear layers and ReLUs that AdamW trains."""
    moments = [[np.zeros_like(one), np.zeros_like(one)] for pair in layers for one in pair]
    losses = []
    for step in range(1, steps + 1):
        inputs = [x]
        for weight, bias in layers[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
        scores = inputs[-1] @ layers[-1][0] + layers[-1][1]
        e = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = e / e.sum(axis=1, keepdims=True)
        rows = np.arange(len(x))
        losses.append(-np.log(shares[rows, target]).mean())
        shares[rows, target] -= 1
        gradients: list[Any] = []
        d = shares / len(x)
        for (weight, _), given in zip(layers[::-1], inputs[::-1], strict=True):
            gradients[:0] = [given.T @ d, d.sum(axis=0)]
            d = (d @ weight.T) * (given > 0)
        for one, gradient, (mean, square) in zip(
            [one for pair in layers for one in pair], gradients, moments, strict=True
        ):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            one *= 1 - lr * 0.01
            corrected = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            one -= lr * mean / (1 - 0.9**step) / corrected
    return losses


def test_zbv_trains_as_the_formulas_do(program, tmp_path):
    """Its first weights are those of the same pipeline, loaded into NumPy."""
    zbv = program("pipeline_zbv")
    found = on_ranks(2, lambda: [zbv.main(3, 32)])[0]

    def main():
        with mm.DeviceMesh("pp=1") as mesh:
            pipe = mm.PipelineParallel(zbv.make_stages(4), 1, mesh=mesh, schedule="interleaved")
            return {name: one.copy() for name, one in pipe.state_dict().items()}

    state = {k: np.asarray(v, float) for k, v in mm.run_virtual(1, main)[0].items() if "." in k}
    names = [name for name in state if name.endswith("weight")]
    layers = [[state[name].T.copy(), state[name.replace("weight", "bias")]] for name in names]
    x, target = zbv.make_batch(32)
    np.testing.assert_allclose(found, by_hand(layers, x.astype(float), target, 3), rtol=2e-5)
    for picture in ("pipeline_zbv.svg", "schedule_zbv.svg"):
        assert (tmp_path / "out" / picture).read_text().startswith("<svg")


def test_a_resumed_run_has_the_losses_of_one_without_a_stop(program):
    stopped, straight = on_ranks(2, program("resume").main, 6)
    np.testing.assert_allclose(stopped, straight, rtol=1e-5)
    assert straight[-1] < straight[0]


def test_overlap_times_every_way(program, monkeypatch):
    overlap = program("overlap")
    monkeypatch.setattr(overlap, "LATE_S", 0.0)
    for seconds in mm.run_virtual(2, overlap.main, 1, 1):
        assert list(seconds) == list(overlap.WAYS)
        assert all(0 < one < 60 for pair in seconds.values() for one in pair)


def test_pictures_are_drawn_or_it_is_said_what_draws_them(program, monkeypatch, capsys, tmp_path):
    figure = program("common.figure")
    pytest.importorskip("matplotlib")
    figure.save_figure("a.svg", lambda axes: axes.plot([1, 2]))
    assert "<svg" in (tmp_path / "out/a.svg").read_text()
    assert capsys.readouterr().out == "wrote out/a.svg\n"
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    figure.save_figure("b.svg", lambda axes: axes.plot([1, 2]))
    said = capsys.readouterr().out
    assert said.startswith("SKIPPED")
    assert "b.svg" in said
    assert "pip install matplotlib" in said
    assert not (tmp_path / "out/b.svg").exists()
