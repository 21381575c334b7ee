"""Files of arrays that are damaged or of another kind, and wrong arguments: always our errors."""

from __future__ import annotations

import io
import os
import tracemalloc
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import (
    ClosedError,
    DamagedError,
    DTypeError,
    IndexOutOfRangeError,
    LayoutError,
    MissingPackageError,
    MpimeshError,
    NoRuleError,
    ShapeError,
    StoreError,
)
from mpimesh.store import open_array, save_array
from mpimesh.store.grids import chunks_of, cut, grid_tiles
from tests.helpers.depth import examples
from tests.helpers.dtensor_check import on
from tests.helpers.raises import raises


def npy_bytes(x, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, x, version)
    return file.getvalue()


def npy_of_header(text):
    """A .npy file of version 1 with any header, and 64 bytes of elements."""
    row = text.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(row).to_bytes(2, "little") + row + bytes(64)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays") / "x.npy"


GOOD = npy_bytes(np.arange(24, dtype=np.int16).reshape(4, 6))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<f8", ">c8", "?", "S3", "<U2", "<M8[us]", "V3", "<f2", "g"])
def test_npy_files_of_all_versions_and_dtypes_are_read(version, dtype, tmp_path):
    x = np.arange(6).astype("i8").astype(dtype if np.dtype(dtype).kind != "V" else "S3")
    x = x.view("V3") if np.dtype(dtype).kind == "V" else x
    (tmp_path / "x.npy").write_bytes(npy_bytes(x.reshape(2, 3), version))
    with open_array(tmp_path / "x.npy") as a:
        assert a.dtype == x.dtype.newbyteorder("=")
        assert np.array_equal(a[...], x.reshape(2, 3))
    save_array(tmp_path / "y.npy", x)
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == x.dtype
    assert np.array_equal(found, x)


def test_names_of_fields_in_any_letters(tmp_path):
    x = np.zeros(3, [("größe", "f4"), ("長さ", "i2")])
    save_array(tmp_path / "x.npy", x)
    assert np.load(tmp_path / "x.npy").dtype == x.dtype
    with open_array(tmp_path / "x.npy") as a:
        assert a.dtype == x.dtype


@given(st.data())
@settings(max_examples=examples(2000), deadline=None)
def test_a_changed_npy_file_is_read_or_refused(place, data):
    """Bytes changed, put in, taken out: no other error, and no memory but for elements."""
    file = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(file), 130) - 1))
        match data.draw(st.sampled_from(["change", "digits", "cut", "insert", "remove"])):
            case "change":
                file[at] = data.draw(st.integers(0, 255))
            case "digits":
                file[at:at] = b"9" * data.draw(st.integers(1, 30))
            case "cut":
                del file[max(at, 1) :]
            case "insert":
                file[at:at] = data.draw(st.binary(max_size=8))
            case _:
                del file[at : at + data.draw(st.integers(1, 9))]
        file = file or bytearray(b"\0")
    place.write_bytes(file)
    try:
        with open_array(place) as a:
            assert a[...].nbytes <= len(file)
    except (DamagedError, DTypeError):
        pass


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999999999999, 0), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -8), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<f8', 'fortran_order': 0, 'shape': (1,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': [1], }",
        "{'descr': '<f8', 'fortran_order': False}",
        "{'descr': ('<f8', (2,)), 'fortran_order': False, 'shape': (1,), }",
        f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({'1, ' * 65}), }}",
        "(" * 5000,
        "__import__('os').getpid()",
        "1" * 5000,
    ],
)
def test_headers_that_lie(header, tmp_path):
    (tmp_path / "x.npy").write_bytes(npy_of_header(header))
    tracemalloc.start()
    try:
        with raises(MpimeshError, tmp_path / "x.npy") as caught, open_array(tmp_path / "x.npy"):
            pass
        assert isinstance(caught.value, DamagedError)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_length_of_the_header_takes_no_memory(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100))
    with raises(DamagedError, 4294967295):
        open_array(tmp_path / "x.npy")


