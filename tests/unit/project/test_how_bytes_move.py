"""The walk through the code in docs/explanation/how-bytes-move.md is true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm

ROOT = Path(mm.__file__).parent
PAGE = (ROOT.parent / "docs" / "explanation" / "how-bytes-move.md").read_text()
NAMES = re.findall(r"`([A-Za-z_./]+)`", PAGE)


@pytest.mark.parametrize("name", sorted({n for n in NAMES if n.endswith(".py")}))
def test_each_file_that_it_names_is_there(name):
    assert (ROOT / name).exists() or list(ROOT.glob(f"*/{name}")), name


def test_each_method_and_class_that_it_names_is_there():
    text = "\n".join(
        path.read_text()
        for path in sorted(ROOT.rglob("*.py*"))
        if path.is_file() and "__pycache__" not in path.parts
    )
    for name in {n for n in NAMES if not n.endswith(".py") and not n.isupper()}:
        owner, _, method = name.rpartition(".")
        if owner[:1].isupper():
            assert re.search(rf"^class {owner}\b", text, re.M), name
        if method[:1].isupper():
            assert re.search(rf"^class {method}\b|^    {method}: |^{method}: ", text, re.M), name
        elif owner[:1].isupper():
            assert re.search(rf"^    def {method}\b", text, re.M), name


def test_an_all_reduce_goes_the_way_it_tells():
    """In this order, and the plain call and the persistent one alike from `Starter.submit` on."""

    def calls_of(call):
        met = []

        def look(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
                met.append(frame.f_code.co_qualname)

        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(None)
        return list(dict.fromkeys(met))

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            group, x = mesh.group(), np.ones(3)
            planned = group.all_reduce_init(x, out=x, label="mine")
            for _ in range(2):
                group.all_reduce(x).resolve()
            compiled = calls_of(lambda: group.all_reduce(x).resolve())
            compiled += calls_of(lambda: planned.start().resolve())
            with mesh.budget():
                plain = calls_of(lambda: group.all_reduce(x, label="mine").resolve())
                persistent = calls_of(lambda: planned.start().resolve())
            return compiled, plain, persistent

    compiled, plain, persistent = mm.run_virtual(1, main)[0]
    assert compiled == ["ProcessGroup.all_reduce", "PersistentCollective.start"]
    told = re.findall(
        r"^runtime/\w+\.py +([\w.]+)", PAGE.split("```text\n")[1].split("```")[0], re.M
    )
    assert told == ["all_reduce", "Plan.bind", "CollectiveTensor._settle"]
    way = ["ProcessGroup.all_reduce", "Plan.bind", "NodeCommunicator.prepare"]
    way.append("GroupCore.asks_for_budget")
    assert [name for name in plain if name in way] == way
    way = ["PersistentCollective.start", "GroupCore.asks_for_budget"]
    assert [name for name in persistent if name in [*way, "Plan.bind"]] == way
