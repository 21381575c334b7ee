"""A small model with random weights, in the files of all-MiniLM-L6-v2, for tests and timings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

__all__ = ["VOCABULARY", "write_random_model"]

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "man", "is", "eating", "food", "."]
"""The tokens of the model: four special ones, then words that all-MiniLM-L6-v2 has, too."""


def write_random_model(
    folder: Path,
    *,
    heads: int = 3,
    head_dim: int = 4,
    blocks: int = 3,
    hidden: int = 10,
    max_tokens: int = 12,
) -> Path:
    """Write the model into `folder`, and return that. The same sizes give the same weights."""
    from safetensors.numpy import save_file

    features, positions = head_dim * heads, max_tokens + 4
    linear = {"pooler.dense": (features, features)}  # which no vector of a sentence needs
    norms = ["embeddings.LayerNorm"]
    for number in range(blocks):
        layer = f"encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear[f"{layer}.attention.{part}"] = (features, features)
        linear[f"{layer}.intermediate.dense"] = (hidden, features)
        linear[f"{layer}.output.dense"] = (features, hidden)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    rng = np.random.default_rng(0)
    tensors = {
        "embeddings.word_embeddings.weight": rng.normal(size=(len(VOCABULARY), features)),
        "embeddings.position_embeddings.weight": rng.normal(size=(positions, features)),
        "embeddings.token_type_embeddings.weight": rng.normal(size=(2, features)),
    }
    for name, shape in linear.items():
        tensors[f"{name}.weight"] = rng.normal(scale=0.4, size=shape)
        tensors[f"{name}.bias"] = rng.normal(scale=0.4, size=shape[0])
    for name in norms:
        tensors[f"{name}.weight"] = rng.normal(1.0, 0.4, features)
        tensors[f"{name}.bias"] = rng.normal(scale=0.4, size=features)
    folder.mkdir(exist_ok=True)
    arrays = {name: values.astype(np.float32) for name, values in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    files = {
        "config.json": {
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
        },
        "sentence_bert_config.json": {"max_seq_length": max_tokens},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "modules.json": [
            {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds
        ],
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _write_tokenizer(path: Path) -> None:
    """Write a tokenizer of words, with the frame and the stale settings that MiniLM's has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=VOCABULARY[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