def test_pickled_objects_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, 1], object), allow_pickle=True)
    with raises(DTypeError, "object"):
        open_array(tmp_path / "x.npy")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = ["texts", "of any length"]
    with raises(DTypeError, "object"):
        open_array(tmp_path / "x.h5", dataset="x")
    for name in ("y.npy", "y.zarr", "y.h5"):
        with raises(DTypeError, "object"):
            dataset = "x" if name == "y.h5" else None
            save_array(tmp_path / name, np.array([None]), dataset=dataset)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.h5", "x.npy"]


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(10000))
    with open_array(tmp_path / "x.npy") as a:
        os.truncate(tmp_path / "x.npy", 4000)
        assert not a[:100].any()
        with raises(DamagedError, 4000):
            a[...]


@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_damaged_files_of_other_formats(name, tmp_path):
    path, x = tmp_path / name, np.arange(3000.0)
    if name == "x.h5":
        save_array(path, x, dataset="x")
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    else:
        save_array(path, x)
        (path / "zarr.json").write_text((path / "zarr.json").read_text()[:50])
    with raises(DamagedError, path):
        open_array(path, dataset="x" if name == "x.h5" else None)
    if name == "x.zarr":
        path = tmp_path / "y.zarr"
        save_array(path, x)
        chunk = path / "c" / "0"
        chunk.write_bytes(chunk.read_bytes()[:20])
        with open_array(path) as a, raises(DamagedError, path):
            a[...]


BFLOAT16 = pytest.importorskip("ml_dtypes").bfloat16


@pytest.mark.parametrize("kind", ["x.npy", "x.zarr", "x.h5"])
@pytest.mark.parametrize("dtype", [BFLOAT16, "<U3"])
def test_dtypes_that_a_format_has_not(kind, dtype, tmp_path):
    if kind == "x.npy" and dtype == "<U3":
        return  # it has
    with raises(DTypeError, np.dtype(dtype)):
        save_array(tmp_path / kind, np.zeros(3, dtype), dataset="x" if kind == "x.h5" else None)
    assert not list(tmp_path.iterdir())


def test_wrong_arguments(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "folder.zarr").mkdir()
    zarr.create_group(tmp_path / "group.zarr")
    x: Any = np.zeros(3)
    save, there = save_array, tmp_path / "x.npy"
    cases: list[tuple[Any, list[Any], Any]] = [
        (StoreError, [".npy", "x.txt"], lambda: open_array(tmp_path / "x.txt")),
        (StoreError, [".h5", "x.txt"], lambda: save(tmp_path / "x.txt", x)),
        (StoreError, ["tiff"], lambda: open_array(there, format="tiff")),
        (StoreError, ["r+", "'w'"], lambda: open_array(there, mode="w")),
        (StoreError, ["dataset"], lambda: open_array(there, dataset="x")),
        (StoreError, ["chunks"], lambda: save(there, x, chunks=(3,))),
        (StoreError, ["dataset"], lambda: save(tmp_path / "x.h5", x)),
        (StoreError, ["path", 3], lambda: open_array(3)),  # type: ignore[arg-type]
        (StoreError, ["path"], lambda: save("a\0.npy", x)),
        (StoreError, [tmp_path / "no.npy"], lambda: open_array(tmp_path / "no.npy")),
        (StoreError, [tmp_path / "no"], lambda: save(tmp_path / "no" / "x.npy", x)),
        (StoreError, ["folder.npy"], lambda: open_array(tmp_path / "folder.npy")),
        (StoreError, ["folder.npy"], lambda: save(tmp_path / "folder.npy", x)),
        (StoreError, ["folder.zarr"], lambda: save(tmp_path / "folder.zarr", x)),
        (StoreError, ["group.zarr"], lambda: save(tmp_path / "group.zarr", x)),
        (MpimeshError, ["group.zarr"], lambda: open_array(tmp_path / "group.zarr")),
        (ShapeError, ["chunks", (2, 2)], lambda: save(tmp_path / "x.zarr", x, chunks=(2, 2))),
        (ShapeError, ["chunks", (0,)], lambda: save(tmp_path / "x.zarr", x, chunks=(0,))),
        (LayoutError, ["mesh"], lambda: open_array(there, mm.Mesh("a=2"))),  # type: ignore[arg-type]
    ]
    for error, words, call in cases:
        with raises(error, *words):
            call()
    assert np.load(there).shape == (3, 4)
    with open_array(there) as a:
        for key in (5, (0, 0, 0), [0, 1], None, np.array([True, False, True]), "x", 1.5):
            with raises(IndexOutOfRangeError):
                a[key]
        with raises(StoreError, "r+"):
            a.write(np.zeros((3, 4)))
        assert repr(a).endswith("x.npy', shape=(3, 4), dtype=float64)")
    a.close()
    with raises(ClosedError, there):
        a[...]
    with open_array(there, mode="r+") as a:
        with raises(ShapeError, (3, 4), (4, 3)):
            a.write(np.zeros((4, 3)))
        with raises(DTypeError, "float32", "float64"):
            a.write(np.zeros((3, 4), np.float32))
        with raises(IndexOutOfRangeError, 1):
            a.write(np.zeros((2, 4)), index=np.s_[::2])


