"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpimesh.arguments import as_flag
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn.parameter import Parameter
from mpimesh.optim.optimizer import DecayMask, Optimizer, check_number

__all__ = ["SGD"]


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
        super().__init__(params, lr=lr, decay_mask=decay_mask)
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        self._set_numbers(self._checked_numbers(numbers))

    def _checked_numbers(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        momentum = check_number("momentum", numbers["momentum"], below=1.0)
        nesterov = as_flag(numbers["nesterov"], "nesterov", ModuleError)
        if nesterov and not momentum:
            raise ModuleError("nesterov needs a momentum above 0, got 0")
        return {
            **super()._checked_numbers(numbers),
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": check_number("weight_decay", numbers["weight_decay"]),
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
