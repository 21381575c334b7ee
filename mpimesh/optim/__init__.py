"""Optimizers: they change parameters in place, each rank its own; and schedules of their rates."""

from mpimesh.optim.optimizer import Optimizer
from mpimesh.optim.optimizers import SGD, Adam, AdamW
from mpimesh.optim.scaling import LossScaler, clip_grad_norm
from mpimesh.optim.schedulers import (
    ConstantLR,
    CosineLR,
    LinearLR,
    LRSchedule,
    LRScheduler,
    OneCycleLR,
    WarmupLR,
)

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
