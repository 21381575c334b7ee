"""Stochastic gradient descent, and Adam with decay in the gradient or beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from mpimesh.arguments import as_flag
from mpimesh.arrays.namespace import Array, fused, is_cupy, namespace
from mpimesh.errors import ModuleError
from mpimesh.nn.parameter import Parameter
from mpimesh.optim.optimizer import DecayMask, Optimizer, check_number

__all__ = ["SGD", "Adam", "AdamW"]


class SGD(Optimizer):
    """Gradient descent, with momentum and decay if asked for.

    With g the gradient, p the parameter, and b the buffer, 0 at first::

        g = g + weight_decay * p
        b = momentum * b + g
        p = p - lr * b                      # or, with nesterov
        p = p - lr * (g + momentum * b)

    Args:
        params: The parameters.
        lr: The learning rate.
        momentum: Share of the buffer that each step keeps, in [0, 1).
        nesterov: Look one step ahead; needs momentum.
        weight_decay: Weight of the squared parameters in the loss, twice.
        decay_mask: Asked once for each parameter whether the decay is for it, such as
            ``lambda parameter: len(parameter.shape) > 1``, which spares biases and the scales of
            norms. None is for all.

    Raises:
        ModuleError: If a number is out of range.
    """

    numbers = ("lr", "momentum", "nesterov", "weight_decay")
    num_scratch = 2
    momentum: float
    nesterov: bool
    weight_decay: float

    def __init__(
        self,
        params: Iterable[Parameter],
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay_mask: DecayMask | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            decay_mask=decay_mask,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )

    def _checked_numbers(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        momentum = check_number("momentum", numbers["momentum"], below=1.0)
        nesterov = as_flag(numbers["nesterov"], "nesterov", ModuleError)
        if nesterov and not momentum:
            raise ModuleError("nesterov needs a momentum above 0, got 0")
        return {
            **super()._checked_numbers(numbers),
            "momentum": momentum,
            "nesterov": nesterov,
        }

    def _state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _update(
        self,
        data: Array,
        grad: Array,
        state: Sequence[Array],
        scratch: Array,
        steps: int,
        decays: bool,
    ) -> None:
        xp = namespace(data)
        change = grad
        if self.weight_decay and decays:
            change = xp.multiply(data, self.weight_decay, out=scratch[0])
            change += grad
        if self.momentum:
            (buffer,) = state
            buffer *= self.momentum
            buffer += change
            if self.nesterov:
                ahead = xp.multiply(buffer, self.momentum, out=scratch[1])
                ahead += change
                change = ahead
            else:
                change = buffer
        data -= xp.multiply(change, self.lr, out=scratch[1])


class Adam(Optimizer):
    """Adam of Kingma and Ba (2015).

    With g the gradient, p the parameter, t its count of steps, and mean and
    square 0 at first::

        g = g + weight_decay * p
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g**2
        p = p - lr / (1 - beta1**t) * mean / (sqrt(square / (1 - beta2**t)) + eps)

    Args:
        params: The parameters.
        lr: The learning rate.
        betas: What each step keeps of the mean and of the square, in [0, 1).
        eps: Keeps the quotient finite; above 0.
        weight_decay: Weight of the squared parameters in the loss, twice; None for 0.
        decay_mask: Asked once for each parameter whether the decay is for it, such as
            ``lambda parameter: len(parameter.shape) > 1``, which spares biases and the scales of
            norms. None is for all.

    Raises:
        ModuleError: If a number is out of range.
    """

    numbers = ("lr", "betas", "eps", "weight_decay")
    num_scratch = 2
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    _decoupled = False
    _usual_decay = 0.0

    def __init__(
        self,
        params: Iterable[Parameter],
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        decay_mask: DecayMask | None = None,
    ) -> None:
        decay = self._usual_decay if weight_decay is None else weight_decay
        super().__init__(
            params, lr=lr, decay_mask=decay_mask, betas=betas, eps=eps, weight_decay=decay
        )

    def _checked_numbers(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        betas = numbers["betas"]
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise ModuleError(f"betas must be two numbers, got {betas!r}")
        eps = check_number("eps", numbers["eps"])
        if not eps:
            raise ModuleError("eps must be above 0: a gradient of 0 would give 0 / 0")
        return {
            **super()._checked_numbers(numbers),
            "betas": tuple(
                check_number(f"betas[{at}]", beta, below=1.0) for at, beta in enumerate(betas)
            ),
            "eps": eps,
        }

    def _state_names(self) -> tuple[str, ...]:
        return ("mean", "square")

    def _update(
        self,
        data: Array,
        grad: Array,
        state: Sequence[Array],
        scratch: Array,
        steps: int,
        decays: bool,
    ) -> None:
        xp = namespace(data)
        mean, square = state
        beta1, beta2 = self.betas
        weight_decay = self.weight_decay if decays else 0.0
        if weight_decay and self._decoupled:
            data *= 1.0 - self.lr * weight_decay
        elif weight_decay:
            decayed = xp.multiply(data, weight_decay, out=scratch[1])
            decayed += grad
            grad = decayed
        scale, rate = 1.0 / math.sqrt(1.0 - beta2**steps), self.lr / (1.0 - beta1**steps)
        if is_cupy(data):
            betas = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
            fused(xp, _adam)(data, grad, mean, square, *betas, scale, self.eps, rate)
            return
        work = scratch[0]
        mean *= beta1
        mean += xp.multiply(grad, 1.0 - beta1, out=work)
        square *= beta2
        xp.multiply(grad, grad, out=work)
        work *= 1.0 - beta2
        square += work
        # lr / correction1 * mean / (sqrt(square) / sqrt(correction2) + eps)
        xp.sqrt(square, out=work)
        work *= scale
        work += self.eps
        xp.divide(mean, work, out=work)
        work *= rate
        data -= work


class AdamW(Adam):
    """Adam with decoupled weight decay, of Loshchilov and Hutter (2019).

    ``p = (1 - lr * weight_decay) * p`` before Adam's step without decay. Arguments and errors are
    those of :class:`Adam`; `weight_decay` is the share that a learning rate of 1 would take off,
    and 0.01 where it is None.
    """

    _decoupled = True
    _usual_decay = 0.01


def _adam(xp: ModuleType) -> Callable[..., None]:
    """Return the step as one kernel for CuPy; it changes the data, the mean and the square."""

    def formula(
        data: Any,
        grad: Any,
        mean: Any,
        square: Any,
        beta1: float,
        rest1: float,
        beta2: float,
        rest2: float,
        scale: float,
        eps: float,
        rate: float,
    ) -> None:
        mean *= beta1
        mean += grad * rest1
        square *= beta2
        square += grad * grad * rest2
        data -= mean / (xp.sqrt(square) * scale + eps) * rate

    return formula
