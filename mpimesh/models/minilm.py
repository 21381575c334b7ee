"""Sentences to vectors, by all-MiniLM-L6-v2 and models that are built alike."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh import nn
from mpimesh.arrays import HostArray
from mpimesh.errors import MeshError, MismatchError, ModelError, MpimeshError, on_all_ranks
from mpimesh.models.batches import Batch, deal, plan_batches
from mpimesh.models.config import BertConfig, find_minilm
from mpimesh.models.loading import Part, check_ranks, load_block, load_embedding
from mpimesh.models.modules import Modules
from mpimesh.models.pooling import pooling_layer
from mpimesh.models.tokens import Tokenized, Tokenizer
from mpimesh.models.weights import Weights, fingerprint
from mpimesh.nn.parameter import float_dtype
from mpimesh.nn.split import Ranks
from mpimesh.parallel import Microbatches, PipelineParallel, PipelineStage
from mpimesh.parallel.groups import group_along
from mpimesh.parallel.microbatch import replica_rows, replica_sizes
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree

__all__ = ["BATCH_TOKENS", "ROUND_BATCHES", "Embedded", "MiniLM", "Progress"]

Progress = Callable[[int, int], None]
"""Called with what is done and what there is."""

BATCH_TOKENS = 1024
"""About how many tokens are computed at a time: enough for the matrix products to be fast."""
ROUND_BATCHES = 64
"""Batches of a replica that go through the stages in one step."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Sentences as vectors.

    Attributes:
        vectors: (sentences, width), each of length 1 if the model says so, as all-MiniLM-L6-v2
            does.
        empty: Places of the sentences without a word. Their vectors are what the model makes of
            nothing, all the same.
        cut: Places of the sentences of which only the beginning was read, as much as the model
            reads.
        num_tokens: Tokens that were read.
    """

    vectors: HostArray
    empty: tuple[int, ...]
    cut: tuple[int, ...]
    num_tokens: int


class MiniLM:
    """A BERT that makes sentences into vectors, over the ranks of a mesh.

    Making it and :meth:`embed` are collective over the mesh. Replicas along `data_dim` share the
    batches; along `dim` the blocks are cut into stages of a pipeline; along `tensor_dim` each
    rank has some of the words and computes some of the heads and of the columns of each block, and
    the sums over these ranks follow from an all-reduce for the words and two for each block. Any
    of the dims may be missing; the mesh has no others. A rank reads from the file only the weights
    that it computes with, and 260 KiB by which the ranks tell whether they have the same file.

    Words, heads and columns are dealt evenly or so that the first ranks get one more. With more
    stages than blocks, some stages pass on what they get.

    The folder is one of sentence-transformers: its modules.json says how the tokens' vectors are
    pooled, and whether the result gets the length 1. What is not computed here is refused.

    Args:
        mesh: The mesh.
        folder: Where config.json, tokenizer.json and model.safetensors are, on every rank. None
            for all-MiniLM-L6-v2, see :func:`find_minilm`.
        dim: The dim of the stages.
        data_dim: The dim of the replicas.
        tensor_dim: The dim of the ranks that share a block.
        batch_tokens: About how many tokens are computed at a time.
        dtype: float32, float64 or float16, in which the model is computed.

    Attributes:
        mesh: As given.
        config: The model's sizes.
        modules: What comes before and after the BERT.
        width: The length of a sentence's vector.
        replicas: The number of replicas.
        batch_tokens: As given.
        dtype: As given.
        read_bytes: Bytes of weights that this rank has read.

    Raises:
        ModelError: On every rank, if any cannot read the model, there are more ranks along
            `tensor_dim` than heads, or an argument cannot be used.
        MismatchError: On every rank, if the ranks give different arguments, or have other files.

    Example:
        >>> with mm.DeviceMesh("dp=2,tp=2") as mesh:
        ...     model = MiniLM(mesh)
        ...     vectors = model.embed(["A man is eating food.", "Someone eats."]).vectors
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        folder: str | os.PathLike[str] | None = None,
        *,
        dim: str = "pp",
        data_dim: str = "dp",
        tensor_dim: str = "tp",
        batch_tokens: int = BATCH_TOKENS,
        dtype: Any = np.float32,
    ) -> None:
        self.mesh = mesh
        self.batch_tokens = batch_tokens
        self._scope = mesh.group()
        self._here: list[Part] = []
        facts: dict[str, object] = {}
        stages: list[PipelineStage] = []
        cause = None
        try:
            _check_arguments(mesh, (dim, data_dim, tensor_dim), batch_tokens)
            pipe, replicas = group_along(mesh, dim, "pp"), group_along(mesh, data_dim, "dp")
            tensor = Ranks(group_along(mesh, tensor_dim, "tp"))
            self.replicas, self._replica = replicas.size, _place(replicas)
            self.dtype = float_dtype(dtype)
            self.modules = Modules.read(find_minilm() if folder is None else Path(folder))
            place = self.modules.folder
            self.config = BertConfig.read(self.modules)
            self.width = len(self.modules.pooling) * self.config.features
            self._tokenizer = Tokenizer(
                place / "tokenizer.json", self.config.max_tokens, lower=self.modules.lower
            )
            check_ranks(self.config, tensor.size)
            with Weights(place / "model.safetensors", self.dtype) as weights:
                stages = self._stages(weights, pipe.size, _place(pipe), tensor)
                self.read_bytes = weights.read_bytes
            facts = {
                "dims": [dim, data_dim, tensor_dim],
                "batch_tokens": batch_tokens,
                "dtype": str(self.dtype),
                "config.json": str(self.config),
                "modules.json": [self.modules.pooling, self.modules.normalize, self.modules.lower],
                "tokenizer.json": zlib.crc32((place / "tokenizer.json").read_bytes()),
                "model.safetensors": fingerprint(place / "model.safetensors"),
            }
        except Exception as error:  # whatever it is, the others must not wait for this rank
            cause = error
        self._agree(cause, facts, "a MiniLM of the same")
        self._pipe = PipelineParallel(
            stages,
            ROUND_BATCHES,
            mesh=mesh,
            dim=dim,
            data_dim=data_dim,
            dtype=self.dtype,
            schedule="gpipe",
        )

    def embed(self, sentences: Sequence[str], *, progress: Progress | None = None) -> Embedded:
        """Return the vectors of sentences. Collective over the mesh.

        For more of them than fit into memory there is :func:`~mpimesh.models.embed_file`.

        Args:
            sentences: The sentences, the same on every rank.
            progress: Called with the numbers of sentences that have come through this rank, and
                that will; on ranks that want to know.

        Returns:
            The vectors, in the order of the sentences, on every rank.

        Raises:
            ModelError: On every rank, if any has something else than texts that UTF-8 can say.
            MismatchError: On every rank, if the ranks give different sentences.
            StageError: On every rank, if computing fails on any.

        Cost:
            Each rank turns its share of the sentences into ids, and an all-gather gives them to
            all. Activations go once between neighbouring stages, through an all-reduce after the
            embedding and two in each block, and the vectors to all ranks.
        """
        tokens = self._tokens(sentences)
        lengths = [len(one) for one in tokens.ids]
        batches = plan_batches(lengths, batch_tokens=self.batch_tokens, replicas=self.replicas)
        vectors = np.zeros((len(lengths), self.width), self.dtype)
        rounds = [
            deal(batches[start : start + ROUND_BATCHES * self.replicas], self.replicas)
            for start in range(0, len(batches), ROUND_BATCHES * self.replicas)
        ]
        with self._counting(rounds, progress):
            for batches in rounds:
                x = Microbatches([one.arrays(tokens.ids) for one in batches])
                found = self._pipe.forward(x, everywhere=True)
                for one, part in zip(batches, found, strict=True):
                    vectors[list(one.rows)] = part
        return Embedded(vectors, tokens.empty, tokens.cut, sum(lengths))

    def _tokens(self, sentences: Sequence[str]) -> Tokenized:
        """Return the ids of all sentences, each rank having turned its share into them."""
        cause, facts = None, {}
        here = Tokenized((), (), ())
        ranks, rank = self._scope.size, _place(self._scope)
        try:
            if isinstance(sentences, str):
                raise ModelError("sentences must be a list of texts, got one text")
            for place, text in enumerate(sentences):
                if not isinstance(text, str):
                    raise ModelError(
                        f"sentences must be a list of texts, got {type(text).__name__} at {place}"
                    )
            facts = {
                "number of sentences": len(sentences),
                "sentences": zlib.crc32("\n".join(sentences).encode()),
            }
            mine = replica_rows(len(sentences), ranks, rank)
            here = self._tokenizer(sentences[mine])
        except Exception as error:  # whatever it is, the others must not wait for this rank
            cause = ModelError(f"cannot read the sentences: {error}")
        own = sum(map(len, here.ids))
        sizes = self._agree(cause, facts, "the same", own)
        if ranks == 1:
            return here
        # A length, or what is below 0 for that of a sentence that was cut.
        lengths = np.array([len(one) for one in here.ids], np.int64)
        lengths[list(here.cut)] *= -1
        handles = [
            self._scope.all_gather(lengths, sizes=replica_sizes(len(sentences), ranks)),
            self._scope.all_gather(np.concatenate([_NO_IDS, *here.ids]), sizes=sizes),
        ]
        signed, ids = (handle.resolve() for handle in handles)
        ends = list(accumulate(np.abs(signed).tolist()))
        return self._tokenizer.tokenized(
            np.split(ids, ends[:-1]) if ends else [], np.flatnonzero(signed < 0).tolist()
        )

    @contextmanager
    def _counting(
        self, rounds: Sequence[Sequence[Batch]], progress: Progress | None
    ) -> Iterator[None]:
        """Tell `progress` of the sentences that come through this rank's stage."""
        if progress is None:
            yield
            return
        mine = [
            one
            for batches in rounds
            for one in batches[replica_rows(len(batches), self.replicas, self._replica)]
        ]
        total, done = sum(len(one.rows) for one in mine), 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            progress(done, total)

        progress(0, total)
        last = self._here[-1:]  # a stage may have no part
        for part in last:
            part.seen = count
        try:
            yield
        finally:
            for part in last:
                part.seen = None

    def _stages(
        self, weights: Weights, num_stages: int, number: int, tensor: Ranks
    ) -> list[PipelineStage]:
        """Return all stages, with weights in that of this number."""
        config, modules = self.config, self.modules
        stages = [PipelineStage(stage) for stage in range(num_stages)]
        for place, stage in enumerate(stages):
            makers: list[Callable[[], nn.SupportsLayer]] = []
            if place == 0:
                makers.append(partial(load_embedding, weights, config, tensor))
            blocks = replica_rows(config.num_blocks, num_stages, place)
            makers += [
                partial(load_block, weights, config, block, tensor)
                for block in range(blocks.start, blocks.stop)
            ]
            if place == num_stages - 1:
                makers.append(partial(pooling_layer, modules.pooling, normalize=modules.normalize))
            for make in makers:
                part = Part(make() if place == number else nn.Sequential(), tensor)
                stage.add_layer(part)
                if place == number:
                    self._here.append(part)
        return stages

    def _agree(
        self, cause: Exception | None, facts: Mapping[str, object], what: str, own: int = 0
    ) -> list[int]:
        """Return what all ranks have of their `own`. Collective.

        Raises on every rank if any has a cause to fail, or their facts differ.
        """
        problem = None
        if cause is not None:
            known = isinstance(cause, MpimeshError)
            problem = ModelError(str(cause) if known else f"{type(cause).__name__}: {cause}")
            problem.__cause__ = cause
        rows = agree(self._scope._core, "MiniLM", [dict(facts), own], problem=problem)
        first = rows[0][0]
        for rank, (values, _) in enumerate(rows):
            for name, value in values.items():
                if value != first[name]:
                    both = f": {value} and {first[name]}"
                    values_text = "" if name in _CHECKED else both
                    raise on_all_ranks(
                        MismatchError(
                            f"every rank must give {what} {name}, but that of rank {rank} is "
                            f"other than that of rank 0{values_text}"
                        )
                    )
        return [size for _, size in rows]

    def __repr__(self) -> str:
        return (
            f"MiniLM({self.mesh.dims_text!r}, {str(self.modules.folder)!r}, width={self.width}, "
            f"dtype={self.dtype})"
        )


_CHECKED = ("sentences", "tokenizer.json", "model.safetensors")
# By checksums, which say nothing to a reader.
_NO_IDS = np.zeros(0, np.int32)


def _check_arguments(mesh: DeviceMesh, dims: Sequence[str], batch_tokens: int) -> None:
    if batch_tokens < 1:
        raise ModelError(f"batch_tokens must be at least 1, got {batch_tokens}")
    strange = [name for name in mesh.dim_names if name not in dims]
    if strange:
        raise MeshError(
            f"the mesh {mesh.dims_text} has the dim {strange[0]!r}, over which nothing would be "
            f"shared: a MiniLM knows the dims {', '.join(dims)}"
        )


def _place(group: ProcessGroup) -> int:
    return 0 if group.rank is None else group.rank
