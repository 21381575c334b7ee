"""What trees, arguments and neighbours can do to a save or a load."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DamagedError, DTypeError, StoreError
from mpimesh.store import parts
from tests.helpers.drafts import left_by_a_kill
from tests.helpers.raises import raises


def test_a_save_leaves_alone_what_is_written_for_a_longer_name(tmp_path: Path) -> None:
    other = left_by_a_kill(tmp_path / "run.ema")
    own = left_by_a_kill(tmp_path / "run")
    mm.save(tmp_path / "run", {"x": np.ones(2)})
    assert other.is_dir()
    assert not own.exists()


@pytest.mark.parametrize("value", [np.bytes_(b""), np.void(b"")])
def test_empty_bytes_of_numpy_come_back(value: Any, tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"x": value})
    back = mm.load(tmp_path / "saved")["x"]
    assert type(back) is type(value)
    assert back.item() == b""


def test_arrays_without_bytes_are_refused(tmp_path: Path) -> None:
    with raises(DTypeError, "dtype", "x.view"):
        mm.save(tmp_path / "saved", {"x": np.zeros(2, np.dtype([]))})


@pytest.mark.parametrize("inner", [{}, [], ["<f8"]])
def test_a_forged_number_is_damage(inner: Any) -> None:
    with raises(DamagedError, "numpy"):
        parts.from_json({"$$numpy": inner})


def test_a_forged_complex_number_is_damage() -> None:
    with raises(DamagedError, "complex"):
        parts.from_json({"$$complex": [10**400, 0]})


def test_an_array_and_a_value_do_not_get_one_name(tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"a": np.ones(2), "b": 1})
    with raises(StoreError, "same name", "b"):
        mm.load(tmp_path / "saved", rename={"a": "b"})


@pytest.mark.parametrize("only", [5, [1], b"a", {"a": 1}])
def test_patterns_are_texts(only: Any, tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"a": 1})
    with raises(StoreError, "only"):
        mm.load(tmp_path / "saved", only=only)


@pytest.mark.parametrize("rename", [5, "a", {1: "a"}, {"a": None}])
def test_other_names_are_texts(rename: Any, tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"a": 1})
    with raises(StoreError, "rename"):
        mm.load(tmp_path / "saved", rename=rename)


@pytest.mark.parametrize("path", [None, 5, b"a", "a\0b"])
def test_a_path_is_a_text(path: Any) -> None:
    with raises(StoreError, "path"):
        mm.save(path, {"a": 1})
    with raises(StoreError, "path"):
        mm.load(path)


def test_a_name_that_is_too_long_is_our_error(tmp_path: Path) -> None:
    with raises(StoreError, "too long"):
        mm.save(tmp_path / ("x" * 300), {"a": 1})


def test_a_generator_of_another_kind_is_refused_before_anything_changes(tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"rng": np.random.default_rng(0), "x": np.ones(2)})
    x = np.zeros(2)
    with raises(StoreError, "rng", "MT19937", "PCG64"):
        mm.load(tmp_path / "saved", {"x": x, "rng": np.random.Generator(np.random.MT19937(1))})
    assert not x.any()


class Counter:
    """It counts, and says so."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_an_object_with_a_state_is_found_under_another_name(tmp_path: Path) -> None:
    one, other = Counter(), Counter()
    one.count = 7
    mm.save(tmp_path / "saved", {"old": one, "x": np.ones(2)})
    mm.load(tmp_path / "saved", {"new": other}, rename={"old.": "new."})
    assert other.count == 7


def test_numbers_of_numpy_say_how_many_stay(tmp_path: Path) -> None:
    counts: Any = {"keep": np.int64(1), "every": np.int64(2)}

    def main() -> None:
        with mm.DeviceMesh("dp=-1") as mesh, mm.Checkpoints(tmp_path, mesh, **counts) as kept:
            for step in range(5):
                kept.save(step, {"x": step})

    mm.run_virtual(2, main)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]


