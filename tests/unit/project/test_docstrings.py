"""Every public thing says what it is, its arguments and its errors; its examples come out so."""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import dtensor, layout, nn, optim, schedule

SELF_EVIDENT = {"self", "cls", "args", "kwargs", "ctx"}
"""`ctx` is what nn.Module says once for all layers."""

MADE_BY_OTHERS = {"mm.CollectiveTensor", "mm.DTensor", "mm.ProcessGroup"}
"""Classes that users get, and do not call."""

REFERENCE = re.compile(r":(?:meth|func|class):`~?(?:mpimesh\.)?([\w.]+)`")


@functools.cache
def public() -> dict[str, Any]:
    """Return all classes, functions, methods and properties that a user of `mm` comes to."""
    found: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("mm", mm)]
    seen: set[int] = set()
    for path, thing in todo:
        if id(thing) in seen or not _name_of_module(thing).startswith("mpimesh"):
            continue
        seen.add(id(thing))
        if isinstance(thing, ModuleType):
            names = getattr(thing, "__all__", None) or [n for n in dir(thing) if n[0] != "_"]
            todo += [(f"{path}.{name}", getattr(thing, name)) for name in names]
        elif inspect.isclass(thing) or inspect.isfunction(thing):
            found[path] = thing
            if inspect.isclass(thing):
                found.update((f"{path}.{name}", member) for name, member in _members(thing))
    return found


def _name_of_module(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return str(name)


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(owner).items():
        member = getattr(member, "__func__", member)  # of a class method
        if name[0] != "_" and (isinstance(member, property) or inspect.isfunction(member)):
            yield name, member


def in_core() -> dict[str, Any]:
    """Those but the words of other systems, which their own documents explain."""
    return {path: thing for path, thing in public().items() if not path.startswith("mm.compat")}


def code_of(thing: Any) -> Callable[..., Any] | None:
    """Return the function behind a public thing; none for a class without `__init__`."""
    code: Callable[..., Any] | None = thing
    if inspect.isclass(thing):
        code = vars(thing).get("__init__")
    elif isinstance(thing, property):
        code = thing.fget
    return None if code is None else inspect.unwrap(code)


def texts_for(path: str) -> str:
    """Return a thing's docstring, that of its class, and those that it refers to."""
    texts = [inspect.getdoc(public()[path]) or ""]
    owner = path.rpartition(".")[0]
    texts.append(inspect.getdoc(public().get(owner)) or "")
    for name in REFERENCE.findall(texts[0]):
        others = [other for other in public() if other.endswith(f".{name}")]
        texts += [inspect.getdoc(public()[other]) or "" for other in others]
    return "\n".join(texts)


def test_the_walk_finds_what_there_is():
    assert {"mm.save", "mm.DTensor.redistribute", "mm.nn.Linear", "mm.schedule.Costs.of"} <= {
        *public()
    }
    assert len(public()) > 500


def test_each_begins_with_a_sentence():
    wrong = {}
    for path, thing in public().items():
        first = (inspect.getdoc(thing) or "").partition("\n")[0]
        if not re.match(r"(?!What |Who |Which |How )\S.*[.:]$", first):
            wrong[path] = first
    assert not wrong


def test_each_names_its_arguments():
    """Of one alone the first sentence speaks."""
    wrong = {}
    for path, thing in in_core().items():
        code = None if isinstance(thing, property) else code_of(thing)
        if code is None or path in MADE_BY_OTHERS or getattr(thing, "_is_protocol", False):
            continue
        texts = texts_for(path)
        names = [name for name in inspect.signature(code).parameters if name[0] != "_"]
        names = [name for name in names if name not in SELF_EVIDENT]
        missing = [name for name in names if not re.search(rf"\b{name}\b", texts)]
        if len(names) > 1 and missing:
            wrong[path] = missing
    assert not wrong


def test_each_tells_that_it_raises():
    wrong = {}
    for path, thing in in_core().items():
        code = vars(thing).get("__post_init__") if is_dataclass(thing) else code_of(thing)
        if code is None or path in MADE_BY_OTHERS or getattr(thing, "_is_protocol", False):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        raised = {
            ast.unparse(node.exc.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        } - {"AttributeError", "NotImplementedError"}
        if raised and not re.search(r"[Rr]aise|[Ee]rror|[Rr]efus", inspect.getdoc(thing) or ""):
            wrong[path] = raised
    assert not wrong


# -- examples --------------------------------------------------------------------------------------

BELOW = [dtensor.DVariable, layout.BoxLayout, layout.layout_of_runs, layout.plan_redistribution]
"""What is a room's own, and has an example, too."""

NEEDS_THE_MAIN_THREAD = {"run_guard"}


def with_examples() -> list[Any]:
    """Return what has an example that needs one rank, and nothing that it does not make."""
    things = [one for one in public().values() if not isinstance(one, property)] + BELOW
    return [one for one in things if _is_whole(one) and one.__name__ not in NEEDS_THE_MAIN_THREAD]


def _is_whole(thing: Any) -> bool:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
    text = "".join(example.source for example in examples)
    used: dict[type, set[str]] = {ast.Load: set(), ast.Store: set()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            used[type(node.ctx)].add(node.id)
        elif isinstance(node, ast.arg):
            used[ast.Store].add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            used[ast.Store].add(str(node.name))
    unknown = used[ast.Load] - used[ast.Store] - names_for(thing).keys() - vars(builtins).keys()
    sizes = re.findall(r'DeviceMesh\("[^"]*=(\d+)', text)
    return bool(examples) and not unknown and ("run_virtual" in text or set(sizes) <= {"1"})


def names_for(thing: Any) -> dict[str, Any]:
    """Return the names as a reader has them after `import mpimesh as mm`, and those of a room."""
    room = layout if thing.__module__.startswith(layout.__name__) else schedule
    others = {"PipelineStage": mm.PipelineStage, "Mesh": mm.Mesh}
    return {"mm": mm, "np": np, "nn": nn, "optim": optim, **vars(room), **others}


def run_examples(thing: Any) -> tuple[int, int, str]:
    """Run the examples of one docstring; return how many there are and failed, and the report."""
    text, names = inspect.getdoc(thing) or "", names_for(thing)
    parsed = doctest.DocTestParser().get_doctest(text, names, thing.__name__, None, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    failed, tried = runner.run(parsed, out=report.append)
    return tried, failed, "".join(report)


def test_the_examples_run_on_one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    things = with_examples()
    assert len(things) >= 39
    reports = []
    for thing in things:
        ((tried, failed, report),) = mm.run_virtual(1, run_examples, thing)
        assert tried, thing
        reports += [report] * bool(failed)
    assert not reports, "".join(reports)
