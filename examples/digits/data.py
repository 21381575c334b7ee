"""1,797 handwritten digits of 8x8 pixels, and the order in which training sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mpimesh as mm

PIXELS = 64
CLASSES = 10
TRAIN_SHARE = 0.8
SPLIT_SEED = 0
"""Which digits are for testing does not depend on --seed: accuracies can be compared."""


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers from 0 to 1, and the digits that they show.

    Attributes:
        train_x: Images to train on, shape (1437, 64).
        train_y: Their digits, shape (1437,).
        test_x: Images that training never sees, shape (360, 64).
        test_y: Their digits, shape (360,).
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load_digits(mesh: mm.DeviceMesh, dtype: Any) -> Digits:
    """Collective: rank 0 reads the digits, the others get them from it."""
    images = digits = None
    if mesh.rank == 0:
        from sklearn.datasets import load_digits as load  # slow to import, and one rank is enough

        images, digits = load(return_X_y=True)
    # root=None: whoever has an array is the root, and the others need not know its shape.
    x_to_come = mesh.group().broadcast(images, root=None)
    y_to_come = mesh.group().broadcast(digits, root=None)
    x = (x_to_come.resolve() / 16).astype(dtype)
    y = y_to_come.resolve()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    train, test = np.split(order, [int(TRAIN_SHARE * len(x))])
    return Digits(x[train], y[train], x[test], y[test])


@dataclass(frozen=True)
class Batches:
    """The rows of every training step, as a function of the step's number.

    Every rank computes the same ones, and a run that goes on from a checkpoint sees what
    the uninterrupted run would have seen.

    Attributes:
        rows: Rows to train on.
        batch_size: Rows of a batch; the last one of an epoch has what is left.
        seed: Of the order, another one for each epoch.
    """

    rows: int
    batch_size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.rows // self.batch_size)

    def __getitem__(self, step: int) -> np.ndarray:
        """Return the rows of a step; steps are counted from 1, over all epochs."""
        epoch, place = divmod(step - 1, self.per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return order[place * self.batch_size : (place + 1) * self.batch_size]
