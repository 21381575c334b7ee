"""The checkpoints of an example: those of mpimesh, of runs with the same settings.

What is saved is a tree: the model, the optimizer, what the training notes, and the settings, by
which a folder with another run is told. Random numbers need no saving: batches and dropout are
functions of the seed and of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpimesh as mm
from common.program import ProgramError


class RunCheckpoints:
    """The checkpoints of a run in a folder that all ranks can see. Making it is collective.

    Args:
        folder: Made if it is not there. None neither saves nor loads.
        mesh: The ranks that save and load together.
        settings: What a run must have in common with the one that it goes on from; JSON.
        every: Steps from one save to the next.
        advice: What to do where one of the settings is another; by its name.
        derived: Settings that follow from others unless they are given: where those differ, these
            are not told.

    Raises:
        StoreError: On every rank, if nothing can be saved there.
    """

    def __init__(
        self,
        folder: Path | None,
        mesh: mm.DeviceMesh,
        settings: Mapping[str, Any],
        *,
        every: int,
        advice: Mapping[str, str] | None = None,
        derived: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._settings = dict(settings)
        self._advice, self._derived = dict(advice or {}), dict(derived or {})
        self._checkpoints: mm.Checkpoints | None = None
        if folder is not None:
            # Written in a thread, while the training goes on.
            self._checkpoints = mm.Checkpoints(folder, mesh, every=every, wait=False)

    def load(self, state: dict[str, Any]) -> int:
        """Collective: take over the last checkpoint, if there is one.

        Args:
            state: The model, the optimizer and notes, by name; its notes are replaced.

        Returns:
            How many steps were done.

        Raises:
            ProgramError: On every rank, if what is there is of another run.
            MpimeshError: On every rank, if it cannot be read, or is not of such a training.
        """
        checkpoints = self._checkpoints
        saved = None if checkpoints is None else checkpoints.load(only="settings.*")
        if checkpoints is None or saved is None:
            return 0
        self._check(saved["settings"])
        state.update(checkpoints.load(state, step=checkpoints.step, verify="read"))
        return checkpoints.step

    def save(self, step: int, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Collective: save the state after a step, if one is due, or by force."""
        if self._checkpoints is not None:
            tree = {**state, "settings": self._settings}
            self._checkpoints.save(step, tree, force=force)

    def close(self) -> None:
        """Collective: wait until the last one is on the disk."""
        if self._checkpoints is not None:
            self._checkpoints.close()

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
