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

    @staticmethod
    def activation(x: Any) -> Any:
        """Return GELU."""
        erf = np.array(list(map(math.erf, (x / math.sqrt(2)).ravel().tolist())))
        return x * (1 + erf.reshape(x.shape)) / 2

    def __call__(self, ids: list[int]) -> Any:
        """Return the vector of one sentence: the mean, of length 1."""
        mean = self.tokens(ids).mean(axis=0)
        return mean / np.linalg.norm(mean)

    def tokens(self, ids: list[int]) -> Any:
        """Return the vectors of a sentence's tokens."""
        w, heads = self.weights, self.config["num_attention_heads"]
        x = (
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][: len(ids)]
            + w["embeddings.token_type_embeddings.weight"][0]
        )
        x = self.norm("embeddings.LayerNorm", x)
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
            inner = self.activation(inner)
            x = self.norm(
                f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", inner)
            )
        return x
