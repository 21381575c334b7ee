"""Optimizers: they change parameters in place, each rank its own; and schedules of their rates."""

from mpimesh.optim.adam import Adam, AdamW
from mpimesh.optim.clip import clip_grad_norm
from mpimesh.optim.loss_scaler import LossScaler
from mpimesh.optim.optimizer import Optimizer
from mpimesh.optim.schedulers import (
    ConstantLR,
    CosineLR,
    LinearLR,
    LRSchedule,
    LRScheduler,
    OneCycleLR,
    WarmupLR,
)
from mpimesh.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ConstantLR",
    "CosineLR",
    "LRSchedule",
    "LRScheduler",
    "LinearLR",
    "LossScaler",
    "OneCycleLR",
    "Optimizer",
    "WarmupLR",
    "clip_grad_norm",
]
