"""Blocks of transformers: attention, then a layer for each token, each beside a way around it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from mpimesh.arguments import shown
from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array
from mpimesh.errors import ModuleError
from mpimesh.nn.activations import GELU
from mpimesh.nn.attention import Attention
from mpimesh.nn.composite import Composite, SplitLayer
from mpimesh.nn.context import Context
from mpimesh.nn.dropout import Dropout
from mpimesh.nn.drops import check_share
from mpimesh.nn.feedforward import FeedForward, SwiGLU
from mpimesh.nn.layernorm import LayerNorm
from mpimesh.nn.masked import check_sequence, joined, parted
from mpimesh.nn.rmsnorm import RMSNorm
from mpimesh.nn.rotary import Rotary
from mpimesh.nn.split import Split

__all__ = ["BertBlock", "GptBlock"]


class _Block(Composite):
    """The base of both kinds: a mask, if there is one, goes around the layers and on."""

    attention: Attention
    mlp: FeedForward | SwiGLU

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return the tokens' new vectors, with the mask if one was given.

        Raises:
            ShapeError: If `x` has another shape, or the mask does not fit it.
            DTypeError: If `x` has another dtype than the weights, or the mask is not boolean.
            ModuleError: If `x` is a tuple of something else than an array and a mask.
            ModuleStateError: If the block is not materialised.
        """
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        y = self._run(x, mask, ctx)
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, mask is not None)
        return joined(y, mask)

    def backward_input(self, dy: Any, ctx: Context) -> Any:
        """Return the gradient of `x`; with a mask, a tuple of that and None.

        Raises:
            ShapeError: If `dy` has another shape than the result.
            DTypeError: If `dy` has another dtype.
            ModuleStateError: If forward did not run with `ctx`, or its backward ran already.
        """
        dy, _ = parted(self, dy, what="the gradient")
        (masked,) = self._take(dy, ctx)
        dx = self._run_back(dy, ctx)
        return (dx, None) if masked else dx

    def backward(self, dy: Any, ctx: Context) -> Any:
        """Run both halves, with the same bits as one after the other.

        Where layers within are split over ranks, the gradients of their weights are computed while
        those of their inputs are summed.
        """
        within = [one for _, one in self.named_children() if isinstance(one, SplitLayer)]
        for one in within:
            one.eager = True
        try:
            return super().backward(dy, ctx)
        finally:
            for one in within:
                one.eager = False

    def __repr__(self) -> str:
        given = f"{self.attention.features}, {self.attention.num_heads}, hidden={self.mlp.hidden}"
        group = Split.text(getattr(self.attention, "split", None))
        return f"{type(self).__name__}({given}{group})"

    @abstractmethod
    def _run(self, x: Array, mask: Array | None, ctx: Context | None) -> Array: ...

    @abstractmethod
    def _run_back(self, dy: Array, ctx: Context) -> Array: ...

    def _sum(self, a: Array, b: Array, ctx: Context | None) -> Array:
        """Return ``a + b``, in the memory that the context has for the result, if any."""
        room = None if ctx is None else ctx.empty(self, a.shape, a.dtype)
        return namespace(a).add(a, b, out=room)


