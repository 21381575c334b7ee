"""Every name of CuPy that is used is there, and the stand-ins take what CuPy takes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.fake_cuda import FakeCupy
from tests.helpers import fake_cupy

_ROOT = Path(__file__).parents[2]
_FILES = [*_ROOT.glob("mpimesh/**/*.py"), *_ROOT.glob("tests/gpu/*.py")]
_FILES += [_ROOT / "benchmarks" / "device.py", _ROOT / "tests" / "devices" / "operations.py"]
_FACTS = ("report.py", "findings.py", "examine.py")
_OF_THE_STAND_IN = {
    *("cuda.clock", "cuda.Stream.delay", "cuda.Stream.put", "cuda.Stream.step"),
    *("cuda.Event.record_now", "cuda.Event.interprocess", "cuda.runtime.opened"),
    *("cuda.runtime.closed", "cuda.runtime.raw", "cuda.runtime.peers", "cuda.nccl"),
    *("cuda.runtime.open", "cuda.runtime.room", "cuda.runtime.refuse_if_open"),
    *("ndarray.on_host", "ndarray.block", "ndarray.library"),
}


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else []


def _used() -> dict[str, str]:
    """Return the names of CuPy that are used, and where."""
    roots = {"xp": "", "cupy": "", "cuda": "cuda.", "_cuda": "cuda."}
    roots |= {"runtime": "cuda.runtime.", "_runtime": "cuda.runtime."}
    found: dict[str, str] = {}
    for path in _FILES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute):
                continue
            chain = _chain(node)
            places = [at for at, name in enumerate(chain[:-1]) if name in roots]
            # `mpimesh.runtime`, facts of doctor that are called `cuda`, and what has such a name
            # where CuPy is not named.
            if not places or "mpimesh" in chain or path.name in _FACTS:
                continue
            if "cupy" not in text and chain[0] != "xp":
                continue
            name = roots[chain[places[0]]] + ".".join(chain[places[0] + 1 :])
            found.setdefault(name, f"{path.relative_to(_ROOT)}:{node.lineno}")
    return found


def _at(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def test_every_name_that_is_used_is_there():
    import cupy

    used = _used()
    assert {"cuda.runtime.eventQuery", "add.at", "cuda.Event", "fuse", "matmul"} & used.keys()
    missing = []
    for name, where in used.items():
        if name.startswith("cuda.nccl"):
            continue  # there only once it is imported, and where there is an NCCL
        try:
            _at(cupy, name)
        except AttributeError:
            missing.append(f"{name} in {where}")
    assert not missing
    assert len(used) > 60


def _counts(function: Any) -> tuple[int, int] | None:
    """Return the least and most arguments that a function takes; None if it does not say."""
    text = (getattr(function, "__doc__", None) or "").partition("\n")[0]
    found = re.match(r"[\w.]+\((.*)\)( ->.*)?$", text)
    if found is None:
        return None
    given = [one for one in re.split(r", (?![^(]*\))", found[1]) if one and one != "self"]
    return sum("=" not in one for one in given), len(given)


def test_the_stand_in_has_what_cupy_has_and_takes_what_it_takes():
    import cupy

    fake = FakeCupy()
    real_stream, real_event = cupy.cuda.Stream(), cupy.cuda.Event()
    parts: list[tuple[str, Any, Any]] = [
        ("cuda", fake.cuda, cupy.cuda),
        ("cuda.runtime", fake.cuda.runtime, cupy.cuda.runtime),
        ("cuda.Stream", fake.cuda.Stream(), real_stream),
        ("cuda.Event", fake.cuda.Event(), real_event),
        ("cuda.Device", fake.cuda.Device(0), cupy.cuda.Device(0)),
        ("ndarray", fake.zeros(3), cupy.zeros(3)),
    ]
    compared = 0
    for place, stand_in, real in parts:
        for name in dir(stand_in):
            whole = f"{place}.{name}"
            if name.startswith("_") or whole in _OF_THE_STAND_IN:
                continue
            assert hasattr(real, name), whole
            own, counts = getattr(stand_in, name), _counts(getattr(real, name))
            if inspect.ismethod(own) and counts is not None:
                given = inspect.signature(own).parameters.values()
                needed = sum(one.default is inspect.Parameter.empty for one in given)
                assert needed >= counts[0], whole
                assert len(given) <= counts[1], whole
                compared += 1
    assert compared > 25


@pytest.mark.parametrize("name", sorted(fake_cupy.FUNCTIONS))
def test_the_functions_of_the_stand_in_are_functions_of_cupy(name):
    assert callable(getattr(sys.modules["cupy"], name))


def test_what_cupy_refuses():
    """The stand-ins refuse the same, and the library keeps to it."""
    import cupy
    import numpy as np

    x = cupy.zeros(3, np.float32)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError, match="Unsupported type"):
        x + np.ones(3, np.float32)
    with pytest.raises(TypeError):
        cupy.cuda.runtime.ipcOpenMemHandle(np.zeros(64, np.uint8))
    with pytest.raises(ValueError, match="Timing must be disabled"):
        cupy.cuda.Event(interprocess=True)
    with pytest.raises(TypeError):
        cupy.fuse(lambda a: a, kernel_name="name")(x)


def test_a_stream_in_use_is_forgotten_by_a_with():
    """The reason for `made_current`."""
    import cupy

    from mpimesh.arrays.namespace import made_current

    chosen, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    before = cupy.cuda.get_current_stream()
    chosen.use()
    with other:
        pass
    assert cupy.cuda.get_current_stream() == before
    chosen.use()
    with made_current(cupy.cuda.Device(), other):
        assert cupy.cuda.get_current_stream() == other
    assert cupy.cuda.get_current_stream() == chosen
    before.use()
