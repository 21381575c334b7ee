"""Formulas that run as one kernel each on CuPy's arrays. The layers hold their derivations."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["exp_less", "gelu", "gelu_slope", "gelu_tanh", "gelu_tanh_slope", "scale_and_shift"]

Formula = Callable[..., Any]


def gelu(xp: ModuleType) -> Formula:
    """Of x and the error function of x / sqrt(2): GELU."""

    def formula(x: Any, erf: Any) -> Any:
        return x * ((erf + 1.0) * 0.5)

    return formula


def gelu_slope(xp: ModuleType) -> Formula:
    """Of x and the error function of x / sqrt(2): GELU and its derivative."""

    def formula(x: Any, erf: Any) -> Any:
        share = (erf + 1.0) * 0.5
        density = xp.exp(xp.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        return x * share, share + density * x

    return formula


def gelu_tanh(xp: ModuleType) -> Formula:
    """Of x: GELU by tanh."""
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715

    def formula(x: Any) -> Any:
        tanh = xp.tanh((xp.square(x) * (scale * cubic) + scale) * x)
        return (tanh + 1.0) * x * 0.5

    return formula


def gelu_tanh_slope(xp: ModuleType) -> Formula:
    """Of x: GELU by tanh and its derivative."""
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715

    def formula(x: Any) -> Any:
        square = xp.square(x)
        tanh = xp.tanh((square * (scale * cubic) + scale) * x)
        inner = square * (3.0 * scale * cubic) + scale
        slope = xp.subtract(1.0, xp.square(tanh)) * inner * x + tanh
        return (tanh + 1.0) * x * 0.5, (slope + 1.0) * 0.5

    return formula


def scale_and_shift(xp: ModuleType) -> Formula:
    """Of rows without their mean, their scales, a weight and a bias: a layer norm, in two steps."""

    def formula(centred: Any, scale: Any, weight: Any, bias: Any) -> Any:
        normal = centred * scale
        return normal, normal * weight + bias

    return formula


def exp_less(xp: ModuleType) -> Formula:
    """Of scores and what to take off: the exponentials of a softmax."""

    def formula(scores: Any, base: Any) -> Any:
        return xp.exp(scores - base)

    return formula
