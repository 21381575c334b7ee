"""The JSON files beside a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpimesh.errors import ModelError

__all__ = ["read_json", "read_object"]


def read_json(path: Path, *, needed: bool = True, default: Any = None) -> Any:
    """Return what a file holds; `default` if it is not there and not needed. Local.

    Raises:
        ModelError: If it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return default
        raise ModelError(f"cannot read the model: {error}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def read_object(path: Path, *, needed: bool = True) -> Mapping[str, Any]:
    """Return the object that a file holds; an empty one if it is not there and not needed. Local.

    Raises:
        ModelError: If it cannot be read, or holds something else.
    """
    found = read_json(path, needed=needed, default={})
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found
