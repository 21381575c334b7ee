"""Losses of PyTorch over a batch in parts, against the whole batch at once."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ModuleError, ShapeError
from tests.helpers.raises import raises
from tests.helpers.torch_models import mt, torch

F = torch.nn.functional
WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
RNG = np.random.default_rng(4)
SCORES = RNG.normal(size=(9, 3))
CLASSES = np.array([0, 1, 2, -100, -100, 1, 0, 2, -100])
PIXELS = RNG.normal(size=(9, 3, 4))
LABELS = np.where(RNG.random((9, 4)) < 0.3, -100, RNG.integers(0, 3, (9, 4)))
SHARES = np.full((9, 3), 1 / 3)

CASES = {
    "classes": (torch.nn.CrossEntropyLoss(), SCORES, CLASSES),
    "a function": (F.cross_entropy, SCORES, CLASSES),
    "weighted": (torch.nn.CrossEntropyLoss(weight=WEIGHT), SCORES, CLASSES),
    "smoothed": (
        torch.nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        SCORES,
        abs(CLASSES) % 3,
    ),
    "pixels": (torch.nn.CrossEntropyLoss(weight=WEIGHT), PIXELS, LABELS),
    "shares": (torch.nn.CrossEntropyLoss(), SCORES, SHARES),
    "nll": (torch.nn.NLLLoss(weight=WEIGHT, ignore_index=2), SCORES, abs(CLASSES) % 3),
    "mse": (torch.nn.MSELoss(), SCORES, SHARES),
    "function": (F.smooth_l1_loss, SCORES, SHARES),
}


@pytest.mark.parametrize("cuts", [(9,), (4, 5), (3, 2, 4), (0, 1, 8)])
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_whole(case, cuts):
    function, y, target = CASES[case]
    loss = mt.wrap_loss(function)
    whole = torch.from_numpy(y.copy()).requires_grad_()
    expected = function(whole, torch.from_numpy(target))
    expected.backward()
    denominator = loss.count(target)
    total, gradients, start = 0.0, [], 0
    for rows in cuts:
        part = slice(start, start + rows)
        value, gradient = loss.value_and_grad(y[part], target[part], denominator=denominator)
        total += value
        gradients.append(gradient)
        start += rows
    assert total == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), whole.grad.numpy(), atol=1e-15)
    assert loss(y, target) == pytest.approx(total, rel=1e-12)


def test_a_part_in_which_all_is_ignored_counts_nothing():
    loss = mt.wrap_loss(torch.nn.CrossEntropyLoss())
    value, gradient = loss.value_and_grad(SCORES[3:5], CLASSES[3:5], denominator=6)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
    with raises(ShapeError, loss, "mean"):
        loss(SCORES[3:5], CLASSES[3:5])


def test_a_sum_is_divided_by_what_it_is_told():
    loss = mt.wrap_loss(torch.nn.MSELoss(reduction="sum"))
    plain = ((SCORES - SHARES) ** 2).sum()
    value, gradient = loss.value_and_grad(SCORES, SHARES, denominator=1)
    assert value == pytest.approx(plain)
    np.testing.assert_allclose(gradient, 2 * (SCORES - SHARES))
    assert loss(SCORES, SHARES) == pytest.approx(plain / 9)


def test_trees_and_a_count_of_ones_own():
    def masked(y, target):
        error = (y["a"] - target["x"]) ** 2 * target["mask"]
        return error.sum() / target["mask"].sum()

    y = {"a": SCORES, "places": np.arange(9), "unused": SCORES}
    target = {"x": SHARES, "mask": (np.arange(9) % 3 > 0).astype(float)[:, None]}
    loss = mt.wrap_loss(masked, count=lambda target: target["mask"].sum())
    assert loss.count(target) == 6
    value, gradient = loss.value_and_grad(y, target, denominator=6)
    error = (SCORES - SHARES) * target["mask"]
    assert value == pytest.approx((error**2).sum() / 6)
    np.testing.assert_allclose(gradient["a"], 2 * error / 6)
    assert gradient["places"] is None
    assert not gradient["unused"].any()


def test_layers_of_mpimesh_are_trained_by_it():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            losses = []
            for loss in (mt.wrap_loss(torch.nn.CrossEntropyLoss()), nn.cross_entropy):
                model = mm.DataParallel(nn.Linear(3, 3), mesh, loss=loss, dtype=np.float64)
                steps = [model.train_step(SCORES, CLASSES % 3) for _ in range(2)]
                losses.append((steps, model.parameters()[0].grad.copy()))
            (one, gradient), (other, same) = losses
            np.testing.assert_allclose(one, other, rtol=1e-12)
            np.testing.assert_allclose(gradient, same)

    mm.run_virtual(2, main)


def test_what_gives_no_single_number_is_refused():
    with raises(ModuleError, "reduction='mean'", "'none'"):
        mt.wrap_loss(torch.nn.MSELoss(reduction="none"))
    with raises(ModuleError, "wrap_loss", 3):
        mt.wrap_loss(3)
    loss = mt.wrap_loss(lambda y, target: y - target)
    with raises(ModuleError, loss, "tensor"):
        loss(SCORES, SHARES)
    with raises(ModuleError, loss, "denominator", 0):
        loss.value_and_grad(SCORES, SHARES, denominator=0)
