"""The optimizers: their state, memory and walk over the parameters; SGD, Adam and AdamW.

An optimizer changes parameters in place. Its state is allocated once, at the first step of each
parameter, and a step goes over a parameter in blocks, so that nothing of a parameter's size is
allocated while training.

Parameters without a gradient (``grad is None``) and frozen ones are skipped: no decay, no momentum,
no count of the step. Gradient memory that a data-parallel bucket attached counts as a gradient.

Parameters of fewer than 32 bits have float32 state, and with it their values in float32, the
*master* values: steps change those, so that changes too small for the parameter's own dtype add up,
and the parameter is what they round to. Where a parameter was assigned other values, as
loading a model does, the master values follow.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from weakref import ref

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_real
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, DType, fused, is_cupy, namespace, to_numpy
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError, tell_elsewhere
from mpimesh.nn.parameter import Parameter, as_parameters

__all__ = [
    "MASTER",
    "SGD",
    "TORCH_ATTRIBUTES",
    "Adam",
    "AdamW",
    "DecayMask",
    "Optimizer",
    "check_arrays",
    "check_number",
    "check_steps",
    "numbers_text",
]

_BLOCK_ELEMENTS = 1 << 16
_MOST_STEPS = 1 << 53  # what a float can count

DecayMask = Callable[[Parameter], bool]
"""Tells whether weight decay is for a parameter."""

MASTER = "master"
"""Name in a state of the float32 values of a parameter of a smaller dtype."""


@dataclass(slots=True)
class _Slot:
    """The state of one parameter: its own count of steps, and arrays of its size."""

    arrays: dict[str, Array]
    steps: int = 0


class Optimizer(ABC):
    """Changes parameters by their gradients.

    A subclass names its numbers and its state, and says in `_update` what
    happens to a block of one parameter.

    Args:
        params: The parameters, in an order that is the same whenever the state
            is loaded. There may be none, as on a stage of activations.
        lr: The learning rate; ``optimizer.lr`` may be set between steps.
        decay_mask: Asked once for each parameter whether weight decay is for it; None is for all.
        numbers: The other ones of `numbers`, which become attributes.

    Attributes:
        decays: The answers, in the order of `params`.
        calls: The calls of :meth:`step`.

    Raises:
        ModuleError: If a number is out of range, a parameter stands twice, or `decay_mask` gives
            something else than a bool.
    """

    numbers: ClassVar[tuple[str, ...]] = ("lr",)
    """Attributes that `state_dict` holds beside the state."""
    num_scratch: ClassVar[int] = 1
    """Blocks of scratch memory that `_update` needs."""
    elementwise: ClassVar[bool] = True
    """Whether `_update` does to each element what it would do to it in any other block: only then
    may ranks divide a parameter among them."""

    def __init__(
        self,
        params: Iterable[Parameter],
        *,
        lr: float,
        decay_mask: DecayMask | None = None,
        **numbers: Any,
    ) -> None:
        self.params: Sequence[Parameter] = as_parameters(params, "params")
        if len({id(parameter) for parameter in self.params}) < len(self.params):
            raise ModuleError(f"{type(self).__name__} takes each parameter once, got one twice")
        self._set_numbers(self._checked_numbers({"lr": lr, **numbers}) if numbers else {"lr": lr})
        if decay_mask is not None and (not callable(decay_mask) or isinstance(decay_mask, type)):
            raise ModuleError(
                "decay_mask is a function that tells of a parameter whether the decay is for it, "
                f"such as lambda parameter: len(parameter.shape) > 1; got {decay_mask!r}"
            )
        self.decays: Sequence[bool] = tuple(
            decay_mask is None or _checked_answer(decay_mask(one), one) for one in self.params
        )
        self.calls = 0
        for one in self.params:
            one.trainer = ref(self)
        self._slots: dict[int, _Slot] = {}
        self._scratch: dict[tuple[ModuleType, DType], Array] = {}
        self._is_lent = False

    @property
    def lr(self) -> float:
        """The learning rate. Setting one that is negative, infinite or NaN raises ModuleError."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = check_number("lr", value)  # Python's float: NumPy's would widen float32

    @property
    def steps(self) -> int:
        """The largest number of steps of any parameter."""
        return max((slot.steps for slot in self._slots.values()), default=0)

    @property
    def is_lent(self) -> bool:
        """True if a ParallelOptimizer steps it, and knows what its parameters are."""
        return self._is_lent

    def state_names(self, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the arrays in a state with these numbers, but for master values."""
        loaded = copy.copy(self)
        loaded._set_numbers(numbers)
        return loaded._state_names()

    @abstractmethod
    def _state_names(self) -> tuple[str, ...]:
        """Return the names of the state arrays that a parameter has."""

    @abstractmethod
    def _update(
        self,
        data: Array,
        grad: Array,
        state: Sequence[Array],
        scratch: Array,
        steps: int,
        decays: bool,
    ) -> None:
        """Change `data` and `state` in place; `grad` is not to be changed.

        Shapes:
            data, grad, state[i], scratch[j]: (n,), all of one dtype.

        Args:
            data: Values of a block of a parameter.
            grad: Its gradient.
            state: Its state, in the order of `_state_names`.
            scratch: `num_scratch` rows to compute in.
            steps: Steps of this parameter, counting this one.
            decays: Whether weight decay is for this parameter.
        """

    def step(self) -> None:
        """Change every parameter that has a gradient and is not frozen.

        Raises:
            ModuleStateError: If a parameter with a gradient has no memory, or another object steps
                it, such as a :class:`~mpimesh.ParallelOptimizer`.
            ShapeError: If a parameter's memory is not C-contiguous.
        """
        if self._is_lent:
            raise ModuleStateError(
                f"this {type(self).__name__} was given to a ParallelOptimizer, which knows what "
                "its parameters and gradients are: call step() of that"
            )
        self.calls += 1
        for place in range(len(self.params)):
            self.step_at(place)

    def step_at(self, place: int, *, grad_factor: float = 1.0) -> None:
        """Change one parameter, if it has a gradient and is not frozen.

        Args:
            place: Its place in `params`.
            grad_factor: What its gradient is multiplied by, which stays as it is in memory: undoes
                the scale of a loss, or clips. The product is taken in the dtype of the state.

        Raises:
            MpimeshError: As :meth:`step`.
        """
        parameter = self.params[place]
        if parameter.grad is None or not parameter.requires_grad:
            return
        slot = self._slots.get(place)
        if slot is None:
            slot = self._slots[place] = self._new_slot(parameter)
        slot.steps += 1
        for data, grad, state, scratch in self._blocks(parameter, slot, float(grad_factor)):
            self._update(data, grad, state, scratch, slot.steps, self.decays[place])

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters; `set_to_none`, as of PyTorch, changes nothing."""
        for parameter in self.params:
            parameter.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and state: dicts, lists, numbers, and copies of the arrays.

        ``{"optimizer": "Adam", "lr": 0.001, ..., "params": [{"steps": 3, "mean": array, ...}]}``;
        ``{"steps": 0}`` of a parameter without a step. :func:`mpimesh.save` needs no copies.
        """
        state = self.live_state()
        for own in state["params"]:
            own.update({name: own[name].copy() for name in own.keys() - {"steps"}})
        return state

    def live_state(self) -> dict[str, Any]:
        """Return the :meth:`state_dict` with the arrays themselves, which steps change."""
        slots = [self._slots.get(place) or _Slot({}) for place in range(len(self.params))]
        params = [{"steps": slot.steps, **slot.arrays} for slot in slots]
        numbers = {name: getattr(self, name) for name in self.numbers}
        return {"optimizer": type(self).__name__, **numbers, "params": params}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers, and copies of the arrays, of a `state_dict`.

        Nothing is changed if it raises. A state by the names of parameters, as
        :meth:`ParallelOptimizer.full_state_dict` gives, is for
        ``ParallelOptimizer(optimizer, model, zero=0)``, which knows the names.

        Raises:
            ModuleError: If it is of another optimizer, other numbers of parameters, or lacks
                something, or has a number out of range or something else than an array.
            DTypeError: If an array is not of floating point.
            ShapeError: If an array has another shape than its parameter.
            ModuleStateError: If a parameter has no memory yet.
        """
        numbers = self.check_state(state, self.params)
        before = {name: getattr(self, name) for name in self.numbers}
        try:
            # First the numbers: they decide which arrays there are.
            self._set_numbers(numbers)
            self._slots = self._filled_slots(state["params"])
        except BaseException:
            self._set_numbers(before)
            raise

    def check_state(self, state: Any, params: Sequence[Parameter]) -> dict[str, Any]:
        """Return the numbers in a state of these parameters, as attributes hold them. Local.

        Raises:
            MpimeshError: As :meth:`load_state_dict`, if it does not fit.
        """
        _check_layout(type(self).__name__, state, self.numbers, len(params))
        numbers = self._checked_numbers({name: state[name] for name in self.numbers})
        names = self.state_names(numbers)
        for place, (parameter, own) in enumerate(zip(params, state["params"], strict=True)):
            who = f"parameter {place} ({parameter.name!r})"
            steps = check_steps(who, own)
            missing = [name for name in names if steps and name not in own]
            if missing:
                raise ModuleError(
                    f"the state of {who} lacks {missing}, which one of {own['steps']} steps has; "
                    f"it has {sorted(map(str, own))}"
                )
            check_arrays(who, own, parameter.shape)
        return numbers

    def _checked_numbers(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return `numbers` as attributes hold them, if none is out of range.

        Here the rate and the weight decay are checked; a subclass checks what else it has.
        """
        plain = {"lr", "weight_decay"} & numbers.keys()
        return {**numbers, **{name: check_number(name, numbers[name]) for name in plain}}

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            setattr(self, name, value)

    def exchange_params(
        self, params: Iterable[Parameter], decays: Iterable[bool], state: Mapping[str, Any]
    ) -> None:
        """Go on with other parameters, whether each decays, and their state, under another owner.

        For owners that divide parameters among ranks, and step them by :meth:`step_at` from now on.
        Nothing is changed if it raises, as :meth:`load_state_dict` does.
        """
        before = self.params, self.decays, self._slots
        self.params, self.decays, self._slots = tuple(params), tuple(decays), {}
        try:
            self.load_state_dict(state)
        except BaseException:
            self.params, self.decays, self._slots = before
            raise
        self._is_lent = True

    def _filled_slots(self, states: Sequence[Mapping[str, Any]]) -> dict[int, _Slot]:
        slots: dict[int, _Slot] = {}
        for place, (parameter, own) in enumerate(zip(self.params, states, strict=True)):
            if not own["steps"]:
                continue
            slots[place] = slot = self._new_slot(parameter)
            slot.steps = int(own["steps"])
            for name, array in slot.arrays.items():
                if name == MASTER and name not in own:
                    continue  # of a state that was made without: the parameter's own values
                xp = namespace(array)
                array[...] = to_numpy(own[name]) if xp is np else xp.asarray(own[name])
        return slots

    def _new_slot(self, parameter: Parameter) -> _Slot:
        data = parameter.value()
        zeros = namespace(data).zeros
        dtype = sum_dtype(data.dtype)
        arrays = {name: zeros(data.shape, dtype) for name in self._state_names()}
        if dtype != data.dtype:
            arrays[MASTER] = data.astype(dtype)
        return _Slot(arrays)

    def _blocks(
        self, parameter: Parameter, slot: _Slot, grad_factor: float
    ) -> Iterator[tuple[Array, Array, list[Array], Array]]:
        data = parameter.value()
        if not data.flags.c_contiguous:
            raise ShapeError(f"the memory of {parameter!r} must be C-contiguous to be updated")
        xp = namespace(data)
        flat, grad = data.reshape(-1), parameter.grad.reshape(-1)
        state = [slot.arrays[name].reshape(-1) for name in self._state_names()]
        master = slot.arrays[MASTER].reshape(-1) if MASTER in slot.arrays else None
        # A device has no use for blocks: each would cost its own launches.
        length = min(flat.size, _BLOCK_ELEMENTS) if xp is np else flat.size
        dtype = sum_dtype(data.dtype)
        scratch = self._scratch.get((xp, dtype))
        if scratch is None or scratch.shape[1] < length:
            # Two more rows for the values and the gradient in another dtype or multiplied.
            scratch = self._scratch[xp, dtype] = xp.empty((self.num_scratch + 2, length), dtype)
        for start in range(0, flat.size, max(length, 1)):
            block = slice(start, min(start + length, flat.size))
            values, gradient = flat[block], grad[block]
            if master is not None:
                values, work = master[block], scratch[-1, : values.size]
                # Where they no longer round to the parameter's, the master values follow those.
                with np.errstate(over="ignore"):  # what rounds to infinity is infinity there, too
                    stale = values.astype(data.dtype) != flat[block]
                work[...] = flat[block]
                xp.copyto(values, work, where=stale)
            if master is not None or grad_factor != 1.0 or grad.dtype != scratch.dtype:
                gradient = scratch[-2, : values.size]
                gradient[...] = grad[block]
                gradient *= grad_factor
            yield values, gradient, [array[block] for array in state], scratch[:, : values.size]
            if master is not None:
                flat[block] = values

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds: all but the memory to compute in."""
        return {**self.__dict__, "_scratch": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters, {numbers_text(self)})"


TORCH_ATTRIBUTES = {
    "param_groups": "it has one rate, optimizer.lr, to read and to set; for several rates make "
    "several optimizers, ParallelOptimizer([one, another], model) steps them together",
    "add_param_group": "its parameters are those that it was made with: make another optimizer for "
    "others, ParallelOptimizer([one, another], model) steps both together",
    "state": "state_dict() returns what it knows of each parameter, in their order",
    "defaults": "its numbers are attributes, such as optimizer.lr, and stand in state_dict()",
}
"""Attributes of PyTorch's optimizers, and what is here in their place."""

tell_elsewhere(Optimizer, TORCH_ATTRIBUTES)


def numbers_text(optimizer: object) -> str:
    """Return the numbers of an optimizer as text; of one of another library there are none."""
    names = getattr(optimizer, "numbers", ())
    return ", ".join([f"{name}={getattr(optimizer, name)!r}" for name in names])


def _checked_answer(answer: object, parameter: Parameter) -> bool:
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise ModuleError(
        f"decay_mask must return True or False for each parameter, got {answer!r} for "
        f"{parameter.name!r} of shape {parameter.shape}"
    )


def check_number(name: str, value: float, *, below: float = math.inf) -> float:
    """Return `value` as a float of Python in ``[0, below)``; ModuleError if it is none."""
    return as_real(value, name, ModuleError, least=0, below=below)


# -- checks of a state, done before anything of it is taken over ----------------------------------
#
# Values of arrays are not looked at: a run that diverged has NaN in its state, and may be loaded.


def _check_layout(kind: str, state: Any, numbers: Sequence[str], num_params: int) -> None:
    """Check that a state is of an optimizer of this kind, of so many parameters."""
    if not isinstance(state, Mapping):
        raise ModuleError(
            f"state must be a dict as state_dict() of {kind} gives, got {type(state).__name__}"
        )
    params = state.get("params", ())
    by_name = any(isinstance(key, str) and key.startswith("params/") for key in state)
    if isinstance(params, Mapping) or by_name:
        raise ModuleError(
            f"this state has its parameters by name, as full_state_dict() of a ParallelOptimizer "
            f"gives; a plain {kind} takes them in the order of its parameters: load it into "
            "ParallelOptimizer(optimizer, model, zero=0), which steps as the plain one does"
        )
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ModuleError(
            f"'params' of a state of {kind} is a list with a dict for each parameter, got "
            f"{type(params).__name__}"
        )
    missing = [name for name in ("optimizer", "params", *numbers) if name not in state]
    if missing or state["optimizer"] != kind or len(params) != num_params:
        lacks = f", and lacks {missing}" if missing else ""
        raise ModuleError(
            f"a state of {state.get('optimizer')} of {len(params)} parameters does not fit {kind} "
            f"of {num_params} parameters{lacks}: make the optimizer that the state is of"
        )


def check_steps(who: str, own: Any) -> int:
    """Return the count of steps in the state of a parameter; ModuleError if there is none."""
    if not isinstance(own, Mapping):
        raise ModuleError(
            f"the state of {who} is a dict of 'steps' and of arrays, got {type(own).__name__}"
        )
    name = f"'steps' in the state of {who}, how often it was stepped,"
    return as_int(own.get("steps"), name, ModuleError, least=0, most=_MOST_STEPS)


def check_arrays(who: str, own: Mapping[str, Any], shape: tuple[int, ...] | None) -> None:
    """Check the arrays in the state of a parameter; their shapes not if `shape` is None."""
    for name, array in own.items():
        if name == "steps":
            continue
        if not hasattr(array, "shape") or not isinstance(getattr(array, "dtype", None), np.dtype):
            raise ModuleError(
                f"state {name!r} of {who} must be an array, got {type(array).__name__}"
            )
        if array.dtype.kind != "f":
            raise DTypeError(
                f"state {name!r} of {who} must be an array of floating point, got {array.dtype}"
            )
        if shape is not None and tuple(array.shape) != shape:
            raise ShapeError(
                f"state {name!r} of {who} must have its shape {shape}, got {tuple(array.shape)}; "
                "one that fits other stages and splits comes from "
                "ParallelOptimizer.full_state_dict()"
            )


# -- stochastic gradient descent, and Adam with decay in the gradient or beside it ----------------


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
        own = {"momentum": momentum, "nesterov": nesterov}
        return {**super()._checked_numbers(numbers), **own}

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
        checked = [check_number(f"betas[{at}]", one, below=1.0) for at, one in enumerate(betas)]
        return {**super()._checked_numbers(numbers), "betas": tuple(checked), "eps": eps}

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
