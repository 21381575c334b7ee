"""Blocks of transformers: attention, then a layer for each token, each with a residual sum."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from mpimesh.arguments import shown
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, namespace
from mpimesh.errors import ModuleError
from mpimesh.nn import protocol
from mpimesh.nn.activations import GELU, sigmoid, silu_slope
from mpimesh.nn.attention import Attention
from mpimesh.nn.dropout import Dropout, check_share
from mpimesh.nn.embedding import RotaryEmbedding
from mpimesh.nn.linear import Linear, SplitLayer
from mpimesh.nn.module import Composite
from mpimesh.nn.norms import LayerNorm, RMSNorm
from mpimesh.nn.protocol import Context, check_extent, check_sequence, joined, parted
from mpimesh.nn.split import RankGroup, SequenceSplit, Split

__all__ = [
    "BertBlock",
    "FeedForward",
    "GptBlock",
    "ParallelFeedForward",
    "ParallelSwiGLU",
    "SwiGLU",
]


class FeedForward(SplitLayer):
    """``y = down(activation(up(x)))``, with two linear layers.

    The hidden values may be split over the ranks of a group. The weights then have the values that
    they have in the unsplit layer, and the same names, and forward and backward are collective over
    the group.

    Shapes:
        x, result: (..., features). With a group the same on every rank; with `sequence` (rows,
            this rank's places, features).
        up.weight: (hidden, features). down.weight: (features, hidden).

    Cost:
        With a group that of an :class:`Attention`.

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks.
        activation: The layer between, which treats each value alone if they are split; None for
            :class:`GELU`. A dropout in it drops what it drops in the unsplit layer.
        bias: Whether the linear layers have biases.
        group: The ranks to split over, such as ``mesh.group("tp")``; None for a whole layer.
        sequence: How `x` and the result are split along the sequence, if they are.

    Attributes:
        up: The :class:`Linear` layer from `features` to `hidden`.
        activation: The layer between.
        down: The :class:`Linear` layer from `hidden` to `features`.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the activation needs all
            hidden values of which ranks have some, or `sequence` is without `group` or is split
            over another one.
        GroupError: If this rank is not in the group.
    """

    linears = ("up", "down")

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: protocol.SupportsLayer | None = None,
        bias: bool = True,
        group: RankGroup | None = None,
        sequence: SequenceSplit | None = None,
    ) -> None:
        self.features = check_extent("features", features)
        self.hidden = check_extent("hidden", hidden)
        self.up: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.activation: protocol.SupportsLayer = _activation(activation)
        self.down: protocol.SupportsLayer = Linear(self.hidden, self.features, bias=bias)
        self._split_over(group, sequence)

    def set_split(self, split: Split) -> None:
        """Have some of the hidden values from now on, before there is memory. Local.

        Raises:
            ModuleError: If layers within are no plain linear ones, or the activation needs all
                hidden values.
            ModuleStateError: If the layer has memory.
        """
        super().set_split(split)
        protocol.set_part(self.activation, split.ranks.part_of(self.hidden))

    def _run(self, x: Array, ctx: Context | None) -> Array:
        for layer in (self.up, self.activation, self.down):
            x = layer.forward(x, ctx)
        return x

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        for layer in (self.down, self.activation, self.up):
            dy = self._back(layer, dy, ctx)
        return dy

    def __repr__(self) -> str:
        name = type(self).__name__
        options = f"activation={self.activation!r}{Split.text(self.split)}"
        return f"{name}({self.features}, {self.hidden}, {options})"


class SwiGLU(SplitLayer):
    """``y = down(silu(gate(x)) * up(x))``, with three linear layers.

    Of Shazeer, "GLU Variants Improve Transformer" (2020). It may be split over the ranks of a
    group as a :class:`FeedForward`.

    Shapes:
        x, result: (..., features), as of a :class:`FeedForward`.
        gate.weight, up.weight: (hidden, features). down.weight: (features, hidden).

    Cost:
        Saves `x`, what `gate` and `up` give, and their product. Backward computes the sigmoid
        again.

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks; two thirds of that of a
            :class:`FeedForward` is as many parameters.
        bias: Whether the linear layers have biases.
        group: The ranks to split over, such as ``mesh.group("tp")``; None for a whole layer.
        sequence: How `x` and the result are split along the sequence, if they are.

    Attributes:
        gate: The :class:`Linear` layer whose result goes through SiLU.
        up: The :class:`Linear` layer whose result is multiplied with that.
        down: The :class:`Linear` layer from `hidden` to `features`.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `sequence` is without
            `group` or is split over another one.
        GroupError: If this rank is not in the group.
    """

    linears = ("gate", "up", "down")

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        bias: bool = False,
        group: RankGroup | None = None,
        sequence: SequenceSplit | None = None,
    ) -> None:
        self.features = check_extent("features", features)
        self.hidden = check_extent("hidden", hidden)
        self.gate: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.up: protocol.SupportsLayer = Linear(self.features, self.hidden, bias=bias)
        self.down: protocol.SupportsLayer = Linear(self.hidden, self.features, bias=bias)
        self._split_over(group, sequence)

    def _run(self, x: Array, ctx: Context | None) -> Array:
        gate, up = self.gate.forward(x, ctx), self.up.forward(x, ctx)
        wide = gate.astype(sum_dtype(gate.dtype), copy=False)
        mixed = sigmoid(wide)
        mixed *= wide
        mixed *= up
        mixed = mixed.astype(gate.dtype, copy=False)
        return self.down.forward(self._save(ctx, mixed, gate, up), ctx)

    def _run_back(self, dy: Array, ctx: Context) -> Array:
        d_mixed = self._back(self.down, dy, ctx)
        gate, up = self._take(d_mixed, ctx)
        wide = gate.astype(sum_dtype(gate.dtype), copy=False)
        share = sigmoid(wide)
        d_gate = silu_slope(wide, share)
        d_gate *= up
        d_gate *= d_mixed
        share *= wide
        share *= d_mixed
        d_up, d_gate = (one.astype(gate.dtype, copy=False) for one in (share, d_gate))
        dx = self._back(self.up, d_up, ctx)
        return dx + self._back(self.gate, d_gate, ctx)

    def __repr__(self) -> str:
        group = Split.text(self.split)
        return f"{type(self).__name__}({self.features}, {self.hidden}{group})"


class ParallelFeedForward(FeedForward):
    """A :class:`~mpimesh.nn.FeedForward` of which each rank of `group` has some hidden values.

    Raises:
        ModuleError: As that, and without `group`.
    """

    must_split = True


class ParallelSwiGLU(SwiGLU):
    """A :class:`~mpimesh.nn.SwiGLU` of which each rank of `group` has some hidden values.

    Raises:
        ModuleError: As that, and without `group`.
    """

    must_split = True


def _activation(given: protocol.SupportsLayer | None) -> protocol.SupportsLayer:
    if given is not None and not protocol.is_layer(given):
        raise ModuleError(f"activation must be a layer, such as nn.GELU(), got {shown(given)}")
    return GELU() if given is None else given


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
        y = self._save(ctx, self._run(x, mask, ctx), mask is not None)
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

    Attributes:
        attention: The :class:`Attention`; its linear layers are ``attention.query``, ``.key``,
            ``.value`` and ``.output``.
        attention_dropout: The :class:`Dropout` after it.
        attention_norm: The :class:`LayerNorm` of the first sum.
        mlp: The :class:`FeedForward`; its linear layers are ``mlp.up`` and ``mlp.down``.
        mlp_dropout: The :class:`Dropout` after it.
        mlp_norm: The :class:`LayerNorm` of the second sum.

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
        rotary: Whether positions are encoded by :class:`RotaryEmbedding`; or that layer itself.
        causal: Whether a token reads only itself and those before it.
        bias: Whether linear layers have biases.
        eps: Of the norms.
        dropout: The share to drop.
        attention_dropout: The share of the attention's weights to drop.

    Attributes:
        attention: The :class:`Attention`; its linear layers are ``attention.query``, ``.key``,
            ``.value`` and ``.output``.
        attention_dropout: The :class:`Dropout` after it.
        attention_norm: The :class:`LayerNorm` or :class:`RMSNorm` before it.
        mlp: The :class:`FeedForward`, with ``mlp.up`` and ``mlp.down``; or the :class:`SwiGLU`,
            which has ``mlp.gate``, too.
        mlp_dropout: The :class:`Dropout` after it.
        mlp_norm: The :class:`LayerNorm` or :class:`RMSNorm` before it.

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
        rotary: bool | RotaryEmbedding = False,
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
