"""Sentences to vectors by all-MiniLM-L6-v2: one rank alone, and replicas.

Where the published weights are not installed, a model of the same shape with random weights takes
their place; it computes as much. With as many cores as ranks, replicas can be as many times as
fast as one rank at most.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from minilm.model import MiniLM, find_minilm
from minilm.random_model import VOCABULARY, write_random_model

__all__ = ["available", "run"]

SENTENCES = 256
_TINY_SENTENCES = 16
_MOST_WORDS = 40
_ROUNDS = 5
_SHAPE = {"heads": 12, "head_dim": 32, "blocks": 6, "hidden": 1536, "max_tokens": 256}
# Of all-MiniLM-L6-v2. Its vocabulary costs memory, but no time.


def available() -> str:
    """Return why there is nothing to be measured, or nothing."""
    for module in ("safetensors", "tokenizers"):
        if importlib.util.find_spec(module) is None:
            return f"this Python has no {module}; pip install safetensors tokenizers"
    return ""


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; sentences a second are the sentences over the time."""
    if available():
        return []
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    rounds = min(_ROUNDS, effort.rounds)
    count = _TINY_SENTENCES if effort is TINY else SENTENCES
    sentences = make_sentences(count)
    n = mesh.world_size
    with (
        _folder(comm, tiny=effort is TINY) as (folder, kind),
        mm.DeviceMesh({"dp": 1}, MPI.COMM_SELF) as alone,
        mm.DeviceMesh({"dp": n}, comm) as replicas,
    ):
        ways = {
            "one rank": _alone(mesh, MiniLM(alone, folder), sentences),
            f"{n} replicas": _embed(MiniLM(replicas, folder), sentences),
        }
        expected, found = (way() for way in ways.values())
        if mesh.rank == 0 and not np.allclose(found, expected, rtol=0, atol=1e-5):
            raise SystemExit("the replicas' vectors differ from those of one rank")
        timings = in_turns(comm, ways, calls=1, rounds=rounds)
    return make_rows(f"{count} sentences, {kind}", timings)


def make_sentences(count: int) -> list[str]:
    """Return sentences of words that both vocabularies have, of very different lengths."""
    rng = np.random.default_rng(0)
    words = VOCABULARY[4:]  # those of the random model, which the published one has, too
    return [" ".join(rng.choice(words, rng.integers(3, _MOST_WORDS + 1))) for _ in range(count)]


def _alone(mesh: mm.DeviceMesh, model: MiniLM, sentences: list[str]) -> Callable[[], Any]:
    """Return the work of rank 0, for whose end the others wait in their sleep."""

    def embed() -> Any:
        vectors = model.embed(sentences) if mesh.rank == 0 else None
        mesh.barrier()
        return vectors

    return embed


def _embed(model: MiniLM, sentences: list[str]) -> Callable[[], Any]:
    return lambda: model.embed(sentences)


@contextmanager
def _folder(comm: MPI.Intracomm, *, tiny: bool) -> Iterator[tuple[Path, str]]:
    """Yield where the model is, and what it is called. Collective."""
    published = None if tiny else find_minilm()
    if published is not None:
        yield published, "published weights"
        return
    with TemporaryDirectory() as own:  # rank 0's is used: it outlives the others' use of it
        folder = Path(comm.bcast(own))
        if comm.rank == 0:
            write_random_model(folder, **({} if tiny else _SHAPE))
        comm.Barrier()
        yield folder, "random weights"
        comm.Barrier()
