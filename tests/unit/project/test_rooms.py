"""The library's rooms and house rules, read off its source.

A room may import from the rooms before it in `ROOMS`, and from nowhere else in
the library, be it at the top of a module, inside a function or for type checking.
No files of a room import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

ROOMS = [
    {"caches", "errors", "settings"},
    {"arguments"},
    {"core"},
    {"trace"},
    {"mesh"},
    {"layout"},
    {"schedule"},
    {"arrays"},
    {"nn", "optim"},
    {"comm"},
    {"runtime"},
    {"dtensor"},
    {"store"},
    {"parallel"},
    {"data"},
    {"compat"},
    {"interop"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

# Beside the standard library, at the top of a module. Elsewhere in it, see LAZY.
LIBRARIES = {
    "core": {"cpython", "cython", "libc", "numpy", "posix"},  # what Cython has of C, too
    "caches": set(),
    "errors": set(),
    "arguments": {"xxhash"},
    "settings": set(),
    "trace": {"lazy_loader"},
    "layout": {"lazy_loader", "ml_dtypes", "numpy"},
    "runtime": {
        "lazy_loader",
        "ml_dtypes",
        "mpi4py",
        "numpy",
        "typing_extensions",
    },  # the last: types
    "store": {"numpy", "ml_dtypes", "mpi4py", "xxhash"},
    "interop": {"numpy", "torch", "jax"},
    "testing": {"numpy", "mpi4py", "pytest"},
    "cli": {"numpy", "mpi4py", "rich", "typer"},
}
BEFORE_COMM = {"numpy", "ml_dtypes"}
FROM_COMM_ON = {"numpy", "ml_dtypes", "mpi4py"}
# Inside a function of any room but those of the standard library.
LAZY = {"cupy", "cupyx", "ml_dtypes", "nvidia", "pynvml", "rich"}
# And inside a function of these rooms, where a library of the field reads a format better.
LAZY_OF_ROOM = {"store": {"h5py", "zarr"}, "cli": {"resvg_py"}}

PICKLERS = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}


def test_the_library_keeps_its_rules():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {breach}"
        for path, text in sources()
        for line, breach in breaches(text, path.relative_to(ROOT / "mpimesh"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_files_of_a_room_import_each_other_in_a_circle():
    texts = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): text
        for path, text in sources()
    }
    circles = {room: circle_of(texts, f"mpimesh.{room}") for room in LEVEL}
    assert not any(circles.values()), circles


@pytest.mark.parametrize(
    "line",
    [
        "from mpimesh.nn.b import f",
        "from mpimesh.nn import b",
        "from mpimesh.nn import f",
        "import mpimesh.nn.b",
        "def g():\n    from mpimesh.nn.b import f",
        "if TYPE_CHECKING:\n    from mpimesh.nn.b import f",
    ],
)
def test_a_circle_is_found(line):
    sources = {
        "mpimesh.nn.__init__": "from mpimesh.nn.b import f",
        "mpimesh.nn.a": line,
        "mpimesh.nn.b": "from mpimesh.nn.c import h",
        "mpimesh.nn.c": "from mpimesh.nn.a import g",
        "mpimesh.optim.a": "from mpimesh.nn.b import f",
    }
    circle = ["mpimesh.nn.a", "mpimesh.nn.b", "mpimesh.nn.c"]
    assert sorted(set(circle_of(sources, "mpimesh.nn"))) == circle
    assert circle_of({**sources, "mpimesh.nn.a": ""}, "mpimesh.nn") == []


# -- the rules' own test: each of these lines is a breach -------------------------------


@pytest.mark.parametrize(
    ("module", "text", "breach"),
    [
        ("mesh/mesh.py", "from mpimesh.runtime.group import ProcessGroup", "later room runtime"),
        ("mesh/mesh.py", "from mpimesh import runtime", "later room runtime"),
        ("mesh/mesh.py", "import mpimesh.parallel.pipeline", "later room parallel"),
        ("mesh/mesh.py", "def f():\n    import mpimesh.runtime", "later room runtime"),
        ("nn/linear.py", "from mpimesh.optim import SGD", "beside it"),
        ("runtime/world.py", "import mpimesh as mm", "whole library"),
        ("runtime/world.py", "from mpimesh import DeviceMesh", "whole library"),
        ("mesh/mesh.py", "from .strides import strides", "relative"),
        ("trace/event.py", "import numpy as np", "numpy"),
        ("settings.py", "def f():\n    import numpy", "numpy"),
        ("mesh/devices.py", "import cupy", "cupy"),
        ("comm/mpi.py", "import cupy", "cupy"),
        ("arrays/pool.py", "def f():\n    from mpi4py import MPI", "mpi4py"),
        ("arrays/pool.py", "import importlib\nimportlib.import_module('mpi4py.MPI')", "mpi4py"),
        ("runtime/world.py", "import requests", "requests"),
        ("runtime/world.py", "import pickle", "pickle"),
        ("runtime/world.py", "def f():\n    from marshal import loads", "marshal"),
        ("runtime/world.py", "def f(x):\n    assert x > 0", "assert"),
        ("runtime/world.py", "import os\nos.environ['MPIMESH_CHECKS']", "settings.py"),
        ("runtime/world.py", "import os\nos.environ.get('MPIMESH_CHECKS')", "settings.py"),
        ("runtime/world.py", "import os\nos.getenv('MPIMESH_CHECKS', '')", "settings.py"),
        ("nn/__init__.py", "def linear(): ...", "re-exports"),
        ("kitchen/sink.py", "", "no room"),
    ],
)
def test_a_breach_is_found(module, text, breach):
    found = list(breaches(text, Path(module)))
    assert len(found) == 1, found
    assert breach in found[0][1]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mesh/mesh.py", "import math\nimport numpy as np\nfrom mpimesh.errors import MeshError"),
        ("mesh/devices.py", "def f():\n    import cupy"),
        ("optim/adam.py", "from mpimesh.nn import Parameter"),
        ("comm/mpi.py", "from mpi4py import MPI\nfrom mpimesh.comm.base import Request"),
        ("parallel/pipe.py", "import mpimesh.runtime\nfrom mpimesh.schedule import Schedule"),
        ("cli/main.py", "import mpimesh as mm"),
        ("nn/__init__.py", '"""Layers."""\nfrom mpimesh.nn.linear import Linear\n__all__ = ["L"]'),
        ("__init__.py", "def __getattr__(name): ..."),
    ],
)
def test_what_is_allowed_is_no_breach(module, text):
    assert not list(breaches(text, Path(module)))


@pytest.mark.parametrize(
    ("line", "breach"),
    [
        ("from mpimesh.comm.mpi cimport Window", "later room comm"),
        ("cdef int f():\n    import mpimesh.runtime.world", "later room runtime"),
        ("from mpimesh.comm cimport (\n    a,\n    b,\n)", "later room comm"),
        ("cimport mpi4py.MPI as MPI", "mpi4py"),
        ("from mpimesh.errors import MpimeshError", None),
        ("from libc.stdint cimport uint64_t, int64_t\ncimport numpy as cnp", None),
        ('cdef extern from "node.h":\n    ctypedef struct Node:\n        pass', None),
    ],
)
def test_what_is_compiled_keeps_them_too(line, breach):
    found = [text for _, text in breaches(imports_alone(line), Path("core/node.pyx"))]
    assert len(found) == (breach is not None), found
    assert not breach or breach in found[0]


# -- the rules --------------------------------------------------------------------------


def sources() -> list[tuple[Path, str]]:
    """Return the files of the library, with their text; of what is compiled its imports alone."""
    files = [path for path in (ROOT / "mpimesh").rglob("*") if path.suffix in {".py", ".pyx"}]
    assert len(files) > 20, "the library was not found"
    return [
        (path, path.read_text() if path.suffix == ".py" else imports_alone(path.read_text()))
        for path in sorted(files)
    ]


_IMPORT = re.compile(r"^([ \t]*)((?:from [\w. ]+)?\bc?import\b(?: *\([^)]*\)|.*))$", re.M)


def imports_alone(text: str) -> str:
    """Return the imports of a Cython source, in Python's words."""
    lines = [(indent, line.replace("cimport", "import")) for indent, line in _IMPORT.findall(text)]
    return "\n".join(f"if True:\n {line}" if indent else line for indent, line in lines)


