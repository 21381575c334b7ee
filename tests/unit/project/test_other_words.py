"""The programs in docs/compat/other-words.md run, and give what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpimesh as mm

PAGE = (Path(__file__).parents[3] / "docs" / "compat" / "other-words.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
WORDS = ["kapsl", "burn", "marks", "tvm", "tensorflow", "checkpoints"]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each program leaves on three ranks, by its names."""

    def main(program):
        found: dict[str, Any] = {"mm": mm, "np": np}
        exec(program, found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("programs"))
        programs = zip(WORDS, PROGRAMS, strict=True)
        return {word: mm.run_virtual(3, main, text) for word, text in programs}


def test_kapsl(names):
    for rank, found in enumerate(names["kapsl"]):
        assert found["data"].tolist() == [3.0] * 3
        assert found["chunk"].tolist() == [2.0 * rank, 2.0 * rank + 1]


def test_burn(names):
    for found in names["burn"]:
        assert {key: x.tolist() for key, x in found["gradients"].items()} == {
            7: [1.0] * 3,
            9: [1.0] * 4,
        }


def test_marks(names):
    """The bias without a mark has each rank's own gradient, the others the mean over the ranks."""
    models = [found["model"] for found in names["marks"]]
    own = []
    for rank, model in enumerate(models):
        x, ctx = np.full((5, 3), rank, np.float32), mm.nn.Context()
        twin = mm.nn.Sequential(mm.nn.Linear(3, 4), mm.nn.ReLU(), mm.nn.Linear(4, 2))
        twin.materialize(seed=0)
        twin.backward(np.ones_like(twin(x, ctx)), ctx)
        own.append([one.grad for one in twin.parameters()])
        assert np.array_equal(model[2].bias.grad, own[rank][3])
    for at in range(3):
        mean = np.mean([grads[at] for grads in own], axis=0)
        for model in models:
            assert np.allclose(model.parameters()[at].grad, mean, rtol=1e-6)


def test_tvm(names):
    whole = np.arange(18.0).reshape(3, 6)
    for rank, found in enumerate(names["tvm"]):
        assert np.array_equal(found["part"], whole[:, 2 * rank : 2 * rank + 2])


def test_tensorflow(names):
    assert [found["heartbeat"].beats for found in names["tensorflow"]] == [3] * 3


def test_each_name_is_there():
    for path in re.findall(r"`mm\.([\w.]+)", PAGE):
        thing: Any = mm
        for name in path.split("."):
            thing = getattr(thing, name)


def test_tensorflow_checkpoints(names):
    for found in names["checkpoints"]:
        assert (found["restored"]["weight"].local == 1).all()
        assert found["checkpoint"].save_counter == 1
