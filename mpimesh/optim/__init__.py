"""Optimizers: they change parameters in place, each rank its own; and schedules of their rates."""

from mpimesh.optim.factors import (
    ConstantLR,
    CosineLR,
    LinearLR,
    LossScaler,
    LRSchedule,
    LRScheduler,
    OneCycleLR,
    WarmupLR,
    clip_grad_norm,
)
from mpimesh.optim.optimizer import SGD, Adam, AdamW, Optimizer

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
