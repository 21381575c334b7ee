"""The entrance of tokens into a BERT."""

from __future__ import annotations

from typing import Any

from mpimesh.arguments import shape_of
from mpimesh.arrays.namespace import namespace
from mpimesh.errors import ShapeError
from mpimesh.nn.attend import check_mask
from mpimesh.nn.checks import check_extent
from mpimesh.nn.composite import Composite
from mpimesh.nn.context import Context
from mpimesh.nn.dropout import Dropout
from mpimesh.nn.drops import check_share
from mpimesh.nn.embedding import Embedding
from mpimesh.nn.layernorm import LayerNorm
from mpimesh.nn.masked import joined, parted
from mpimesh.nn.positions import LearnedPositions

__all__ = ["BertEmbedding"]


class BertEmbedding(Composite):
    """``y = norm(words[ids] + positions + types[type_ids])``. Its input has no gradient.

    Shapes:
        ids: (batch, tokens), integers in ``[0, vocabulary)``; or a tuple of it and a mask, of
            that shape, True where there is a token; or of both and the type ids, integers in
            ``[0, token_types)``, which are 0 where they are not given.
        result: (batch, tokens, features); with a mask, a tuple of it and the mask.

    Args:
        vocabulary: How many different tokens there are.
        max_tokens: The longest sequence.
        features: Length of a token's vector.
        token_types: How many types of tokens there are, such as those of two sentences.
        eps: Of the norm.
        dropout: In training, the share of the result to drop.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
    """

    def __init__(
        self,
        vocabulary: int,
        max_tokens: int,
        features: int,
        *,
        token_types: int = 2,
        eps: float = 1e-12,
        dropout: float = 0.0,
    ) -> None:
        self.words = Embedding(check_extent("vocabulary", vocabulary), features, std=0.02)
        self.positions = LearnedPositions(max_tokens, features)
        self.types = Embedding(check_extent("token_types", token_types), features, std=0.02)
        self.norm = LayerNorm(features, eps=eps)
        self.dropout = Dropout(check_share("dropout", dropout))

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return the tokens' vectors.

        Raises:
            ShapeError: If the ids are not of shape (batch, tokens), the mask or the type ids are
                of another, or there are more tokens than `max_tokens`.
            DTypeError: If ids are no integers, or the mask is not boolean.
            ModuleError: If an id is out of range.
            ModuleStateError: If the layer is not materialised.
        """
        types = None
        if isinstance(x, tuple) and len(x) == 3:
            types, x = x[2], x[:2]
        ids, mask = parted(self, x, ctx)
        if len(shape_of(ids) or ()) != 2:
            raise ShapeError(f"{self!r}: ids must have shape (batch, tokens), got {_shape(ids)}")
        if mask is not None:
            check_mask(mask, tuple(ids.shape))
        if types is None:
            types = namespace(ids).zeros_like(ids)
        elif _shape(types) != _shape(ids):
            raise ShapeError(
                f"{self!r}: type ids must have the shape of the ids, {_shape(ids)}, got "
                f"{_shape(types)}"
            )
        y = self.positions.forward(self.words.forward(ids, ctx), ctx)
        y += self.types.forward(types, ctx)
        y = self.dropout.forward(self.norm.forward(y, ctx), ctx)
        return joined(y, mask)

    def backward_input(self, dy: Any, ctx: Context) -> None:
        """Keep the gradients of the sum for the tables; integers have none."""
        dy, _ = parted(self, dy, what="the gradient")
        d_sum = self._back(self.norm, self._back(self.dropout, dy, ctx), ctx)
        self.types.backward_input(d_sum, ctx)
        self.words.backward_input(self._back(self.positions, d_sum, ctx), ctx)

    def __repr__(self) -> str:
        return (
            f"BertEmbedding({self.words.num_embeddings}, {self.positions.max_tokens}, "
            f"{self.words.features})"
        )


def _shape(x: Any) -> tuple[int, ...]:
    return shape_of(x) or ()
