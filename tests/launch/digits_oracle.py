"""The training of examples/train_digits.py in plain NumPy: one process, no microbatches."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from sklearn.datasets import load_digits

from mpimesh import nn

BATCH_SIZE = 100
"""15 steps an epoch, the last of 37 rows: nothing divides by replicas times microbatches."""

HIDDEN = 64
SEED = 3
OPTIONS = (f"--dtype float64 --batch-size {BATCH_SIZE} --hidden {HIDDEN} --seed {SEED}").split()

LR, BETA1, BETA2, EPS, DECAY = 0.001, 0.9, 0.999, 1e-8, 0.01


def first_weights() -> list[list[np.ndarray]]:
    """The weights and biases that the layers of the whole model begin with."""
    sizes = [64, HIDDEN, HIDDEN, HIDDEN, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(layers[:-1])
    model.materialize(seed=SEED, dtype="float64")
    state = model.state_dict()
    return [[state[f"{2 * i}.weight"].copy(), state[f"{2 * i}.bias"].copy()] for i in range(4)]


@cache
def losses(epochs: int) -> np.ndarray:
    """The loss of each step."""
    images, digits = load_digits(return_X_y=True)
    train = np.random.default_rng(0).permutation(len(images))[: int(0.8 * len(images))]
    x, target = images[train] / 16, digits[train]
    weights = first_weights()
    moments = [[(np.zeros_like(w), np.zeros_like(w)) for w in layer] for layer in weights]
    found = []
    for epoch in range(epochs):
        order = np.random.default_rng([SEED, epoch]).permutation(len(x))
        for start in range(0, len(x), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            loss, gradients = value_and_gradients(weights, x[rows], target[rows])
            found.append(loss)
            for layer, states, grads in zip(weights, moments, gradients, strict=True):
                for i, gradient in enumerate(grads):
                    adamw(layer[i], gradient, *states[i], len(found))
    return np.array(found)


def value_and_gradients(weights, x, target):
    inputs = [x]
    for number, (weight, bias) in enumerate(weights):
        y = inputs[-1] @ weight.T + bias
        inputs.append(np.maximum(y, 0) if number < len(weights) - 1 else y)
    scores = inputs.pop()
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=1, keepdims=True)
    places = np.arange(len(x)), target
    loss = -np.log(shares[places]).mean()
    dy = shares
    dy[places] -= 1
    dy /= len(x)
    gradients = []
    for (weight, _), layer_input in zip(reversed(weights), reversed(inputs), strict=True):
        gradients.append([dy.T @ layer_input, dy.sum(axis=0)])
        dy = (dy @ weight) * (layer_input > 0)
    return loss, gradients[::-1]


def adamw(weight, gradient, mean, square, step):
    mean += (1 - BETA1) * (gradient - mean)
    square += (1 - BETA2) * (gradient**2 - square)
    weight *= 1 - LR * DECAY
    weight -= LR * (mean / (1 - BETA1**step)) / (np.sqrt(square / (1 - BETA2**step)) + EPS)
