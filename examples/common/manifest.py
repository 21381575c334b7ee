"""The file ``checkpoint.json``, checked before anything of a run is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.program import ProgramError

_KINDS = {
    "folder": (str, "a name"),
    "files": (list, "a list"),
    "settings": (dict, "an object"),
    "model_step": (int, "a whole number"),
    "notes": (dict, "an object"),
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parts of one save.

    Attributes:
        folder: Where the files are, named by the step.
        files: Their names.
        settings: Of the run.
        model_step: How many batches, or parts of them, the model has been trained on.
        scaler: The state of the loss scaler; None without one.
        notes: What else the training noted; ``losses`` has one number for each step.
    """

    folder: str
    files: Sequence[str]
    settings: Mapping[str, Any]
    model_step: int
    scaler: Any
    notes: dict[str, Any]

    @classmethod
    def read(cls, path: Path, text: bytes) -> Manifest:
        """Return what the text of a file says. Local: all ranks have the same text.

        Raises:
            ProgramError: If it is damaged: what it says does not fit together.
        """
        try:
            problem = _problem(found := json.loads(text))
        except ValueError as error:
            problem = f"no JSON, {error}"
        if problem:
            raise damaged(path, problem)
        return cls(**{name: found.get(name) for name in cls.__dataclass_fields__})


def damaged(path: Path, problem: str) -> ProgramError:
    """Return what says that a file is damaged, and what to do."""
    return ProgramError(
        f"cannot go on from {path}: {problem}; it is damaged: put back a copy of {path.parent}, or "
        "start anew in another folder"
    )


def _problem(found: Any) -> str:
    """Return what is wrong; "" if nothing is."""
    if not isinstance(found, dict):
        return f"it holds no JSON object but {json.dumps(found)[:40]}"
    for name, (kind, words) in _KINDS.items():
        if not isinstance(found.get(name), kind) or isinstance(found[name], bool):
            return f"{name} must be {words}, got {json.dumps(found.get(name))[:40]}"
    if not found["files"] or not all(isinstance(name, str) for name in found["files"]):
        return "files must name at least one file"
    losses, step = found["notes"].get("losses"), found["folder"].removeprefix("step-")
    if not isinstance(losses, list) or not all(isinstance(one, int | float) for one in losses):
        return "notes.losses must be a list of numbers"
    if not step.isdecimal() or int(step) != len(losses):
        return f"notes.losses has {len(losses)} steps, but folder is {found['folder']}"
    if found["model_step"] < len(losses):
        return f"model_step {found['model_step']} is below the {len(losses)} steps that were done"
    return ""
