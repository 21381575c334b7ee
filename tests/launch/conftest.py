"""Jobs that their launcher spoils are started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from mpimesh.testing.launch import LaunchResult

_LAST_WORDS = "prterun has exited due to process"


def launcher_crashed(result: LaunchResult) -> bool:
    """Tell whether Open MPI's launcher has crashed after the job was over and it had said so.

    So it did once in some hundred aborted jobs. What its ranks did cannot be seen from its exit
    code then; a rank that crashes gives another one.
    """
    return result.returncode == -signal.SIGSEGV and _LAST_WORDS in result.stderr


@pytest.fixture
def launch(launch: Callable[..., LaunchResult]) -> Callable[..., LaunchResult]:
    """Start a job, and once more if its launcher has crashed at its end."""

    def start(nprocs: int, program: Any, **options: Any) -> LaunchResult:
        result = launch(nprocs, program, **options)
        return launch(nprocs, program, **options) if launcher_crashed(result) else result

    return start
