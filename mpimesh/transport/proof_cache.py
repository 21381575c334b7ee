"""Where answers are kept from one job to the next, and what they hold for.

One small file for each combination of MPI, UCX, driver, GPU and MPI settings, in the user's
cache folder. It is replaced as a whole, so a reader sees an old one or a new one;
one that cannot be read is as good as none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpimesh.transport.answer import Answer
from mpimesh.transport.job_variables import tuning
from mpimesh.transport.ucx import loaded_ucx

__all__ = ["cache_folder", "digest", "has_cupy", "key_facts", "read_answers", "write_answers"]

_SECONDS_OF_A_DAY = 86400.0


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return mpimesh's folder among the user's caches, which may not be there yet.

    None for a user who has no home, as in some containers.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("XDG_CACHE_HOME", "")
    # As the specification says, a relative path counts as none.
    if given.startswith("/"):
        return Path(given) / "mpimesh"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "mpimesh"
    return None


def has_cupy() -> bool:
    """Tell whether CuPy is installed, without importing it."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def key_facts() -> dict[str, str]:
    """Return what an answer depends on. Starts MPI, and imports CuPy if it is installed."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "mpimesh": _own_version(),
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi_library": digest(MPI.Get_library_version()),
        # With and without its CUDA transports, the same version gives other answers.
        "ucx": str(loaded_ucx()),
        **_cuda_facts(),
        "tuning": digest(*tuning(os.environ)),
    }


def _cuda_facts() -> dict[str, str]:
    facts = {"cuda_runtime": "", "cuda_driver": "", "gpu": "", "cupy": ""}
    if not has_cupy():
        return facts
    # Whatever is wrong with CUDA here, it is not for the key to say.
    with suppress(Exception):
        import cupy

        facts["cupy"] = str(cupy.__version__)
        facts["cuda_runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
        facts["cuda_driver"] = str(cupy.cuda.runtime.driverGetVersion())
        count = cupy.cuda.runtime.getDeviceCount()
        names = {cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)}
        # One GPU and several are different proofs: between two, data goes another way.
        facts["gpu"] = f"{min(count, 2)} of {', '.join(sorted(names))}"
    return facts


def _own_version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("mpimesh")
    return ""


def digest(*texts: str) -> str:
    """Return 16 hexadecimal digits that stand for `texts`."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def read_answers(
    key: Mapping[str, str], memory: str, folder: Path | None
) -> tuple[dict[str, Answer], str]:
    """Return the answers that are kept for `key`, by operation, and a note if there is a problem.

    Answers that need not last are good for a day.
    """
    if folder is None:
        return {}, ""
    path = _path(key, memory, folder)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        young = 0 <= time.time() - content["at_s"] < _SECONDS_OF_A_DAY
        answers = {
            operation: Answer(bool(fields["usable"]), str(fields["reason"]), fields["lasting"])
            for operation, fields in content["answers"].items()
            if fields["lasting"] or young
        }
        if content["key"] != dict(key):
            return {}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{path} cannot be read and is ignored: {type(error).__name__}: {error}"
    return answers, ""


def write_answers(
    key: Mapping[str, str], memory: str, answers: Mapping[str, Answer], folder: Path | None
) -> str:
    """Keep `answers` for `key`; return a note if that cannot be done."""
    if folder is None:
        return "answers cannot be kept: this user has no home, and XDG_CACHE_HOME is not set"
    path = _path(key, memory, folder)
    content = {
        "key": dict(key),
        "memory": memory,
        "at_s": time.time(),
        "answers": {
            operation: {
                "usable": answer.usable,
                "reason": answer.reason,
                "lasting": answer.lasting,
            }
            for operation, answer in answers.items()
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(prefix=".new-", dir=folder)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        Path(new).replace(path)
    except OSError as error:
        return f"answers cannot be kept in {folder}: {error}"
    return ""


def _path(key: Mapping[str, str], memory: str, folder: Path) -> Path:
    named = digest(memory, *(f"{name}={text}" for name, text in sorted(key.items())))
    return folder / f"cuda_aware-{named}.json"
