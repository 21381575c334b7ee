"""Sentences to vectors, by all-MiniLM-L6-v2 and models that are built alike."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh import nn
from mpimesh.arrays import HostArray
from mpimesh.errors import MismatchError, ModelError, MpimeshError, on_all_ranks
from mpimesh.models.batches import Batch, deal, plan_batches
from mpimesh.models.config import BertConfig, find_minilm
from mpimesh.models.shares import Part, Share, load_block, load_embedding
from mpimesh.models.tokens import Tokenized, Tokenizer
from mpimesh.models.weights import Weights
from mpimesh.nn.parameter import float_dtype
from mpimesh.parallel import Microbatches, PipelineParallel, PipelineStage
from mpimesh.parallel.groups import group_along
from mpimesh.parallel.microbatch import replica_rows
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["BATCH_TOKENS", "Embedded", "MiniLM"]

Progress = Callable[[int, int], None]

BATCH_TOKENS = 1024
"""About how many tokens are computed at a time: enough for the matrix products to be fast."""
_ROUND_BATCHES = 64
# Batches of a replica that go through the stages in one step.


@dataclass(frozen=True, slots=True)
class Embedded:
    """Sentences as vectors.

    Attributes:
        vectors: (sentences, features), each of length 1.
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
    rank computes some of the heads and of the columns of each block, and the sums over these
    ranks follow from two all-reduces a block. Any of the dims may be missing. A rank reads
    from the file only the weights that it computes with.

    The heads and columns are dealt evenly or so that the first ranks get one more. With more
    stages than blocks, some stages pass on what they get.

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
        config: The model's sizes.
        read_bytes: Bytes of weights that this rank has read.

    Raises:
        ModelError: On every rank, if any cannot read the model, there are more ranks along
            `tensor_dim` than heads, or `batch_tokens` is less than 1.
        MismatchError: On every rank, if the ranks give different arguments.

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
        self._mesh = mesh
        self._scope = mesh.group()
        self._batch_tokens = batch_tokens
        self._here: list[Part] = []
        pipe, tensor = group_along(mesh, dim, "pp"), group_along(mesh, tensor_dim, "tp")
        replicas = group_along(mesh, data_dim, "dp")
        self._replicas, self._replica = replicas.size, _place(replicas)
        problem = ""
        stages: list[PipelineStage] = []
        try:
            if batch_tokens < 1:
                raise ModelError(f"batch_tokens must be at least 1, got {batch_tokens}")
            self._dtype = float_dtype(dtype)
            place = find_minilm() if folder is None else Path(folder)
            self.config = BertConfig.read(place)
            self._tokenizer = Tokenizer(place / "tokenizer.json", self.config.max_tokens)
            share = Share.of(self.config, tensor.size, _place(tensor))
            with Weights(place / "model.safetensors", self._dtype) as weights:
                stages = self._stages(weights, share, pipe.size, _place(pipe), tensor)
                self.read_bytes = weights.read_bytes
        except MpimeshError as error:
            problem = str(error)
        self._agree(problem)
        self._pipe = PipelineParallel(
            stages,
            _ROUND_BATCHES,
            mesh=mesh,
            dim=dim,
            data_dim=data_dim,
            dtype=self._dtype,
            schedule="gpipe",
        )

    def embed(self, sentences: Sequence[str], *, progress: Progress | None = None) -> Embedded:
        """Return the vectors of sentences. Collective over the mesh.

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
            Each rank turns all sentences into ids. Activations go once between neighbouring stages,
            twice through an all-reduce in each block, and the vectors to all ranks.
        """
        problem, digest, tokens = "", 0, Tokenized((), (), ())
        try:
            if isinstance(sentences, str):
                raise ModelError("sentences must be a list of texts, got one text")
            tokens = self._tokenizer(sentences)
            digest = zlib.crc32("\n".join(sentences).encode())
        except (ModelError, TypeError, ValueError) as error:
            problem = f"cannot read the sentences: {error}"
        self._agree(problem, digest, len(sentences))
        lengths = [len(one) for one in tokens.ids]
        batches = plan_batches(lengths, batch_tokens=self._batch_tokens, replicas=self._replicas)
        vectors = np.zeros((len(lengths), self.config.features), self._dtype)
        rounds = [
            deal(batches[start : start + _ROUND_BATCHES * self._replicas], self._replicas)
            for start in range(0, len(batches), _ROUND_BATCHES * self._replicas)
        ]
        with self._counting(rounds, progress):
            for batches in rounds:
                x = Microbatches([one.arrays(tokens.ids) for one in batches])
                found = self._pipe.forward(x, everywhere=True)
                for one, part in zip(batches, found, strict=True):
                    vectors[list(one.rows)] = part
        return Embedded(vectors, tokens.empty, tokens.cut, sum(lengths))

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
            for one in batches[replica_rows(len(batches), self._replicas, self._replica)]
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
        self, weights: Weights, share: Share, num_stages: int, number: int, group: ProcessGroup
    ) -> list[PipelineStage]:
        """Return all stages, with weights in that of this number."""
        config = self.config
        stages = [PipelineStage(stage) for stage in range(num_stages)]
        for place, stage in enumerate(stages):
            makers: list[Callable[[], nn.SupportsLayer]] = []
            if place == 0:
                makers.append(partial(load_embedding, weights, config))
            blocks = replica_rows(config.num_blocks, num_stages, place)
            makers += [
                partial(load_block, weights, config, block, share, group)
                for block in range(blocks.start, blocks.stop)
            ]
            if place == num_stages - 1:
                makers.append(lambda: nn.Sequential(nn.MeanPool(), nn.Normalize()))
            for make in makers:
                part = Part(make() if place == number else nn.Sequential())
                stage.add_layer(part)
                if place == number:
                    self._here.append(part)
        return stages

    def _agree(self, problem: str, *facts: object) -> None:
        """Raise on every rank if any has a problem, or their facts differ. Collective."""
        told = exchange(
            self._scope.progress, self._scope.communicator, [problem, *facts], what="MiniLM"
        )
        for rank, (found, *_) in enumerate(told):
            if found:
                raise on_all_ranks(ModelError(f"rank {rank}: {found}"))
        for rank, values in enumerate(told):
            if values != told[0]:
                raise on_all_ranks(
                    MismatchError(
                        "every rank must give the same sentences to a model on a mesh, but those "
                        f"of rank {rank} are other than those of rank 0: {values[-1]} and "
                        f"{told[0][-1]} sentences"
                    )
                )


def _place(group: ProcessGroup) -> int:
    return 0 if group.rank is None else group.rank
