"""What a save that is killed leaves behind."""

from __future__ import annotations

from pathlib import Path

from mpimesh.store.drafts import Draft
from mpimesh.store.files import new_token


def left_by_a_kill(path: Path, name: str = "00000-000.safetensors") -> Path:
    """Begin to save to a path, as a job that is killed then; return the hidden folder."""
    draft = Draft(path, new_token(), [name])
    data = next(each for each in draft.fresh.iterdir() if each.is_dir())
    (data / name).write_text("half")
    assert draft._note is not None
    draft._note.close()  # as the system does
    return draft.fresh
