"""Gradients of layers against difference quotients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_real, shown
from mpimesh.arrays.namespace import Array
from mpimesh.errors import DTypeError, ModuleError
from mpimesh.nn import protocol
from mpimesh.nn.protocol import Context, SupportsLayer, is_layer
from mpimesh.parallel.microbatch import Structure, Tree, flatten, tree_map

__all__ = ["gradcheck"]


def gradcheck(
    layer: SupportsLayer,
    *inputs: Tree,
    step: float = 1e-5,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    seed: int = 0,
    training_step: int = 0,
) -> None:
    """Check a layer's backward by difference quotients, and what else models rely on.

    With random weights w the value is the sum of ``w * layer.forward(x)`` over all inputs, and its
    derivative by each element of the parameters, and of the inputs where they are floating, is
    compared with what backward gives. Also

    - `backward_input` and `backward_weight` one after the other give the bits of `backward`;
    - the inputs are several microbatches: with all forwards first and the backwards in another
      order, input and weight halves apart, the gradients are the same, up to the order of sums;
    - nothing is written to inputs and gradients that the layer gets, and nothing is left in the
      contexts.

    Frozen parameters must get no gradient. A gradient of None stands for zeros, and for an input
    that needs none (``input_grad = False``). The layer has its values afterwards, and no gradients.
    Local; for a layer with collectives every rank of them calls it, with inputs of equal shapes. A
    layer whose parameters are split over ranks is refused: an element would move on all of them at
    once. Check the unsplit layer, and compare the split one with it.

    Args:
        layer: The layer, with parameters of float64 in NumPy's memory:
            ``layer.materialize(seed=0, dtype="float64")``. What has kinks, as ReLU, is right only
            where no value is within `step` of one.
        inputs: What forward takes, of one microbatch each: arrays of float64 or without a gradient,
            or tuples or dicts of them.
        step: Half the distance of the two values of a quotient.
        rtol: Largest difference relative to the quotient.
        atol: Largest difference beside that.
        seed: Of the random weights.
        training_step: What contexts have as their step; dropout draws by it.

    Raises:
        ModuleError: At the first difference: it names the parameter or input, the index, and both
            numbers.
        DTypeError: If parameters or inputs are of a smaller dtype than float64.

    Cost:
        Two forwards of one input for each of its elements, and two of all inputs for each element
        of the parameters.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> layer.materialize(seed=0, dtype="float64")
        >>> mm.testing.gradcheck(layer, np.ones((4, 3)), np.zeros((1, 3)))
        >>> layer.backward_weight = lambda ctx: None
        >>> try:
        ...     mm.testing.gradcheck(layer, np.ones((4, 3)))
        ... except mm.errors.ModuleError as error:
        ...     print(str(error).partition(":")[0])
        Linear(3, 2)
    """
    if not is_layer(layer):
        raise ModuleError(f"layer must have forward, backward and parameters, got {shown(layer)}")
    step = as_real(step, "step", ModuleError, above=0)
    rtol = as_real(rtol, "rtol", ModuleError, least=0)
    atol = as_real(atol, "atol", ModuleError, least=0)
    seed = as_int(seed, "seed", ModuleError, least=0)
    training_step = as_int(training_step, "training_step", ModuleError, least=0)
    _GradientCheck(layer, inputs, step, (rtol, atol), seed, training_step).run()


class _GradientCheck:
    """One run of `gradcheck`."""

    def __init__(
        self,
        layer: SupportsLayer,
        inputs: Sequence[Tree],
        step: float,
        tolerances: tuple[float, float],
        seed: int,
        training_step: int,
    ) -> None:
        self.layer = layer
        self.inputs = inputs
        self.step = step
        self.rtol, self.atol = tolerances
        self.training_step = training_step
        self.named = protocol.named_parameters(layer)
        for name, parameter in self.named:
            if parameter.layout is not None and len(parameter.blocks) > 1:
                raise ModuleError(
                    f"parameter {name!r} is split over ranks, {parameter.layout}: gradcheck moves "
                    "one element at a time, and would move one on each rank. Check the unsplit "
                    "layer, and compare the split one with it"
                )
            _check_dtype(f"parameter {name!r}", parameter.value())
        if not inputs:
            raise ModuleError("gradcheck needs an input: what forward takes")
        self.leaves: list[list[Array]] = []
        self.structures: list[Structure] = []
        for place, x in enumerate(inputs):
            leaves, structure = flatten(x, name=f"inputs[{place}]")
            for leaf, path in zip(leaves, structure.paths(), strict=True):
                _check_dtype(f"inputs[{place}]{path}", leaf)
            self.leaves.append(leaves)
            self.structures.append(structure)
        rows = [int(leaves[0].shape[0]) if leaves[0].ndim else 0 for leaves in self.leaves]
        self.first_rows = [sum(rows[:place]) for place in range(len(rows))]
        rng = np.random.default_rng(seed)
        self.weights: list[Tree] = []
        for place, x in enumerate(inputs):
            leaves, structure = flatten(layer.forward(x, self.context(place)), name="the output")
            drawn = [
                rng.normal(size=leaf.shape).astype(leaf.dtype) if leaf.dtype.kind == "f" else None
                for leaf in leaves
            ]
            self.weights.append(structure.unflatten(drawn))

    def run(self) -> None:
        """Compare all."""
        try:
            passed, wanted = self.backward_of_each()
            self.compare_quotients(passed, wanted)
            self.compare_halves(passed, wanted)
            self.compare_in_flight(passed, wanted)
        finally:
            self.forget()

    def context(self, place: int) -> Context:
        """Return a new context for an input."""
        return Context(step=self.training_step, first_row=self.first_rows[place])

    def value_of(self, place: int) -> float:
        """Return the weighted sum of the output for one input."""
        output, _ = flatten(self.layer.forward(self.inputs[place], self.context(place)))
        weights = _leaves(self.weights[place])
        return sum(
            float((one * weight).sum())
            for one, weight in zip(output, weights, strict=True)
            if weight is not None
        )

    def value(self) -> float:
        """Return the weighted sum of all outputs."""
        return sum(map(self.value_of, range(len(self.inputs))))

    def forget(self) -> None:
        """Forget all gradients."""
        for _, parameter in self.named:
            parameter.zero_grad()

    def gradients(self) -> dict[str, Array]:
        """Return copies of the parameters' gradients, and forget them."""
        found = {
            name: np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.copy()
            for name, parameter in self.named
        }
        for name, parameter in self.named:
            if not parameter.requires_grad and found[name].any():
                raise ModuleError(
                    f"{self.layer!r}: parameter {name!r} is frozen, and backward added a gradient: "
                    "ask for parameter.requires_grad first"
                )
        self.forget()
        return found

    def backward_of_each(self) -> tuple[list[Tree], dict[str, Array]]:
        """Return the gradients of the inputs, and those of the parameters, by `backward`."""
        self.forget()
        passed = []
        for place, x in enumerate(self.inputs):
            ctx = self.context(place)
            before = [leaf.copy() for leaf in self.leaves[place]]
            self.layer.forward(x, ctx)
            dy = _copy(self.weights[place])
            dx = self.layer.backward(dy, ctx)
            self.check_untouched(place, before, dy)
            self.check_empty(ctx, "backward")
            passed.append(self.checked_dx(place, dx))
        return passed, self.gradients()

    def compare_quotients(self, passed: list[Tree], wanted: dict[str, Array]) -> None:
        """Compare gradients with difference quotients."""
        for name, parameter in self.named:
            if parameter.requires_grad:
                self.compare(f"parameter {name!r}", parameter.data, wanted[name], self.value)
        if not getattr(self.layer, "input_grad", True):
            return
        for place, (leaves, structure) in enumerate(zip(self.leaves, self.structures, strict=True)):
            gradients = structure.leaves_of(passed[place])
            if gradients is None:  # None in the place of all of them
                gradients = [None] * len(leaves)
            for leaf, gradient, path in zip(leaves, gradients, structure.paths(), strict=True):
                if leaf.dtype.kind == "f":
                    gradient = np.zeros(leaf.shape) if gradient is None else gradient
                    name = f"inputs[{place}]{path}"
                    self.compare(name, leaf, gradient, partial(self.value_of, place))

    def compare(self, name: str, array: Array, gradient: Array, value: Callable[[], float]) -> None:
        """Compare one gradient with difference quotients of `value`, element by element."""
        for index in np.ndindex(array.shape):
            own = array[index]
            try:
                array[index] = own + self.step
                above = value()
                array[index] = own - self.step
                below = value()
            finally:
                array[index] = own
            quotient = (above - below) / (2 * self.step)
            self.compare_numbers(name, index, float(gradient[index]), quotient)

    def compare_numbers(
        self, name: str, index: tuple[int, ...], found: float, quotient: float
    ) -> None:
        """Raise if a number of a gradient is not near the quotient."""
        if not abs(found - quotient) <= self.atol + self.rtol * abs(quotient):  # also of NaN
            raise ModuleError(
                f"{self.layer!r}: {name} at {index}: backward gives {found!r}, the difference "
                f"quotient is {quotient!r} (step {self.step:g}, rtol {self.rtol:g}, atol "
                f"{self.atol:g})"
            )

    def compare_halves(self, passed: list[Tree], wanted: dict[str, Array]) -> None:
        """Compare the two halves, one after the other, with the whole: to the bit."""
        for place, x in enumerate(self.inputs):
            ctx = self.context(place)
            before = [leaf.copy() for leaf in self.leaves[place]]
            self.layer.forward(x, ctx)
            dy = _copy(self.weights[place])
            dx = protocol.backward_input(self.layer, dy, ctx)
            protocol.backward_weight(self.layer, ctx)
            self.check_untouched(place, before, dy)
            self.check_empty(ctx, "backward_weight")
            dx = self.checked_dx(place, dx)
            self.compare_bits(f"inputs[{place}]", dx, passed[place])
        self.compare_parameters(wanted, 0.0)

    def compare_in_flight(self, passed: list[Tree], wanted: dict[str, Array]) -> None:
        """Compare microbatches of which several are in flight with one after the other."""
        # One input alone is in flight twice: then its gradient counts twice.
        places = [*range(len(self.inputs))] * (2 if len(self.inputs) == 1 else 1)
        contexts = [self.context(place) for place in places]
        for place, ctx in zip(places, contexts, strict=True):
            self.layer.forward(self.inputs[place], ctx)
        for place, ctx in zip(places, contexts, strict=True):
            dx = protocol.backward_input(self.layer, self.weights[place], ctx)
            self.compare_bits(f"inputs[{place}]", self.checked_dx(place, dx), passed[place])
        for ctx in reversed(contexts):
            protocol.backward_weight(self.layer, ctx)
            self.check_empty(ctx, "backward_weight")
        times = len(places) // len(self.inputs)
        self.compare_parameters({name: times * one for name, one in wanted.items()}, 1e-9)

    def compare_parameters(self, wanted: dict[str, Array], rtol: float) -> None:
        """Compare the parameters' gradients with those of one `backward` after the other."""
        how = "by halves" if rtol == 0 else "with several microbatches in flight"
        for name, gradient in self.gradients().items():
            scale = np.abs(wanted[name]).max(initial=0.0)
            wrong = ~(np.abs(gradient - wanted[name]) <= rtol * scale)
            if wrong.any():
                index = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise ModuleError(
                    f"{self.layer!r}: parameter {name!r} at {index}: backward {how} gives "
                    f"{float(gradient[index])!r}, and at once {float(wanted[name][index])!r}; "
                    "what forward leaves for backward belongs into the context"
                )

    def compare_bits(self, name: str, dx: Tree, wanted: Tree) -> None:
        """Raise unless two gradients of an input are the same."""
        found, expected = _leaves(dx), _leaves(wanted)
        if len(found) != len(expected) or not all(map(_same, found, expected)):
            raise ModuleError(
                f"{self.layer!r}: the gradient of {name} is another one by backward_input, or "
                "with other microbatches in flight, than by backward at once"
            )

    def checked_dx(self, place: int, dx: Tree) -> Tree:
        """Return the gradient of an input if it is built like it."""
        leaves, structure = self.leaves[place], self.structures[place]
        gradients = [None] if dx is None else structure.leaves_of(dx)
        if gradients is None:
            raise ModuleError(
                f"{self.layer!r}: the gradient of inputs[{place}] must be built like it, "
                f"{structure}, got {type(dx).__name__} {shown(dx)}"
            )
        if dx is not None:
            for leaf, one, path in zip(leaves, gradients, structure.paths(), strict=True):
                shape = None if one is None else getattr(one, "shape", shown(one))
                if one is not None and (shape != leaf.shape or one.dtype != leaf.dtype):
                    raise ModuleError(
                        f"{self.layer!r}: the gradient of inputs[{place}]{path} must be of shape "
                        f"{leaf.shape} and dtype {leaf.dtype}, got {shape} and "
                        f"{getattr(one, 'dtype', type(one).__name__)}"
                    )
        return dx

    def check_untouched(self, place: int, before: list[Array], dy: Tree) -> None:
        """Raise if the layer has written to its input or to the gradient of its output."""
        if not all(map(_same, self.leaves[place], before)):
            raise ModuleError(f"{self.layer!r} has written to inputs[{place}], which others need")
        if not all(map(_same, _leaves(dy), _leaves(self.weights[place]))):
            raise ModuleError(f"{self.layer!r}: backward has written to dy, which others need")

    def check_empty(self, ctx: Context, name: str) -> None:
        """Raise if something waits in a context whose backward is done."""
        if not ctx.is_empty:
            raise ModuleError(
                f"{self.layer!r}: {name} leaves something in the context: each ctx.save needs a "
                "ctx.take, and each ctx.defer a ctx.take_deferred"
            )


def _leaves(tree: Tree) -> list[Any]:
    """Return the arrays of a tree, and None where it has None."""
    leaves: list[Any] = []
    tree_map(lambda leaf, _: leaves.append(leaf), tree)
    return leaves


def _copy(tree: Tree) -> Tree:
    return tree_map(lambda leaf, _: None if leaf is None else leaf.copy(), tree)


def _same(one: Array | None, other: Array | None) -> bool:
    """Tell whether two arrays have the same values; NaN is the same as itself."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _check_dtype(name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray) or (
        array.dtype.kind in "fcV" and array.dtype != np.float64
    ):
        raise DTypeError(
            f"{name} must be of float64 in NumPy's memory, for difference quotients need its "
            f"digits; got {shown(array)} of {getattr(array, 'dtype', type(array).__name__)}"
        )
