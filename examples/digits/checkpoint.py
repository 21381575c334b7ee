"""Save a training run and go on from it, also on another mesh.

What is saved is the state after a step: weights and what the optimizer keeps for each, under
the names that they have in the whole model. Every stage writes its own part, from its first
replica, for all replicas hold the same. A file becomes visible under its name only when it
is whole, and ``checkpoint.json``, which says what belongs together, comes last: a job
killed in the middle of saving goes on from the save before.

    DIR/checkpoint.json             step, settings, losses so far, and the folder of the parts
    DIR/step-00000120/stage-0.npz   "0.weight", "0.weight:mean", "0.weight:square", ...
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import mpimesh as mm
from mpimesh.errors import MpimeshError

MANIFEST = "checkpoint.json"


class CheckpointError(MpimeshError):
    """A checkpoint cannot be written, or is not of this run. Raised on every rank."""

    agreed = True


class Checkpoint:
    """A folder that all ranks can see.

    Args:
        folder: Made when it is first written to. None neither saves nor loads.
        mesh: The ranks that save and load together.
        settings: What a run must have in common with the one that it goes on from.
    """

    def __init__(
        self, folder: Path | None, mesh: mm.DeviceMesh, settings: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._mesh = mesh
        self._settings = dict(settings)

    def save(
        self, pipe: mm.PipelineParallel, optimizer: mm.optim.Optimizer, losses: list[float]
    ) -> None:
        """Collective: save the state after ``len(losses)`` steps.

        Raises:
            CheckpointError: If a rank could not write its part; the save before is untouched.
        """
        if self._folder is None:
            return
        parts = self._folder / f"step-{len(losses):08}"
        arrays = state_arrays(pipe, optimizer)

        def write_part() -> None:
            if self._mesh.coord("dp") == 0:
                parts.mkdir(parents=True, exist_ok=True)
                path = parts / f"stage-{self._mesh.coord('pp')}.npz"
                write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))

        def write_manifest() -> None:
            if self._mesh.rank == 0:
                manifest = {"folder": parts.name, "settings": self._settings, "losses": losses}
                text = json.dumps(manifest).encode()
                write_whole(parts.parent / MANIFEST, lambda file: file.write(text))

        self._on_all_ranks("write", write_part)
        self._on_all_ranks("write", write_manifest)
        if self._mesh.rank == 0:
            for old in parts.parent.glob("step-*"):
                if old != parts:
                    shutil.rmtree(old, ignore_errors=True)

    def load(self, pipe: mm.PipelineParallel, optimizer: mm.optim.Optimizer) -> list[float]:
        """Collective: take over what is saved, if anything is.

        Returns:
            The losses of the steps that were done; none for a new run.

        Raises:
            CheckpointError: If what is there cannot be read, or is of another run.
        """
        if self._folder is None:
            return []
        manifest = self._read_manifest(self._folder / MANIFEST)
        if manifest is None:
            return []
        self._check(manifest["settings"])
        folder = self._folder / manifest["folder"]

        def read_parts() -> None:
            arrays: dict[str, np.ndarray] = {}
            for path in sorted(folder.glob("stage-*.npz")):
                with path.open("rb") as file, np.load(file, allow_pickle=False) as part:
                    arrays.update(part)
            load_arrays(pipe, optimizer, arrays)

        self._on_all_ranks("read", read_parts)
        losses: list[float] = manifest["losses"]
        pipe.step = len(losses)
        return losses

    def _read_manifest(self, path: Path) -> dict[str, Any] | None:
        """Collective: rank 0 reads, so that all ranks go on from the same save."""
        found: list[bytes] = [b""]

        def read() -> None:
            if self._mesh.rank == 0 and path.exists():
                found[0] = path.read_bytes()

        self._on_all_ranks("read", read)
        text = np.frombuffer(found[0], np.uint8) if self._mesh.rank == 0 else None
        text = self._mesh.group().broadcast(text, root=None).resolve()
        return json.loads(text.tobytes()) if text.size else None

    def _check(self, saved: Mapping[str, Any]) -> None:
        differences = [
            f"{name} {saved.get(name)} there, {self._settings.get(name)} here"
            for name in sorted({*saved, *self._settings})
            if saved.get(name) != self._settings.get(name)
        ]
        if differences:
            raise CheckpointError(
                f"{self._folder} has the checkpoint of another run: {'; '.join(differences)}"
            )

    def _on_all_ranks(self, what: str, action: Callable[[], None]) -> None:
        """Collective: run `action`, and raise on every rank if it failed on any."""
        problem = ""
        try:
            action()
        except Exception as error:  # a damaged file may raise anything, and the others wait
            problem = f"rank {self._mesh.rank} could not {what} {self._folder}: {error!r}"
        failed = np.array(1 if problem else 0)
        if self._mesh.group().all_reduce(failed, op="max").resolve():
            raise CheckpointError(problem or f"another rank could not {what} {self._folder}")


def state_arrays(pipe: mm.PipelineParallel, optimizer: mm.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return this rank's weights, and the optimizer's arrays and count of steps for each."""
    arrays: dict[str, np.ndarray] = {}
    states = optimizer.state_dict()["params"]
    for (name, parameter), state in zip(pipe.named_parameters(), states, strict=True):
        arrays[name] = parameter.value()
        arrays |= {f"{name}:{key}": np.asarray(value) for key, value in state.items()}
    return arrays


def load_arrays(
    pipe: mm.PipelineParallel, optimizer: mm.optim.Optimizer, arrays: Mapping[str, np.ndarray]
) -> None:
    """Take over the part of `arrays` that this rank's stages need."""
    states = []
    for name, parameter in pipe.named_parameters():
        parameter.value()[...] = arrays[name]
        states.append(
            {
                key.removeprefix(f"{name}:"): array
                for key, array in arrays.items()
                if key.startswith(f"{name}:")
            }
        )
    optimizer.load_state_dict({**optimizer.state_dict(), "params": states})


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that is seen under its name only when all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a crash of the machine could undo the renaming
    finally:
        os.close(folder)
