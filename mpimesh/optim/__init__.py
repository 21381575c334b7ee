"""Optimizers: they change parameters in place, each rank its own."""

from mpimesh.optim.adam import Adam, AdamW
from mpimesh.optim.clip import clip_grad_norm
from mpimesh.optim.loss_scaler import LossScaler
from mpimesh.optim.optimizer import Optimizer
from mpimesh.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "LossScaler", "Optimizer", "clip_grad_norm"]