@pytest.mark.parametrize(("package", "name"), [("zarr", "x.zarr"), ("h5py", "x.h5")])
def test_a_missing_package_is_named_with_how_to_install_it(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    dataset = "x" if package == "h5py" else None
    with raises(MissingPackageError, f"pip install {package}"):
        save_array(tmp_path / name, np.zeros(3), dataset=dataset)
    (tmp_path / name).write_bytes(b"")
    with raises(MissingPackageError, f"pip install {package}"):
        open_array(tmp_path / name, dataset=dataset)


def test_savers_of_numpy_name_ours():
    def main(mesh):
        x: Any = mm.zeros((4, 4), mesh, "S0")
        for call in (np.save, np.savez, np.savez_compressed):
            with raises(NoRuleError, "mm.save_array"):
                call("x.npy", x)

    on("a=2", main)


# -- grids -----------------------------------------------------------------------------------------


@st.composite
def boxes(draw):
    edges = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda row: tuple(sorted(row)))
    box = tuple(draw(st.lists(edges, max_size=3)))
    return box, tuple(draw(st.integers(1, 5)) for _ in box)


@given(boxes(), st.integers(1, 40), st.booleans())
@settings(max_examples=examples(500), deadline=None)
def test_tiles_of_a_grid_are_all_of_a_box_and_apart(case, most, fortran):
    box, grain = case
    counts = np.zeros([max(1, stop) for _, stop in box], int)
    for tile in grid_tiles(box, grain, most, fortran=fortran):
        at: Any = (*(slice(*edges) for edges in tile), ...)
        view = counts[at]
        view += 1
        assert view.size <= max(most, int(np.prod(grain)))
        for (start, stop), (low, high), step in zip(tile, box, grain, strict=True):
            assert start == low or start % step == 0
            assert stop == high or stop % step == 0
    at = (*(slice(*edges) for edges in box), ...)
    inside = counts[at]
    assert (inside == 1).all()
    assert counts.sum() == inside.size


@given(boxes(), st.integers(1, 6), st.booleans())
@settings(max_examples=examples(500), deadline=None)
def test_parts_of_a_box_end_at_cells(case, parts, fortran):
    box, grain = case
    axis, edges = cut(box, grain, parts, fortran=fortran)
    cells = [
        -(-stop // step) - start // step for (start, stop), step in zip(box, grain, strict=True)
    ]
    if axis < 0:
        assert max(cells, default=1) <= 1
        return
    assert len(edges) == parts + 1
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == box[axis]
    assert all(edge % grain[axis] == 0 or edge in box[axis] for edge in edges)
    shares = np.diff([edge // grain[axis] for edge in edges[:-1]])
    assert shares.size == 0 or shares.max() - shares.min() <= 1


def test_chunks_by_the_shape_where_blocks_are_no_good():
    uneven = [((0, 1001),), ((1001, 100_000),)]
    assert chunks_of((100_000,), uneven, 8) == (100_000,)
    many = [((i, i + 1), (0, 100)) for i in range(10_000)]
    assert chunks_of((10_000, 100), many, 8) == (10_000, 100)
    assert chunks_of((4096, 8192), [((0, 2048), (0, 8192)), ((2048, 4096), (0, 8192))], 8) == (
        256,
        8192,
    )
    assert chunks_of((), [()], 8) == ()
    assert chunks_of((0, 3), [], 8) == (1, 3)