def test_a_step_that_no_name_can_have_is_refused(tmp_path: Path) -> None:
    def main() -> None:
        with mm.DeviceMesh("dp=-1") as mesh, mm.Checkpoints(tmp_path, mesh) as kept:
            kept.save(10**18, {"x": 1})

    with raises(StoreError, "step", 10**18):
        mm.run_virtual(2, main)
    assert not [*tmp_path.iterdir()]


def test_new_checkpoints_leave_alone_a_save_that_is_under_way(tmp_path: Path) -> None:
    def main() -> None:
        with mm.DeviceMesh("dp=-1") as mesh:
            first = mm.Checkpoints(tmp_path, mesh, wait=False)
            first.save(1, {"x": mm.ones(1000, mesh, "dp=S0")})
            with mm.Checkpoints(tmp_path, mesh, wait=False) as second:
                second.save(2, {"x": mm.ones(1000, mesh, "dp=S0")})
            first.close()

    mm.run_virtual(2, main)
    assert {each.name for each in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


def test_ordered_dicts_are_dicts(tmp_path: Path) -> None:
    tree: Any = OrderedDict(w=np.ones(2), n=1, inner=defaultdict(list, v=[1.0]))
    mm.save(tmp_path / "saved", tree)
    back = mm.load(tmp_path / "saved")
    assert type(back) is dict
    assert (back["w"].tolist(), back["n"], back["inner"]) == ([1, 1], 1, {"v": [1.0]})
    into: Any = OrderedDict(w=np.zeros(2), n=0, inner=defaultdict(list, v=[]))
    found = mm.load(tmp_path / "saved", into)
    assert type(found) is OrderedDict
    assert type(found["inner"]) is defaultdict
    assert (into["w"].tolist(), found["n"], found["inner"]["v"]) == ([1, 1], 1, [1.0])


@pytest.mark.parametrize("into", [3, "x", 1.5])
def test_a_number_does_not_stand_for_a_tree(into: Any, tmp_path: Path) -> None:
    mm.save(tmp_path / "saved", {"x": np.ones(2), "n": 1})
    with raises(StoreError, into, "only="):
        mm.load(tmp_path / "saved", into)
    assert mm.load(tmp_path / "saved", {})["n"] == 1


def test_ranks_may_have_dicts_in_other_orders(tmp_path: Path) -> None:
    def main() -> None:
        with mm.DeviceMesh("dp=-1") as mesh:
            tree: dict[str, Any] = {"x": mm.ones(4, mesh, "dp=S0"), "n": 1, "w": np.ones(2)}
            keys = sorted(tree, reverse=bool(mesh.rank))
            mm.save(tmp_path / "saved", {"inner": {key: tree[key] for key in keys}})

    mm.run_virtual(2, main)
    assert mm.load(tmp_path / "saved")["inner"]["n"] == 1


@pytest.mark.parametrize("name", ["a\0b", "\0"])
def test_a_dataset_has_no_zero_bytes(name: str, tmp_path: Path) -> None:
    with raises(StoreError, "dataset"):
        mm.save_array(tmp_path / "x.h5", np.ones(2), dataset=name)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    disk, link = tmp_path / "disk" / "run", tmp_path / "run"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    for number in range(2):
        mm.save(link, {"x": number})
        assert mm.load(link) == mm.load(disk) == {"x": number}
    assert link.is_symlink()
    assert [*disk.parent.iterdir()] == [disk]


def test_a_working_directory_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with raises(StoreError, "where run is"):
        mm.save("run", {"x": 1})
    tmp_path.mkdir()


@pytest.mark.parametrize("wait", [True, False])
def test_a_mesh_that_has_saved_is_let_go(wait: bool, tmp_path: Path) -> None:
    def main() -> Any:
        with mm.DeviceMesh("a=2") as mesh:
            handle = mm.save(tmp_path / "run", {"x": mm.ones((4,), mesh, "S0")}, wait=wait)
            if handle is not None:
                handle.resolve()
            return weakref.ref(mesh.group()._core)

    found = mm.run_virtual(2, main)
    gc.collect()
    assert [core() for core in found] == [None, None]
