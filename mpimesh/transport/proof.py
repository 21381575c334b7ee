"""May MPI be given device memory? Only where that was proven.

An MPI that cannot take a device pointer crashes on it, and none says reliably
whether it can. So each operation is tried once in child processes (see
`proof_launch.py`), and the answer is kept for later jobs (`proof_cache.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.settings import Settings
from mpimesh.transport.answer import OPERATIONS, Answer
from mpimesh.transport.base import Communicator
from mpimesh.transport.engine import Steps
from mpimesh.transport.proof_cache import (
    cache_folder,
    digest,
    has_cupy,
    key_facts,
    read_answers,
    write_answers,
)
from mpimesh.transport.proof_launch import LIMIT_S, prove

__all__ = ["Proofs", "cuda_aware", "ensure_proofs", "proof_notes", "proof_steps"]


class Proofs:
    """Proofs of what this process's MPI can do.

    Args:
        folder: Where answers are kept; None for mpimesh's own place.
        limit_s: Limit for one child process.

    Attributes:
        notes: What did not go as it should, for a person.
    """

    def __init__(self, folder: Path | None = None, *, limit_s: float = LIMIT_S) -> None:
        self._folder = cache_folder() if folder is None else folder
        self._limit_s = limit_s
        self._key: dict[str, str] = {}
        self._own: dict[str, dict[str, Answer]] = {}
        self._answers: dict[tuple[str, str], Answer] = {}
        self.notes: list[str] = []

    def answer(self, operation: str, memory: str = "device") -> Answer:
        """Return what is known. Local."""
        forced = _forced()
        if forced is not None:
            return forced
        unknown = Answer(False, "not tried yet in this process", lasting=False)
        return self._answers.get((operation, memory), unknown)

    def steps(
        self,
        communicator: Communicator,
        operations: Sequence[str] = OPERATIONS,
        memory: str = "device",
        *,
        fresh: bool = False,
    ) -> Steps:
        """Collective: find the answers that all ranks of `communicator` share, by operation.

        Of all ranks with the same MPI and GPU the first one looks into the cache and, if need be,
        tries. The answer is yes where it is yes for all of them, and the same on all ranks.

        Cost:
            Three small all-gathers; where nothing is kept, a few seconds in a child process.
        """
        forced = _forced()
        if forced is not None:
            return dict.fromkeys(operations, forced)
        if communicator.kind != "mpi":
            return dict.fromkeys(operations, Answer(False, "these ranks are threads, not MPI's"))
        # Neither the MPI nor the GPUs of a process change.
        key = self._key = self._key or key_facts()
        mine = np.array([int(digest(*key.values()), 16) >> 1], np.int64)
        keys = np.empty(communicator.size, np.int64)
        yield communicator.all_gather(mine, keys, [1] * communicator.size)
        leaders = np.unique(keys, return_index=True)[1].tolist()
        found: dict[str, Answer] = {}
        if communicator.rank in leaders:
            found = yield from self._find(key, operations, memory, fresh=fresh)
        texts = yield from _gather_texts(communicator, json.dumps(_to_fields(found)))
        shared = _in_common([_from_fields(json.loads(texts[rank])) for rank in leaders], operations)
        self._answers |= {(operation, memory): answer for operation, answer in shared.items()}
        return shared

    def _find(
        self, key: dict[str, str], operations: Sequence[str], memory: str, *, fresh: bool
    ) -> Steps:
        if not has_cupy():
            return dict.fromkeys(operations, Answer(False, "CuPy is not installed"))
        known, note = ({}, "") if fresh else read_answers(key, memory, self._folder)
        if not fresh:
            known |= self._own.get(memory, {})
        unknown = [operation for operation in operations if operation not in known]
        if unknown:
            try:
                known |= yield from prove(unknown, memory, limit_s=self._limit_s)
            except OSError as error:
                reason = f"no child process could be started: {error}"
                return known | dict.fromkeys(unknown, Answer(False, reason, lasting=False))
            self.notes += filter(None, [note, write_answers(key, memory, known, self._folder)])
        self._own[memory] = known
        return known


def _forced() -> Answer | None:
    setting = Settings.from_environment().cuda_aware
    return None if setting == "auto" else Answer(setting == "yes", f"MPIMESH_CUDA_AWARE={setting}")


def _gather_texts(communicator: Communicator, text: str) -> Steps:
    mine: HostArray = np.frombuffer(text.encode(), np.uint8).copy()
    sizes = np.empty(communicator.size, np.int64)
    yield communicator.all_gather(np.array([mine.size]), sizes, [1] * communicator.size)
    texts = np.empty(int(sizes.sum()), np.uint8)
    yield communicator.all_gather(mine, texts, sizes.tolist())
    return [bytes(part).decode() for part in np.split(texts, np.cumsum(sizes)[:-1])]


def _to_fields(answers: dict[str, Answer]) -> dict[str, dict[str, object]]:
    return {operation: asdict(answer) for operation, answer in answers.items()}


def _from_fields(fields: dict[str, dict[str, object]]) -> dict[str, Answer]:
    return {
        operation: Answer(bool(one["usable"]), str(one["reason"]), bool(one["lasting"]))
        for operation, one in fields.items()
    }


def _in_common(found: list[dict[str, Answer]], operations: Sequence[str]) -> dict[str, Answer]:
    """Return for each operation the first no, else the first yes."""
    return {
        operation: min((answers[operation] for answers in found), key=lambda one: one.usable)
        for operation in operations
    }


# One per process, because MPI is.
_of_process = Proofs()


def cuda_aware(operation: str, memory: str = "device") -> tuple[bool, str]:
    """Tell whether MPI may be given device memory for `operation`, and why. Local.

    No, until :func:`ensure_proofs` has run. ``MPIMESH_CUDA_AWARE`` says otherwise.

    Args:
        operation: One of :data:`~mpimesh.transport.answer.OPERATIONS`; others get a no.
        memory: One of :data:`~mpimesh.transport.answer.MEMORIES`.
    """
    answer = _of_process.answer(operation, memory)
    return answer.usable, answer.reason


def proof_notes() -> tuple[str, ...]:
    """Return what did not go as it should when proofs were read and written. Local."""
    return tuple(_of_process.notes)


def proof_steps(
    communicator: Communicator,
    operations: Sequence[str] = OPERATIONS,
    memory: str = "device",
    *,
    fresh: bool = False,
) -> Steps:
    """Collective: find out what :func:`cuda_aware` tells, as steps that never wait.

    Args:
        communicator: All ranks that will use it.
        operations: What is asked about.
        memory: The kind of memory.
        fresh: Try anew, whatever is kept.

    Returns:
        The answers by operation, the same on every rank, as the steps' value.

    Cost:
        As :meth:`Proofs.steps`.
    """
    return _of_process.steps(communicator, operations, memory, fresh=fresh)


def ensure_proofs(
    communicator: Communicator,
    operations: Sequence[str] = OPERATIONS,
    memory: str = "device",
    *,
    fresh: bool = False,
) -> dict[str, Answer]:
    """Collective: as :func:`proof_steps`, and wait for it. Nothing else moves meanwhile."""
    steps = proof_steps(communicator, operations, memory, fresh=fresh)
    while True:
        try:
            request = next(steps)
        except StopIteration as stop:
            answers: dict[str, Answer] = stop.value
            return answers
        communicator.wait(request.test, what="the proof of CUDA-aware MPI")
