"""Memory that PyTorch and NumPy share: arrays, parameters, first values, random numbers."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray
from mpimesh.arrays.random_bits import key_of
from mpimesh.errors import DTypeError, MissingPackageError, ModuleError, ModuleStateError
from mpimesh.interop.wrapped import host_array, plain_array
from mpimesh.nn import Constant, Parameter
from mpimesh.nn.parameter import Buffer

__all__ = [
    "EXTRA_STATE",
    "TorchBuffer",
    "TorchParameter",
    "as_array",
    "as_tensor",
    "give_first_values",
    "host_leaf",
    "parameter_of",
    "seeded",
    "torch",
]

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackageError(
        "mpimesh.interop.torch needs PyTorch, which is not installed: pip install torch ml_dtypes"
    ) from None


EXTRA_STATE = "_extra_state"
"""Name in a state of what a module's ``get_extra_state`` gives."""

_BFLOAT16 = "bfloat16"  # NumPy has it from ml_dtypes, and PyTorch does not know that


def as_tensor(x: Any) -> torch.Tensor:
    """Return an array as a tensor: its own memory, also where NumPy may only read it.

    A tensor becomes another one, which autograd does not know yet.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If PyTorch has no such dtype.
    """
    array = host_leaf(x)
    dtype = array.dtype
    if dtype.name == _BFLOAT16:
        return torch.from_numpy(plain_array(array.view(np.uint16))).view(torch.bfloat16)
    try:
        return torch.from_numpy(plain_array(array))
    except TypeError:
        raise DTypeError(f"PyTorch has no dtype {dtype}") from None


def host_leaf(x: Any) -> HostArray:
    """Return an array, or a tensor, as an array in the host's memory.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers, or NumPy has no such dtype.
    """
    return as_array(x) if isinstance(x, torch.Tensor) else host_array(x)


def as_array(tensor: torch.Tensor) -> HostArray:
    """Return a tensor as an array: its own memory.

    Raises:
        ModuleError: If it is not dense, or not in the host's memory.
        DTypeError: If NumPy has no such dtype.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ModuleError(
            "what a module takes and gives must be dense and in the host's memory, got a tensor "
            f"of layout {tensor.layout} on {tensor.device}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    array: HostArray
    if plain.dtype == torch.bfloat16:
        array = plain.view(torch.uint16).numpy().view(_bfloat16())
        return array
    try:
        array = plain.numpy()
    except TypeError:
        raise DTypeError(f"NumPy has no dtype {tensor.dtype}") from None
    return array


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise DTypeError(
            "NumPy has no bfloat16 of its own: pip install ml_dtypes, or use float32"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


# The generator is the process's: ranks that are threads take turns.
_TURN = threading.RLock()


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Let PyTorch draw by `key` in this block; afterwards it goes on as if nothing had been drawn.

    Cost:
        Some microseconds: the state of the generator is saved and put back.
    """
    generator = torch.default_generator
    with _TURN:
        before = generator.get_state()
        # Seeds of PyTorch are signed.
        generator.manual_seed(key_of(*key) - (1 << 63))
        try:
            yield
        finally:
            generator.set_state(before)