def breaches(text: str, module: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for the source `text` of `module`, a path inside mpimesh/."""
    tree = ast.parse(text)
    room = module.parts[0].partition(".")[0]
    yield from _statement_breaches(tree, module)
    if module.parts == ("__init__.py",):
        return
    if room not in LEVEL:
        yield 1, f"{room} is no room; the list is in tests/unit/project/test_rooms.py"
        return
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for name in _imported(node):
            problem = _import_breach(room, name, at_top=id(node) in top)
            if problem:
                yield node.lineno, problem  # type: ignore[attr-defined]


def _import_breach(room: str, name: str, *, at_top: bool) -> str | None:
    package, *parts = name.split(".")
    if package == "":
        return f"relative import of {name}"
    if package in PICKLERS:
        return f"{package} is not used: array traffic is bytes, control data is JSON"
    if package == "mpimesh":
        return _room_breach(room, parts)
    if package in sys.stdlib_module_names:
        return None
    default = BEFORE_COMM if LEVEL[room] < LEVEL["comm"] else FROM_COMM_ON
    allowed = LIBRARIES.get(room, default)
    if allowed and not at_top:
        allowed = allowed | LAZY | LAZY_OF_ROOM.get(room, set())
    return None if package in allowed else f"{room} may not import {package} here"


def _room_breach(room: str, parts: list[str]) -> str | None:
    if not parts or parts[0] not in LEVEL:
        return None if room in {"testing", "cli"} else "imports the whole library"
    other = parts[0]
    if LEVEL[other] > LEVEL[room]:
        return f"{room} imports from the later room {other}"
    # optim updates what nn defines, settings raises what errors defines; never the other way.
    if (
        other != room
        and LEVEL[other] == LEVEL[room]
        and (room, other)
        not in {
            ("optim", "nn"),
            ("settings", "errors"),
        }
    ):
        return f"{room} imports from {other}, which stands beside it"
    return None


def circle_of(sources: Mapping[str, str], room: str) -> list[str]:
    """Return files of `room` that import each other in a circle; none if there are no such.

    A room's `__init__.py` stands for the files that it has its names from.

    Args:
        sources: The text of each file of the library by its name, such as ``"mpimesh.nn.linear"``.
        room: Such as ``"mpimesh.nn"``.
    """
    names = {
        f"{name.removesuffix('.__init__')}.{alias.asname or alias.name}": target
        for name, text in sources.items()
        if name.endswith(".__init__")
        for node in imports_of(text)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (target := _file_of(f"{node.module}.{alias.name}", sources))
    }
    graph: dict[str, set[str]] = {}
    for name, text in sources.items():
        if name.startswith(f"{room}.") and not name.endswith(".__init__"):
            wanted = graph[name] = set()
            for node in imports_of(text):
                for full in _full_names(node):
                    wanted.add(_file_of(full, sources) or names.get(full, ""))
    files = {name: wanted & graph.keys() - {name} for name, wanted in graph.items()}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@functools.cache
def imports_of(text: str) -> list[ast.AST]:
    """Return what may import something in a source."""
    may_import = ast.Import | ast.ImportFrom | ast.Call
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, may_import)]


def _full_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    else:
        yield from _imported(node)


def _file_of(name: str, sources: Mapping[str, str]) -> str:
    """Return the file that a full name is, or is in; nothing if that is a room."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in sources), "")


def _imported(node: ast.AST) -> Iterator[str]:
    """The modules that `node` imports, with full names; a relative one begins with a dot."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = "." * node.level + (node.module or "")
        if source == "mpimesh":
            yield from (f"mpimesh.{alias.name}" for alias in node.names)
        else:
            yield source
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
        "__import__",
        "import_module",
        "importlib.import_module",
    }:
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _statement_breaches(tree: ast.Module, module: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: on wrong input raise, and what cannot be needs no check"
        if module.name != "settings.py" and _reads_setting(node):
            yield node.lineno, "reads MPIMESH_*, which settings.py does"  # type: ignore[attr-defined]
    if module.name == "__init__.py" and len(module.parts) > 1:
        for statement in tree.body:
            if not isinstance(statement, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign):
                yield statement.lineno, "a room's __init__.py only re-exports"


def _reads_setting(node: ast.AST) -> bool:
    """True for os.environ["MPIMESH_X"], os.environ.get("MPIMESH_X") and os.getenv("MPIMESH_X")."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        container, key = node.value, node.slice
    elif isinstance(node, ast.Call) and node.args:
        container, key = node.func, node.args[0]
    else:
        return False
    return (
        isinstance(key, ast.Constant)
        and str(key.value).startswith("MPIMESH_")
        and ("environ" in ast.unparse(container) or "getenv" in ast.unparse(container))
    )
