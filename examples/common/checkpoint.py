"""Save a training run and go on from it, also on another mesh.

What is saved is the state after a step: weights and what the optimizer keeps for each, under
the names that they have in the whole model, and what else a training is. Random numbers need no
saving: batches and dropout are functions of the seed and of the step. Every rank of the first
replica writes what it holds, for all replicas hold the same; of a weight that ranks share, each
writes its part, and where that lies in the whole. A file becomes visible under its name only when
it is whole, and ``checkpoint.json``, which says what belongs together, comes last: a job killed in
the middle of saving goes on from the save before.

    DIR/checkpoint.json                           settings, files, and what the training notes
    DIR/step-00000120/rank-0.safetensors          "0.weight", "0.weight:mean", ...
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm
from common.manifest import Manifest
from common.program import ProgramError, on_all_ranks
from mpimesh.layout.boxes import Box, common, local_box, view
from mpimesh.nn import Parameter

MANIFEST = "checkpoint.json"

State = dict[str, Any]
"""Of an optimizer for one parameter: arrays of its size, and counts."""


class Checkpoint:
    """A folder that all ranks can see.

    Args:
        folder: Made if it is not there. None neither saves nor loads.
        mesh: The ranks that save and load together.
        settings: What a run must have in common with the one that it goes on from.
        advice: What to do where one of the settings is another; by its name.
        derived: Settings that follow from others unless they are given: where those differ, these
            are not told.

    Raises:
        ProgramError: On every rank, if nothing can be saved there.
    """

    def __init__(
        self,
        folder: Path | None,
        mesh: mm.DeviceMesh,
        settings: Mapping[str, Any],
        *,
        advice: Mapping[str, str] | None = None,
        derived: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._mesh = mesh
        self._settings = dict(settings)
        self._advice, self._derived = dict(advice or {}), dict(derived or {})
        if folder is not None:
            on_all_ranks(mesh, _library, "keep checkpoints")
            on_all_ranks(mesh, self._try_to_write, f"keep checkpoints in {folder}")

    def save(
        self,
        step: int,
        pipe: mm.PipelineParallel,
        optimizer: mm.optim.Optimizer | mm.ParallelOptimizer,
        notes: Mapping[str, Any],
    ) -> None:
        """Collective: save the state after a step.

        Args:
            step: How many there were.
            pipe: The model.
            optimizer: What trains it; the state is put together where replicas divide it.
            notes: What else the training is to know when it goes on; JSON. ``losses`` among them
                are those of all steps.

        Raises:
            ProgramError: On every rank, if one could not write its part; the save before is
                untouched.
        """
        if self._folder is None:
            return
        mesh, folder = self._mesh, self._folder / f"step-{step:08}"
        states = optimizer.state_dict()["params"]  # collective, so not where a rank may fail
        writers = [rank for rank in range(mesh.size) if mesh.coord_of(rank, "dp") == 0]
        files = {rank: f"rank-{rank}.safetensors" for rank in writers}

        def write_part() -> None:
            if mesh.rank in files:
                _write_part(folder / files[mesh.rank], pipe.named_parameters(), states)

        def write_manifest() -> None:
            if mesh.rank == 0:
                scaler = getattr(optimizer, "scaler", None)
                manifest = {
                    "folder": folder.name,
                    "files": [*files.values()],
                    "settings": self._settings,
                    "model_step": pipe.step,
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "notes": dict(notes),
                }
                text = json.dumps(manifest)
                write_whole(folder.parent / MANIFEST, lambda path: path.write_text(text))

        with pipe.gathered():
            on_all_ranks(mesh, write_part, f"write {folder}")
        on_all_ranks(mesh, write_manifest, f"write {folder.parent / MANIFEST}")
        if mesh.rank == 0:
            for old in folder.parent.glob("step-*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)

    def load(
        self, pipe: mm.PipelineParallel, optimizer: mm.optim.Optimizer | mm.ParallelOptimizer
    ) -> dict[str, Any] | None:
        """Collective: take over what is saved, if anything is.

        Returns:
            The notes that were saved; None for a new run.

        Raises:
            ProgramError: On every rank, if what is there cannot be read, or is of another run.
        """
        if self._folder is None:
            return None
        manifest = self._read_manifest(self._folder / MANIFEST)
        if manifest is None:
            return None
        self._check(manifest.settings)
        folder = self._folder / manifest.folder
        state = optimizer.state_dict()  # collective: only its numbers are kept

        def read() -> tuple[list[np.ndarray], list[dict[str, Any]]]:
            with Parts([folder / name for name in manifest.files]) as parts:
                named = pipe.named_parameters()
                values = [parts.read(name, parameter) for name, parameter in named]
                return values, [parts.read_state(name, parameter) for name, parameter in named]

        # All is read on every rank before anything is changed on any.
        values, states = on_all_ranks(self._mesh, read, f"read {folder}")

        def take() -> None:
            # Of a ParallelOptimizer collective: every rank comes here, and it fails on all or none.
            optimizer.load_state_dict({**state, "params": states})
            for (_, parameter), value in zip(pipe.named_parameters(), values, strict=True):
                parameter.value()[...] = value
            scaler = getattr(optimizer, "scaler", None)
            if scaler is not None:
                scaler.load_state_dict(manifest.scaler)

        with pipe.gathered(write=True):
            on_all_ranks(self._mesh, take, f"load {folder}")
        pipe.step = manifest.model_step
        return manifest.notes

    def _try_to_write(self) -> None:
        """Make the folder; to be told before the training that there can be none."""
        folder = self._folder
        if folder is None or self._mesh.rank:
            return
        if folder.exists() and not folder.is_dir():
            raise ProgramError("it is a file; name a folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _read_manifest(self, path: Path) -> Manifest | None:
        """Collective: rank 0 reads, so that all ranks go on from the same save."""
        mesh = self._mesh

        def read() -> bytes:
            # An empty file is one that is damaged, and not as good as none.
            return (path.read_bytes() or b" ") if mesh.rank == 0 and path.exists() else b""

        text = np.frombuffer(on_all_ranks(mesh, read, f"read {path}"), np.uint8)
        text = mesh.group().broadcast(text if mesh.rank == 0 else None, root=None).resolve()
        if not text.size:
            return None
        return Manifest.read(path, text.tobytes())

    def _check(self, saved: Mapping[str, Any]) -> None:
        here = self._settings
        names = {name for name in {*saved, *here} if saved.get(name) != here.get(name)}
        if not names:
            return
        names -= {name for name, other in self._derived.items() if other in names}
        differences = [
            f"{name} {saved.get(name)} there, {here.get(name)} here" for name in sorted(names)
        ]
        advice = [
            text.format(saved.get(name)) for name, text in self._advice.items() if name in names
        ]
        advice.append("else give the options of that run, or another folder")
        raise ProgramError(
            f"{self._folder} has the checkpoint of another run: {'; '.join(differences)}: "
            f"{'; '.join(advice)}".replace(": else give", ": give")
        )


# -- the files ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in that of the whole model.

    Attributes:
        shape: Of the whole one.
        box: (start, stop) along each axis of what is here.
    """

    shape: tuple[int, ...]
    box: Box

    @staticmethod
    def of(parameter: Parameter) -> Place:
        """Return that of this rank's values of a parameter."""
        return Place(parameter.global_shape, parameter.box)

    @staticmethod
    def from_json(shape: list[int], *where: Any) -> Place:
        """Return what a file says; older ones have an axis and its runs in place of a box."""
        if len(where) == 1:
            return Place(tuple(shape), tuple((start, stop) for start, stop in where[0]))
        axis, ((start, stop),) = where
        box = [(0, length) for length in shape]
        box[axis] = (start, stop)
        return Place(tuple(shape), tuple(box))


