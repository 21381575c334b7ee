"""A parameter of PyTorch that is one of mpimesh, too: one memory for values, one for gradients.

Either side's optimizer may change the values. The gradient lies where the bucket wants it: PyTorch
has a view of that as ``tensor.grad``, into which its backward adds.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

from mpimesh.arrays import Array, HostArray
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError
from mpimesh.interop.torch_arrays import as_array, as_tensor
from mpimesh.interop.torch_library import torch
from mpimesh.nn import Constant, Parameter

__all__ = ["TorchParameter", "parameter_of"]


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
            # The very array: who has put it here looks whether it is still there.
            self._seen = (self.tensor.data_ptr(), array)

    @property
    def grad(self) -> Array:
        """The gradient. Whoever looks at it ties the tensor's to it again."""
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
        given = self._torch_grad
        if given is not None and _kind(given) != _kind(self.tensor):
            raise ModuleStateError(
                f"parameter {self.name!r} is {_text(self.tensor)} now, and its gradient has memory "
                f"for {_text(given)}: change a module before the model is made, or make the model "
                "anew"
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


# By the id of the tensor. An entry goes with the parameter, which keeps the tensor alive.
_FOUND: weakref.WeakValueDictionary[int, TorchParameter] = weakref.WeakValueDictionary()
_FINDING = threading.Lock()


def parameter_of(name: str, tensor: torch.nn.Parameter) -> TorchParameter:
    """Return the parameter of `tensor`: the same one whoever asks, so that ties are kept.

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
