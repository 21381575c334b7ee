"""A model with random weights, for tests and benchmarks where the published one is not there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import ModelError
from mpimesh.models.config import INSTALL
from mpimesh.store.format import safetensors_header

__all__ = ["VOCABULARY", "write_random_model"]

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "man", "is", "eating", "food", "."]
"""The tokens of the model: four special ones, then words."""

_KINDS = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
_MODULES = [
    {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for idx, (path, kind) in enumerate(_KINDS)
]


def write_random_model(
    folder: Path,
    *,
    heads: int = 3,
    head_dim: int = 4,
    blocks: int = 3,
    hidden: int = 10,
    max_tokens: int = 12,
) -> Path:
    """Write a model with random weights, built as all-MiniLM-L6-v2 is, into `folder`. Local.

    The same sizes give the same weights. Its words are those of :data:`VOCABULARY`, which
    all-MiniLM-L6-v2 has, too.

    Args:
        folder: Where to; made if it is not there.
        heads: Number of heads of each block.
        head_dim: Length of a head's vectors.
        blocks: Number of blocks.
        hidden: Length of what is inside the mlp of a block.
        max_tokens: Most tokens of a sentence.

    Returns:
        `folder`.

    Raises:
        ModelError: If a library is missing.
    """
    features, positions = head_dim * heads, max_tokens + 4
    rng = np.random.default_rng(0)
    tensors: dict[str, HostArray] = {
        "embeddings.word_embeddings.weight": rng.normal(size=(len(VOCABULARY), features)),
        "embeddings.position_embeddings.weight": rng.normal(size=(positions, features)),
        "embeddings.token_type_embeddings.weight": rng.normal(size=(2, features)),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(blocks):
        layer = f"encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{layer}.attention.{part}"] = (features, features)
        shapes[f"{layer}.intermediate.dense"] = (hidden, features)
        shapes[f"{layer}.output.dense"] = (features, hidden)
        for part in ("attention.output", "output"):
            shapes[f"{layer}.{part}.LayerNorm"] = (features,)
    shapes["embeddings.LayerNorm"] = (features,)
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = rng.normal(loc=len(shape) == 1, scale=0.4, size=shape)
        tensors[f"{name}.bias"] = rng.normal(scale=0.4, size=shape[:1])
    folder.mkdir(exist_ok=True)
    kind = np.dtype(np.float32)
    header, _ = safetensors_header([(name, kind, one.shape) for name, one in tensors.items()])
    data = [values.astype(kind).tobytes() for values in tensors.values()]
    (folder / "model.safetensors").write_bytes(b"".join([header, *data]))
    config: dict[str, Any] = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": len(VOCABULARY),
        "hidden_size": features,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(_MODULES))
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _write_tokenizer(path: Path) -> None:
    """Write a tokenizer of words, with the frame and the stale settings that MiniLM's has."""
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ModelError(f"cannot write a tokenizer, {error}: {INSTALL}") from None
    tokenizer = library.Tokenizer(
        library.models.WordPiece(
            {word: i for i, word in enumerate(VOCABULARY)}, unk_token=VOCABULARY[1]
        )
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = library.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