def _write_part(
    path: Path, named: Sequence[tuple[str, Parameter]], states: Sequence[State]
) -> None:
    arrays: dict[str, np.ndarray] = {}
    places: dict[str, Any] = {}
    for (name, parameter), state in zip(named, states, strict=True):
        place = Place.of(parameter)
        places[name] = [place.shape, place.box]
        arrays[name] = parameter.value()
        arrays |= {f"{name}:{key}": np.asarray(value) for key, value in state.items()}
    metadata = {"places": json.dumps(places)}
    write_whole(path, lambda fresh: _library().numpy.save_file(arrays, fresh, metadata))


class Parts:
    """The files of a save, of which a rank reads what it needs; a context manager.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._stack = ExitStack()

    def __enter__(self) -> Parts:
        with self._stack:
            self._files = [
                self._stack.enter_context(_library().safe_open(path, framework="np"))
                for path in self._paths
            ]
            self._names = [set(file.keys()) for file in self._files]
            self._places = [
                {name: Place.from_json(*place) for name, place in json.loads(text).items()}
                for text in (file.metadata()["places"] for file in self._files)
            ]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, parameter: Parameter, key: str = "") -> np.ndarray:
        """Return this rank's part of an array, whoever has written what of it.

        Args:
            name: The parameter's, in the whole model.
            parameter: Says which part.
            key: Of the optimizer's state; empty for the parameter's values.

        Raises:
            ProgramError: If a piece is in no file.
        """
        title = f"{name}:{key}" if key else name
        here = Place.of(parameter)
        values, missing = np.empty(0), np.ones(parameter.shape, bool)
        for file, place in self._holders(title, name):
            both = common(here.box, place.box)
            if place.shape != here.shape or both is None:
                continue
            array = file.get_tensor(title)
            if values.shape != parameter.shape:
                values = np.empty(parameter.shape, array.dtype)
            view(values, local_box(both, here.box))[...] = view(array, local_box(both, place.box))
            view(missing, local_box(both, here.box))[...] = False
        if missing.any():
            raise ProgramError(f"{title} of shape {list(here.shape)} is not there as a whole")
        return values.reshape(parameter.shape)

    def read_state(self, name: str, parameter: Parameter) -> State:
        """Return what the optimizer keeps for this rank's part of a parameter."""
        steps = [int(file.get_tensor(f"{name}:steps")) for file, _ in self._holders(name, name)]
        begin = f"{name}:"
        titles = set().union(*self._names)
        keys = {title[len(begin) :] for title in titles if title.startswith(begin)}
        state = {key: self.read(name, parameter, key) for key in sorted(keys - {"steps"})}
        return {"steps": steps[0], **state}

    def _holders(self, title: str, name: str) -> Iterator[tuple[Any, Place]]:
        """Yield the files that hold an array of a parameter, and what of it."""
        for file, names, places in zip(self._files, self._names, self._places, strict=True):
            if title in names:
                yield file, places[name]


def _library() -> Any:
    """Return safetensors, which only those need who keep checkpoints."""
    try:
        import safetensors.numpy
    except ImportError:
        raise ProgramError("it takes safetensors: pip install safetensors") from None
    return safetensors


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file that is seen under its name only when all of it is on the disk.

    Args:
        path: Its name.
        write: Writes it under the name that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    # A link that somebody put there would lead to a file of another name.
    fresh.unlink(missing_ok=True)
    fresh.open("xb").close()
    write(fresh)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a crash of the machine could undo the renaming
    finally:
        os.close(folder)
