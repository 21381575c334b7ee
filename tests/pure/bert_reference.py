"""A BERT for sentences in float64, one sentence at a time, from the published formulas.

Devlin et al. (2018), "BERT", with the blocks of Vaswani et al. (2017); Hendrycks and Gimpel (2016),
"Gaussian Error Linear Units"; the means of Reimers and Gurevych (2019), "Sentence-BERT". Nothing
of mpimesh is used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "man", "is", "eating", "food", "."]


class Reference:
    """The model in `folder`."""

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file

        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: values.astype(np.float64)
            for name, values in load_file(folder / "model.safetensors").items()
        }

    def linear(self, name: str, x: Any) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Any) -> Any:
        distance = x - x.mean(axis=1, keepdims=True)
        variance = (distance**2).mean(axis=1, keepdims=True)
        normal = distance / np.sqrt(variance + self.config["layer_norm_eps"])
        return normal * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def __call__(self, ids: list[int]) -> Any:
        """Return the vector of one sentence."""
        w, heads = self.weights, self.config["num_attention_heads"]
        x = (
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][: len(ids)]
            + w["embeddings.token_type_embeddings.weight"][0]
        )
        x = self.norm("embeddings.LayerNorm", x)
        erf = np.vectorize(math.erf)
        for number in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{number}"
            q, k, v = (
                self.linear(f"{layer}.attention.self.{part}", x).reshape(len(ids), heads, -1)
                for part in ("query", "key", "value")
            )
            scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
            e = np.exp(scores - scores.max(axis=2, keepdims=True))
            read = np.einsum("hqk,khd->qhd", e / e.sum(axis=2, keepdims=True), v)
            read = self.linear(f"{layer}.attention.output.dense", read.reshape(len(ids), -1))
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + read)
            inner = self.linear(f"{layer}.intermediate.dense", x)
            inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
            x = self.norm(
                f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", inner)
            )
        mean = x.mean(axis=0)
        return mean / np.linalg.norm(mean)


def write_model(
    folder: Path,
    *,
    heads: int = 3,
    head_dim: int = 4,
    blocks: int = 3,
    hidden: int = 10,
    max_tokens: int = 12,
) -> Path:
    """Write a model with random weights, built as all-MiniLM-L6-v2 is, into `folder`."""
    from safetensors.numpy import save_file

    features, positions = head_dim * heads, max_tokens + 4
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
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
    save_file(
        {name: values.astype(np.float32) for name, values in tensors.items()},
        folder / "model.safetensors",
    )
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
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of words, with the frame and the stale settings that MiniLM's has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
