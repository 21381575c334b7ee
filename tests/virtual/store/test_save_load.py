"""Trees saved on one mesh and loaded on another, beside NumPy in one process."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DamagedError, DTypeError, MismatchError, ShapeError, StoreError
from mpimesh.store import files, loading
from tests.helpers.depth import examples
from tests.helpers.drafts import left_by_a_kill
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

MESHES = ["dp=1", "dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=3"]
DTYPES = [np.float32, np.float64, np.int8, np.uint64, np.bool_, np.complex64, np.complex128]
DTYPES += [np.float16, ml_dtypes.bfloat16]


def array_of(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Numbers, with NaN and infinities where there are such."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-100, 100, shape)
    made = np.asarray(values % 2 if dtype is np.bool_ else values).astype(dtype)
    if made.size > 2 and np.dtype(dtype).kind in "fcV":
        made.reshape(-1)[0] = np.nan
        made.reshape(-1)[1] = -np.inf
    return made


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def save_on(mesh: mm.DeviceMesh, path: Path, tree: Any) -> None:
    mm.save(path, tree, mesh=mesh)


def load_on(mesh: mm.DeviceMesh, path: Path, layout: Any) -> Any:
    return mm.load(path, mesh=mesh, layout=layout)


@st.composite
def placements(draw: Any, mesh: str, ndim: int) -> str:
    """Placements on a mesh, of an array of so many axes."""
    dims = [part.split("=")[0] for part in mesh.split(",")]
    axes = ["R", *(f"S{axis}" for axis in range(ndim))]
    return ", ".join(f"{dim}={draw(st.sampled_from(axes))}" for dim in dims)


@st.composite
def cases(draw: Any) -> Any:
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4))
    ways = [
        (mesh, [draw(placements(mesh, len(shape))) for shape, _ in kinds])
        for mesh in draw(st.lists(st.sampled_from(MESHES), min_size=2, max_size=2))
    ]
    return kinds, ways, draw(st.sampled_from([1, 100, 1 << 30])), draw(st.booleans())


@settings(max_examples=examples(200))
@given(cases())
def test_any_layout_to_any_other(tmp_path_factory, case):
    kinds, ((mesh, layouts), (other_mesh, other_layouts)), file_bytes, wait = case
    arrays = [array_of(shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    path = tmp_path_factory.mktemp("saved") / "run"

    def save(mesh: mm.DeviceMesh) -> None:
        tree = {
            f"x{number}": mm.distribute(array, mesh, layout)
            for number, (array, layout) in enumerate(zip(arrays, layouts, strict=True))
        }
        handle = mm.save(path, tree, mesh=mesh, file_bytes=file_bytes, wait=wait)
        for array in tree.values():
            if not wait:  # the copies are saved
                array.local[...] = 1
        if handle is not None:
            assert handle.resolve() == path

    def load(mesh: mm.DeviceMesh) -> None:
        rules = {f"x{number}": layout for number, layout in enumerate(other_layouts)}
        made = mm.load(path, mesh=mesh, layout=rules)
        tree = {name: mm.zeros(x.shape, mesh, x.layout, dtype=x.dtype) for name, x in made.items()}
        assert mm.load(path, tree, verify="before")["x0"] is tree["x0"]
        for found in (made, tree):
            for number, array in enumerate(arrays):
                assert same(found[f"x{number}"].full(), array)

    on_ranks(mesh, save)
    on_ranks(other_mesh, load)
    alone = mm.load(path)
    assert all(same(alone[f"x{number}"], array) for number, array in enumerate(arrays))


def test_what_a_tree_may_hold(tmp_path):
    rng = np.random.default_rng(5)
    rng.random(3)
    tree: dict[Any, Any] = {
        "numbers": {"a": 1, "b": -2.5, "nan": float("nan"), "big": 1 << 100, "z": 1 + 2j},
        "texts": ["é", b"\0\xff", None, True, (1, ("nested",))],
        7: {"by number": np.arange(3), ("a", "tuple"): 1},
        "losses": [0.1, float("inf")],
        "$odd": {"$tuple": [1]},
        "row": [np.eye(2), {"deep": np.int8(3)}, ()],
        "rng": rng,
        "old rng": np.random.RandomState(3),
        "big endian": np.arange(4, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(20)[::3],
    }
    mm.save(tmp_path / "a", tree)
    found = mm.load(tmp_path / "a")
    assert found["numbers"].pop("nan") != found["numbers"]
    assert found["numbers"] == {"a": 1, "b": -2.5, "big": 1 << 100, "z": 1 + 2j}
    assert found["texts"] == tree["texts"]
    assert found["losses"] == tree["losses"]
    assert found["$odd"] == tree["$odd"]
    assert found[7]["by number"].tolist() == [0, 1, 2]
    assert found[7]["a", "tuple"] == 1
    assert found["row"][1]["deep"] == 3
    assert type(found["row"][1]["deep"]) is np.int8
    assert found["row"][2] == ()
    for name in ("big endian", "fortran", "strided"):
        np.testing.assert_array_equal(found[name], tree[name])
    fresh, old = np.random.default_rng(0), np.random.RandomState(0)
    into = {"rng": fresh, "old rng": old, "losses": [], "big endian": np.zeros(4, ">i4")}
    assert mm.load(tmp_path / "a", into)["losses"] == tree["losses"]
    assert fresh.random() == rng.random()
    assert old.rand() == np.random.RandomState(3).rand()
    np.testing.assert_array_equal(into["big endian"], tree["big endian"])


@pytest.mark.parametrize("root", [np.arange(5), 3, "text", [1, np.ones(2)], {}])
def test_any_root(tmp_path, root):
    mm.save(tmp_path / "a", root)
    found = mm.load(tmp_path / "a")
    np.testing.assert_equal(found, root)
    assert type(found) is type(root)


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.count, self.array = 0, np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.array = state["count"], state["array"]


def test_objects_with_a_state(tmp_path):
    counter = Counter()
    counter.count, counter.array = 5, np.array([1.0, 2.0])
    mm.save(tmp_path / "a", {"counter": counter})
    fresh = Counter()
    assert mm.load(tmp_path / "a", {"counter": fresh})["counter"] is fresh
    assert (fresh.count, fresh.array.tolist()) == (5, [1.0, 2.0])
    state = mm.load(tmp_path / "a")["counter"]
    assert state["count"] == 5


def test_a_rank_reads_its_bytes_only(tmp_path, monkeypatch):
    whole = np.arange(64 * 1024.0).reshape(64, 1024)
    read: list[int] = []
    read_into = loading.read_into

    def counting(*arguments: Any, **options: Any) -> None:
        read.append(read_into(*arguments, **options))

    monkeypatch.setattr(loading, "read_into", counting)
    on_ranks("dp=4", lambda mesh: mm.save(tmp_path / "a", mm.distribute(whole, mesh, "dp=S0")))
    for placements, share in (("dp=S0", 4), ("dp=R", 1)):
        read.clear()
        on_ranks("dp=4", partial(load_on, path=tmp_path / "a", layout=placements))
        assert read == [whole.nbytes // share] * 4
    read.clear()
    on_ranks("dp=2", lambda mesh: mm.save(tmp_path / "b", {"a": whole, "b": whole[:1]}, mesh=mesh))
    mm.load(tmp_path / "b", only="b")
    assert read == [whole[:1].nbytes]


def test_each_box_is_written_once_and_evenly(tmp_path):
    whole = np.zeros((1024, 64), np.uint8)
    on_ranks("dp=4", lambda mesh: mm.save(tmp_path / "a", [whole] * 8, mesh=mesh))
    sizes = [file.stat().st_size for file in (tmp_path / "a").rglob("*.safetensors")]
    assert len(sizes) == 4
    assert sum(sizes) < 8 * whole.nbytes + 4 * 1024
    assert max(sizes) < 2 * whole.nbytes + 1024


def test_files_are_bounded(tmp_path):
    tree = [np.zeros((100, 10)) for _ in range(5)]
    mm.save(tmp_path / "a", tree, file_bytes=3000)
    sizes = [file.stat().st_size for file in (tmp_path / "a").rglob("*.safetensors")]
    assert len(sizes) > 13
    assert max(sizes) <= 3000 + 1024
    np.testing.assert_equal(mm.load(tmp_path / "a"), tree)


# -- parts, other names, other files --------------------------------------------------------------


def test_parts_of_a_tree(tmp_path):
    mm.save(tmp_path / "a", {"model": {"w": np.ones(3), "b": np.ones(2)}, "step": 7})
    assert mm.load(tmp_path / "a", {"step": 0}) == {"step": 7}
    whole = {"model": {"w": np.zeros(3), "b": np.zeros(2)}, "step": 1}
    found = mm.load(tmp_path / "a", whole, only="model.w")
    assert found["model"]["w"].sum() == 3
    assert found["model"]["b"].sum() == 0
    assert found["step"] == 1
    renamed = mm.load(tmp_path / "a", {"net.w": np.zeros(3)}, rename={"model.": "net."})
    assert renamed["net.w"].sum() == 3
    into: dict[str, Any] = {"net": {"w": np.zeros(3)}}
    mm.load(tmp_path / "a", into, rename=lambda name: name.replace("model", "net"))
    assert into["net"]["w"].sum() == 3
    into = {"model": {"w": np.zeros(3), "new": np.zeros(1)}, "other": 5}
    assert mm.load(tmp_path / "a", into, strict=False)["other"] == 5
    with raises(StoreError, "'model.new'", "model.b", "strict=False"):
        mm.load(tmp_path / "a", into)
    with raises(StoreError, "only='modl.*'"):
        mm.load(tmp_path / "a", only="modl.*")
    with raises(StoreError, "same name", "x"):
        mm.load(tmp_path / "a", rename=lambda name: "x")


def test_files_of_other_makers(tmp_path):
    from safetensors.numpy import save_file

    first = {"bert.w": np.arange(6.0).reshape(2, 3), "bert.b": np.ones(2, np.float32)}
    save_file(first, tmp_path / "model.safetensors")
    found = mm.load(tmp_path / "model.safetensors", rename={"bert.": ""})
    np.testing.assert_array_equal(found["w"], first["bert.w"])
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"w": np.arange(4.0)}, folder / "model-00001-of-00002.safetensors")
    save_file({"v": np.arange(5)}, folder / "model-00002-of-00002.safetensors")
    index = {
        "metadata": {},
        "weight_map": {
            "w": "model-00001-of-00002.safetensors",
            "v": "model-00002-of-00002.safetensors",
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def load(mesh: mm.DeviceMesh) -> None:
        found = mm.load(folder, mesh=mesh, layout={"w": "dp=S0"})
        assert found["w"].full().tolist() == [0, 1, 2, 3]
        assert found["v"].tolist() == [0, 1, 2, 3, 4]

    on_ranks("dp=3", load)


# -- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_saved(tmp_path):
    for tree, words in (
        ({"f": print}, ("f is a", "state_dict")),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, ("a.b reads as a part of a", "rename")),
        ({"t": np.array(["text"])}, ("<U4",)),
        ({"o": np.array([None])}, ("object",)),
        ({"m": np.ma.ones(3)}, ("masked",)),
    ):
        with pytest.raises((StoreError, DTypeError)) as caught:
            mm.save(tmp_path / "a", tree)
        assert all(word in str(caught.value) for word in words), caught.value
    loop: list[Any] = []
    loop.append(loop)
    with raises(StoreError, "deep"):
        mm.save(tmp_path / "a", loop)
    assert not (tmp_path / "a").exists()
    assert not [*tmp_path.iterdir()]


def test_names_that_read_as_parts_of_others(tmp_path):
    tree = {"model": nn.Linear(2, 3), "model.ema": nn.Linear(2, 3)}
    for layer in tree.values():
        layer.materialize(seed=0)
    with raises(StoreError, "model.ema reads as a part of model", "Linear", "rename"):
        mm.save(tmp_path / "a", tree)
    mm.save(tmp_path / "a", {"x": np.ones(2), "x.y": np.ones(3), "x.z": [1]})
    assert mm.load(tmp_path / "a")["x.y"].sum() == 3


def test_what_a_rank_raises_is_told_on_all(tmp_path):
    class Bad(Counter):
        rank = 0

        def state_dict(self) -> dict[str, Any]:
            if self.rank:
                raise ZeroDivisionError("no state")
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.rank:
                raise ZeroDivisionError("no room")

    def main(mesh: mm.DeviceMesh) -> None:
        bad = Bad()
        bad.rank = mesh.rank
        with raises(StoreError, "no state"):
            mm.save(tmp_path / "a", bad, mesh=mesh)
        bad.rank = 0
        mm.save(tmp_path / "a", bad, mesh=mesh)
        bad.rank = mesh.rank
        with raises(StoreError, "no room"):
            mm.load(tmp_path / "a", bad, mesh=mesh)
        mm.save(tmp_path / "a", {"x": np.ones(2)}, mesh=mesh)
        with raises(StoreError, "division"):
            mm.load(tmp_path / "a", mesh=mesh, rename=lambda name: str(1 // (mesh.rank - 1)))
        with pytest.raises(MismatchError):
            mm.load(tmp_path / "a", mesh=mesh, verify="none" if mesh.rank else "read")

    on_ranks("dp=2", main)
    with pytest.raises(StoreError, match="4 ranks"):
        mm.run_virtual(4, lambda: mm.save(tmp_path / "b", [1]))


def test_what_is_in_the_way(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    with raises(StoreError, "is a file"):
        mm.save(tmp_path / "file", [1])
    with raises(StoreError, "no checkpoint"):
        mm.save(tmp_path / "folder", [1])
    with raises(StoreError, "file/deeper"):
        mm.save(tmp_path / "file" / "deeper", [1])
    assert (tmp_path / "folder" / "mine").read_text() == "mine"


def test_what_does_not_fit(tmp_path):
    mm.save(tmp_path / "a", {"x": np.arange(4.0), "n": np.arange(3)})
    with raises(ShapeError, "x has shape (5,)", "(4,)"):
        mm.load(tmp_path / "a", {"x": np.zeros(5)})
    with raises(DTypeError, "n was saved as int64", "float32"):
        mm.load(tmp_path / "a", {"n": np.zeros(3, np.float32)})
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with raises(StoreError, "n of", "(3,)", "int64", "value there"):
        mm.load(tmp_path / "a", {"n": 3})
    mm.save(tmp_path / "b", {"l": [1, 2], "rng": np.random.default_rng(1)})
    with raises(StoreError, "l of", "[1, 2]", "array there"):
        mm.load(tmp_path / "b", {"l": np.zeros(2)})
    with raises(StoreError, "rng is of", "Philox", "PCG64"):
        mm.load(tmp_path / "b", {"rng": np.random.Generator(np.random.Philox(1))})
    assert mm.load(tmp_path / "a" / "manifest.json")["n"].tolist() == [0, 1, 2]
    with raises(StoreError, "path of a checkpoint"):
        mm.save({"a": 1}, tmp_path / "c")  # type: ignore[call-overload]
    with raises(StoreError, "read-only"):
        mm.load(tmp_path / "a", {"x": frozen})
    half = np.zeros(4, np.float16)
    mm.load(tmp_path / "a", {"x": half})
    assert half.tolist() == [0, 1, 2, 3]
    with raises(StoreError, "layout="):
        mm.load(tmp_path / "a", {"x": half}, layout="dp=S0")
    with raises(StoreError, "'z*'"):
        mm.load(tmp_path / "a", layout={"z*": "dp=S0"})
    with raises(StoreError, "which ranks"):
        mm.load(tmp_path / "a", layout="dp=S0")
    with raises(StoreError, str(tmp_path / "none")):
        mm.load(tmp_path / "none")
    with raises(StoreError, "verify", "'maybe'"):
        mm.load(tmp_path / "a", verify="maybe")  # type: ignore[arg-type]


def test_ranks_that_differ(tmp_path):
    def differing(mesh: mm.DeviceMesh) -> None:
        for tree, kind in (
            ({"n": mesh.rank}, MismatchError),
            ({"a" if mesh.rank else "b": 1}, MismatchError),
            ({"x": np.zeros(2 + mesh.rank)}, MismatchError),
            ({"x": np.full(3000, mesh.rank)}, MismatchError),
            ({"x": np.full((300, 10), mesh.rank)[:, ::2]}, MismatchError),
            ({"x": np.arange(3000) + mesh.rank * (np.arange(3000) == 2999)}, MismatchError),
            ({"rng": np.random.Generator(np.random.MT19937(mesh.rank))}, MismatchError),
            ({"x": print if mesh.rank else 1}, StoreError),
        ):
            with pytest.raises(kind) as caught:
                mm.save(tmp_path / "a", tree, mesh=mesh)
            assert caught.value.agreed
        with pytest.raises(MismatchError, match="rank 1: save"):
            mm.save(tmp_path / str(mesh.rank), {}, mesh=mesh)
        x = mm.zeros(4, mesh, "dp=P")
        with pytest.raises(StoreError, match="summands"):
            mm.save(tmp_path / "a", x)
        mm.save(tmp_path / "a", {"x": np.ones(3)}, mesh=mesh)
        with pytest.raises(ShapeError):
            mm.load(tmp_path / "a", {"x": np.zeros(3 + mesh.rank)}, mesh=mesh)
        mine = np.zeros(3)
        assert mm.load(tmp_path / "a", {"x": mine}, mesh=mesh)["x"].sum() == 3

    on_ranks("dp=2", differing)


def test_damaged_files(tmp_path):
    path = tmp_path / "a"
    mm.save(path, {"x": np.arange(1000.0), "y": np.arange(1000.0)})
    (file,) = path.rglob("*.safetensors")
    text = file.read_bytes()
    target = np.zeros(1000)

    def damage(change: Any, words: str) -> None:
        change()
        for verify in ("read", "before"):
            with pytest.raises(DamagedError, match=words):
                mm.load(path, {"x": target, "y": np.zeros(1000)}, verify=verify)
        file.write_bytes(text)

    flipped = bytearray(text)
    flipped[-5] ^= 1
    damage(lambda: file.write_bytes(flipped), "checksum")
    damage(lambda: file.write_bytes(text[:-1]), "bytes")
    damage(file.unlink, "missing")
    mm.load(path, {"x": target})
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        mm.load(path)


# -- replacing ------------------------------------------------------------------------------------


def test_a_checkpoint_is_replaced_at_once(tmp_path):
    path = tmp_path / "a"
    for number in range(3):
        on_ranks("dp=2", partial(save_on, path=path, tree=[np.full(5, number)]))
        assert mm.load(path)[0].tolist() == [number] * 5
        assert len([*path.iterdir()]) == 2
        assert [*tmp_path.iterdir()] == [path]
    left_by_a_kill(path)
    (tmp_path / ".a.0123456789ab.part").mkdir()  # of a save that may have begun just now
    mm.save(path, [1])
    assert sorted(each.name for each in tmp_path.iterdir()) == [".a.0123456789ab.part", "a"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_of_one_rank_is_told_on_all(tmp_path, monkeypatch, bad, wait):
    path = tmp_path / "a"
    mm.save(path, [np.zeros(4)])
    pwrite, failing = os.pwrite, [False]

    def no_room(number: int, data: Any, offset: int) -> int:
        file = Path(f"/proc/self/fd/{number}").readlink().name
        if failing[0] and file.startswith(f"{bad:05}"):
            raise OSError(28, "No space left on device")
        return pwrite(number, data, offset)

    monkeypatch.setattr(os, "pwrite", no_room)

    def save(mesh: mm.DeviceMesh) -> None:
        x = mm.distribute(np.arange(4.0), mesh, "dp=S0")
        failing[0] = True
        mesh.barrier()
        if not wait:
            assert mm.save(path, [x], wait=False) is not None
        with pytest.raises(StoreError, match=rf"No space.* rank {bad}.*as it was") as caught:
            mm.save(path, [x])  # or tells what the one before has met
        assert caught.value.agreed
        mesh.barrier()
        failing[0] = False
        mesh.barrier()
        assert mm.load(path, mesh=mesh)[0].tolist() == [0] * 4
        mm.save(path, [x])

    on_ranks("dp=2", save)
    assert mm.load(path)[0].tolist() == [0, 1, 2, 3]
    assert [*tmp_path.iterdir()] == [path]


def test_nodes_with_folders_of_their_own(tmp_path, monkeypatch):
    """The first rank does not find what the other has written."""
    monkeypatch.setattr(files, "_SEEN_S", 0.1)
    write = files.Writer._write

    def elsewhere(writer: Any, file: files.DataFile) -> None:
        write(writer, file)
        if file.name.startswith("00001"):
            (writer._folder / file.name).rename(tmp_path / "elsewhere")

    monkeypatch.setattr(files.Writer, "_write", elsewhere)

    def main(mesh: mm.DeviceMesh) -> None:
        with raises(StoreError, "00001-000", "all nodes share", "rank 0"):
            mm.save(tmp_path / "a", mm.ones(4, mesh, "dp=S0"))

    on_ranks("dp=2", main)
    assert [each.name for each in tmp_path.iterdir()] == ["elsewhere"]