class BertBlock(_Block):
    """``y = norm(x + attention(x))``, then ``norm(y + mlp(y))``: as in BERT, norms come last.

    Of Devlin et al., "BERT" (2018). In training, shares `dropout` of what attention and `mlp` give
    are dropped, and a share `attention_dropout` of the attention's weights.

    Shapes:
        x, result: (batch, tokens, features), or that and a mask of shape (batch, tokens), True
            where there is a token, in a tuple.

    Args:
        features: Length of the last axis of `x`.
        num_heads: Number of heads.
        hidden: Length of what is inside the mlp; None for ``4 * features``.
        eps: Of the norms.
        dropout: The share to drop.
        attention_dropout: The share of the attention's weights to drop.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the heads do not divide
            the features, or a number is out of range.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        hidden: int | None = None,
        eps: float = 1e-12,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        self.attention = Attention(features, num_heads, dropout=attention_dropout)
        self.attention_dropout = Dropout(check_share("dropout", dropout))
        self.attention_norm = LayerNorm(features, eps=eps)
        self.mlp: FeedForward = FeedForward(features, 4 * features if hidden is None else hidden)
        self.mlp_dropout = Dropout(dropout)
        self.mlp_norm = LayerNorm(features, eps=eps)

    def _run(self, x: Array, mask: Array | None, ctx: Context | None) -> Array:
        branch = self.attention.forward(joined(x, mask), ctx)
        y = x + self.attention_dropout.forward(branch, ctx)
        y = self.attention_norm.forward(y, ctx)
        branch = self.mlp_dropout.forward(self.mlp.forward(y, ctx), ctx)
        return self.mlp_norm.forward(y + branch, ctx)

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        dy = self.mlp_norm.backward_input(dy, ctx)
        branch = self.mlp.backward_input(self.mlp_dropout.backward_input(dy, ctx), ctx)
        dy = self.attention_norm.backward_input(dy + branch, ctx)
        branch = self.attention_dropout.backward_input(dy, ctx)
        branch, _ = parted(self, self.attention.backward_input(branch, ctx))
        return self._sum(dy, branch, ctx)


class GptBlock(_Block):
    """``y = x + attention(norm(x))``, then ``y + mlp(norm(y))``: norms come first.

    As in GPT-2 with the defaults; with ``norm="rms"``, ``mlp="swiglu"``, ``rotary=True`` and
    ``bias=False`` as in Llama. A token reads only itself and those before it. In training, shares
    `dropout` of what attention and `mlp` give are dropped, and a share `attention_dropout` of the
    attention's weights.

    Shapes:
        x, result: (batch, tokens, features), or that and a mask of shape (batch, tokens), True
            where there is a token, in a tuple.

    Args:
        features: Length of the last axis of `x`.
        num_heads: Number of heads.
        num_kv_heads: Number of heads of the keys and values; None for `num_heads`.
        hidden: Length of what is inside the mlp; None for ``4 * features``.
        norm: "layer" for :class:`LayerNorm`, "rms" for :class:`RMSNorm`.
        mlp: "gelu" for :class:`FeedForward` with GELU by tanh, "swiglu" for :class:`SwiGLU`.
        rotary: Whether positions are told by :class:`Rotary`; or the layer that does so.
        causal: Whether a token reads only itself and those before it.
        bias: Whether linear layers have biases.
        eps: Of the norms.
        dropout: The share to drop.
        attention_dropout: The share of the attention's weights to drop.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the heads do not divide
            the features, or a number or a name is not among those above.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        hidden: int | None = None,
        norm: Literal["layer", "rms"] = "layer",
        mlp: Literal["gelu", "swiglu"] = "gelu",
        rotary: bool | Rotary = False,
        causal: bool = True,
        bias: bool = True,
        eps: float = 1e-5,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        if not isinstance(norm, str) or norm not in ("layer", "rms"):
            raise ModuleError(f"norm must be 'layer' or 'rms', got {shown(norm)}")
        if not isinstance(mlp, str) or mlp not in ("gelu", "swiglu"):
            raise ModuleError(f"mlp must be 'gelu' or 'swiglu', got {shown(mlp)}")
        check_share("attention_dropout", attention_dropout)
        make_norm = LayerNorm if norm == "layer" else RMSNorm
        self.attention_norm = make_norm(features, eps=eps)
        self.attention = Attention(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            causal=causal,
            rotary=rotary,
            bias=bias,
            dropout=attention_dropout,
        )
        self.attention_dropout = Dropout(check_share("dropout", dropout))
        self.mlp_norm = make_norm(features, eps=eps)
        hidden = 4 * features if hidden is None else hidden
        self.mlp = (
            SwiGLU(features, hidden, bias=bias)
            if mlp == "swiglu"
            else FeedForward(features, hidden, activation=GELU(approximate="tanh"), bias=bias)
        )
        self.mlp_dropout = Dropout(dropout)

    def _run(self, x: Array, mask: Array | None, ctx: Context | None) -> Array:
        branch = self.attention.forward(joined(self.attention_norm.forward(x, ctx), mask), ctx)
        y = x + self.attention_dropout.forward(branch, ctx)
        branch = self.mlp.forward(self.mlp_norm.forward(y, ctx), ctx)
        return self._sum(y, self.mlp_dropout.forward(branch, ctx), ctx)

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        branch = self.mlp.backward_input(self.mlp_dropout.backward_input(dy, ctx), ctx)
        dy = dy + self.mlp_norm.backward_input(branch, ctx)
        branch = self.attention_dropout.backward_input(dy, ctx)
        branch, _ = parted(self, self.attention.backward_input(branch, ctx))
        return self._sum(dy, self.attention_norm.backward_input(branch, ctx), ctx)