class TorchParameter(Parameter):
    """A `torch.nn.Parameter` as a parameter of mpimesh, made by :func:`parameter_of`.

    Attributes:
        tensor: The parameter of PyTorch. Another one stands here once a parameter of the "meta"
            device has got memory.
    """

    __slots__ = ("_made", "_places", "_seen", "_torch_grad", "tensor")

    takes_wider_grad = False  # PyTorch refuses one

    def __init__(self, name: str, tensor: torch.nn.Parameter) -> None:
        self._torch_grad: torch.Tensor | None = None
        self._seen: tuple[int, HostArray] | None = None
        self._places: list[tuple[torch.nn.Module, str]] = []
        self._made = False
        self._take(tensor)
        # What it starts with is the module's affair: the initializer is never asked.
        super().__init__(
            name, tuple(tensor.shape), Constant(0.0), requires_grad=tensor.requires_grad
        )
        self._made = True

    # -- what the base keeps in slots is read off the tensor --------------------------

    @property
    def data(self) -> Array:
        """The values: the tensor's memory; None while it is on the "meta" device."""
        tensor = self.tensor
        if tensor.is_meta:
            return None
        address = tensor.data_ptr()
        if self._seen is None or self._seen[0] != address:
            if not tensor.is_contiguous():
                with torch.no_grad():
                    tensor.data = tensor.detach().contiguous()
            self._seen = (tensor.data_ptr(), as_array(tensor))
        return self._seen[1]

    @data.setter
    def data(self, array: Array) -> None:
        if array is None:
            if self._made and not self.tensor.is_meta:
                self._replace(torch.empty_like(self.tensor, device="meta"))
        elif self.tensor.is_meta:
            self._replace(as_tensor(array))
        elif array is not self.data:
            self.tensor.data = as_tensor(array)
            # The very array: callers compare it by identity.
            self._seen = (self.tensor.data_ptr(), array)

    @property
    def grad(self) -> Array:
        """The gradient. Reading it ties the tensor's to it again."""
        self.write_zeros()
        if self._grad is not None and self.tensor.grad is not self._torch_grad:
            self._tie()
        return self._grad

    @grad.setter
    def grad(self, array: Array) -> None:
        self._is_zero = False
        self._grad = array
        self._torch_grad = None if array is None else as_tensor(array)
        self._tie()

    def zero_grad(self) -> None:
        """Forget the gradient; see :meth:`Parameter.zero_grad`."""
        super().zero_grad()
        if self._is_zero:
            self.tensor.grad = None

    def tie(self) -> None:
        """Tie the tensor's gradient to this one, before autograd adds to it.

        One that PyTorch has dropped, as its `zero_grad` does, is 0: then autograd makes one of its
        own, which moves to this one's memory.

        Raises:
            ModuleStateError: If the tensor has got another dtype or shape.
        """
        if self._grad is None:
            return
        if self.tensor.grad is None:
            self._is_zero = True
        if self._is_zero:
            self._check_kind()
            self.tensor.grad = None
        else:
            self._tie()

    def _tie(self) -> None:
        self._check_kind()
        self.tensor.grad = self._torch_grad

    def _check_kind(self) -> None:
        gradient = self._torch_grad
        if gradient is not None and _kind(gradient) != _kind(self.tensor):
            raise ModuleStateError(
                f"parameter {self.name!r} is {_text(self.tensor)} now, and its gradient has memory "
                f"for {_text(gradient)}: change a module before the model is made, or make the "
                "model anew"
            )

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained; the tensor's own flag."""
        return bool(self.tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.tensor.requires_grad_(wanted)

    # -- for layers ---------------------------------------------------------------------

    def add_place(self, owner: torch.nn.Module, name: str) -> None:
        """Note where the tensor stands, so that another one can be put there."""
        if not any(known is owner and at == name for known, at in self._places):
            self._places.append((owner, name))

    def give_memory(self) -> None:
        """Put a tensor with memory, of any values, in the place of one without."""
        if self.tensor.is_meta:
            self._replace(torch.empty_like(self.tensor, device="cpu"))

    def _replace(self, values: torch.Tensor) -> None:
        trained = self.requires_grad
        _FOUND.pop(id(self.tensor), None)
        self._take(torch.nn.Parameter(values, requires_grad=trained))
        _FOUND[id(self.tensor)] = self
        for owner, name in self._places:
            owner._parameters[name] = self.tensor

    def _take(self, tensor: torch.nn.Parameter) -> None:
        self.tensor = tensor
        self._seen = None
        if tensor.is_meta:
            return
        me = weakref.ref(self)
        flag = tensor.requires_grad
        tensor.requires_grad_(True)  # PyTorch refuses hooks of frozen tensors
        hook = tensor.register_post_accumulate_grad_hook(lambda _: _added(me))
        tensor.requires_grad_(flag)
        weakref.finalize(self, hook.remove).atexit = False

    def _was_added_to(self) -> None:
        """Note that PyTorch's backward has added to the gradient."""
        found = self.tensor.grad
        if self._grad is None:
            if not found.is_contiguous() or found.layout != torch.strided:
                found = found.to_dense() if found.layout != torch.strided else found
                self.grad = as_array(found.contiguous())
            else:
                self._grad, self._torch_grad = as_array(found), found
        elif found is not self._torch_grad:
            # The first after zeros; and with create_graph=True sums lie elsewhere, too.
            dense = found.detach() if found.layout == torch.strided else found.to_dense()
            self._torch_grad.copy_(dense)  # type: ignore[union-attr]
            self.tensor.grad = self._torch_grad
            self._is_zero = False
        if self.on_ready is not None:
            self.on_ready(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchParameter:
        """Return the parameter of a copy of the tensor."""
        return parameter_of(self.name, copy.deepcopy(self.tensor, memo))


class TorchBuffer(Buffer):
    """A buffer of a module of PyTorch; its owner is the module that has it."""

    __slots__ = ()

    def value(self) -> Array:
        """Return the tensor's memory.

        Raises:
            ModuleStateError: If it is on the "meta" device, without memory yet.
            ModuleError: If it is extra state, not dense, or not in the host's memory.
            DTypeError: If NumPy has no such dtype.
        """
        what = f"{self.name!r} of {type(self.owner).__name__}"
        if self.name == EXTRA_STATE:
            raise ModuleError(
                f"{what}, what its get_extra_state() gives, has no place in the state of a model "
                "over ranks, which is of arrays: keep it in buffers, register_buffer(name, tensor)"
            )
        tensor = self.owner._buffers[self.name]
        if tensor.is_meta:
            raise ModuleStateError(f"buffer {what} has no memory yet: it is on the meta device")
        if tensor.is_conj() or tensor.is_neg():  # whose array would be a copy
            tensor = self.owner._buffers[self.name] = tensor.resolve_conj().resolve_neg()
        try:
            return as_array(tensor)
        except ModuleError as error:
            raise ModuleError(f"buffer {what}: {error}") from None


# By the id of the tensor. An entry goes with the parameter, which keeps the tensor alive.
_FOUND: weakref.WeakValueDictionary[int, TorchParameter] = weakref.WeakValueDictionary()
_FINDING = threading.Lock()


def parameter_of(name: str, tensor: torch.nn.Parameter) -> TorchParameter:
    """Return the parameter of `tensor`: the same one at each call, so that tied layers share it.

    Raises:
        ModuleError: If it is not in the host's memory, or has no shape yet.
        DTypeError: If it is not of a float dtype.
    """
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ModuleError(
            f"parameter {name!r} has no shape yet: run a lazy module once before it is wrapped"
        )
    if tensor.device.type not in ("cpu", "meta"):
        raise ModuleError(
            f"parameter {name!r} must be in the host's memory (or on the meta device), for that is "
            f"where ranks exchange gradients and what goes between stages; it is on "
            f"{tensor.device}: use module.cpu()"
        )
    if not tensor.is_floating_point():
        raise DTypeError(f"parameter {name!r} must be of a float dtype, got {tensor.dtype}")
    with _FINDING:
        found = _FOUND.get(id(tensor))
        if found is None:
            found = _FOUND[id(tensor)] = TorchParameter(name, tensor)
        return found


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def _added(parameter: Callable[[], TorchParameter | None]) -> None:
    found = parameter()
    if found is not None:
        found._was_added_to()


def give_first_values(
    module: torch.nn.Module, parameters: Iterable[TorchParameter], *, seed: int, index: int
) -> None:
    """Give memory to what `module` lacks, and the values of the modules' ``reset_parameters``.

    Local. They are drawn by `seed` and `index` alone. What has memory keeps its values. A module is
    reset after those in it, as it is made after them.

    Args:
        module: The module.
        parameters: All of its parameters.
        seed: The seed of the model.
        index: The layer's place.

    Raises:
        ModuleError: If a module in it that lacks memory has no ``reset_parameters``, or if that
            leaves a parameter or a buffer without values.
    """
    # A module stands before those in it.
    owners = [*reversed([*module.modules()])]
    lacking = [
        owner for owner in owners if any(one.is_meta for one in _own_tensors(owner).values())
    ]
    if not lacking:
        return
    resets = [_reset_of(owner, module) for owner in lacking]
    # Of all modules: one may set what those in it have, too.
    own = {id(one): one for owner in owners for one in _own_tensors(owner).values()}
    saved = [(one, one.detach().clone()) for one in own.values() if not one.is_meta]
    places = [
        (owner, name)
        for owner in lacking
        for name, one in _own_tensors(owner).items()
        if one.is_meta and one.numel()
    ]
    for parameter in parameters:
        parameter.give_memory()
    with seeded(seed, index), torch.no_grad():
        for owner in lacking:
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = torch.empty_like(buffer, device="cpu")
        # They begin with values that no initializer draws: NaN, or an odd number.
        blanks = {(owner, name): _own_tensors(owner)[name] for owner, name in places}
        versions = {}
        for place, blank in blanks.items():
            blank.fill_(_mark(blank))
            versions[place] = blank._version
        for reset in resets:
            reset()
        for tensor, values in saved:
            tensor.copy_(values)
    # PyTorch counts the changes of a tensor, but not those that are written by ``.data``.
    left = [
        name
        for (owner, name), blank in blanks.items()
        if blank._version == versions[owner, name]
        and blank is _own_tensors(owner).get(name)
        and bool(((blank == torch.full_like(blank, _mark(blank))) | (blank != blank)).all())
    ]
    if left:
        raise ModuleError(
            f"reset_parameters() in {type(module).__name__} gives no values to {left}, which the "
            "module has on the meta device: set all parameters and buffers there, or make the "
            "module with memory"
        )


def _mark(tensor: torch.Tensor) -> float:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 83


def _reset_of(owner: torch.nn.Module, module: torch.nn.Module) -> Callable[[], object]:
    """Return what gives first values to what `owner` itself has."""
    # PyTorch's own attention has an underscore there.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(owner, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    where = "" if owner is module else f" in {type(module).__name__}"
    raise ModuleError(
        f"{type(owner).__name__}{where} has parameters or buffers on the meta device, and no "
        "reset_parameters() to give them first values: write one, or make the module with memory"
    )


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of `module` itself."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}
