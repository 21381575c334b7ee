"""Arrays in files, on virtual ranks: what one library writes, the other reads, in any layout."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import DTypeError, LayoutError, MismatchError, ShapeError, StoreError
from mpimesh.store import array_formats, arrays, open_array, save_array
from tests.helpers.array_files import ENDS, options, plain_read
from tests.helpers.depth import examples
from tests.helpers.dtensor_check import layouts, on, split
from tests.helpers.raises import raises

FORMATS = ("npy", "zarr", "hdf5")
DTYPES = ("f8", "f4", "f2", "i8", "i2", "u1", "?", "c8", "c16", ">f4", ">i2")
STRUCTURED = np.dtype([("a", "<f4"), ("b", ">i2", (2,)), ("c", "S3")])


def plain_write(kind, path, x, chunks=None):
    """Let the format's own library write; .npy in Fortran order if it lies so."""
    if kind == "npy":
        np.save(path, x)
    elif kind == "zarr":
        array = zarr.create_array(
            path,
            shape=x.shape,
            dtype=x.dtype,
            chunks=chunks or "auto",
            config={"write_empty_chunks": True},  # else it forgets that zeros are negative
        )
        array[...] = x
    else:
        with h5py.File(path, "w") as file:
            chunks = chunks if x.size else None
            more = {"chunks": chunks, "compression": "gzip"} if chunks else {}
            file.create_dataset("g/x", data=x, **more)


def same_bytes(found, expected):
    """Equal to the bit, NaNs and signs of zeros too, whatever the order of bytes."""
    native = expected.dtype.newbyteorder("=")
    assert found.dtype.newbyteorder("=") == native
    assert found.shape == expected.shape
    one, other = (np.ascontiguousarray(x.astype(native)) for x in (found, expected))
    assert one.tobytes() == other.tobytes()


def values(shape, dtype, seed):
    """Numbers of any bits: NaN, infinity and -0.0 among them."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    x = rng.integers(-99, 99, shape).astype(dtype)
    if dtype.kind in "fc" and x.size:
        flat = x.reshape(-1)
        flat[:: max(1, x.size // 3)] = [np.nan, -0.0, np.inf][seed % 3]
    return x


@st.composite
def cases(draw):
    """A shape, a mesh, a layout to save and one to read, a format, chunks, a dtype."""
    kind = draw(st.sampled_from(FORMATS))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)))
    dims = draw(st.sampled_from(["a=1", "a=2", "a=3", "a=4", "a=2,b=2"]))
    dtype = draw(st.sampled_from(DTYPES))
    size = int(dims[-1])
    if "," in dims:
        row = st.sampled_from(["R", *(f"S{axis}" for axis in range(len(shape)))])
        pair = [", ".join(draw(st.tuples(row, row))) for _ in range(2)]
    else:
        pair = [draw(layouts(shape, size, partial=False)) for _ in range(2)]
    chunks = None
    if kind != "npy" and shape and draw(st.booleans()):
        chunks = tuple(draw(st.integers(1, max(1, length))) for length in shape)
    return kind, shape, dims, dtype, pair, chunks, draw(st.integers(0, 99))


def small_steps():
    """Every path of large arrays for small ones: slabs and pieces of 64 bytes."""
    return (
        mock.patch.object(arrays, "SLAB_BYTES", 64),
        mock.patch.object(arrays, "_FREE_BYTES", 0),
        mock.patch.object(arrays, "_SHORT_BYTES", 16),
        mock.patch.object(array_formats, "PIECE_BYTES", 64),
        mock.patch.object(array_formats, "_PAGE_BYTES", 16),
    )


@given(cases(), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_saved_in_any_layout_is_read_by_the_library_of_the_format(case, small):
    kind, shape, dims, dtype, (source, target), chunks, seed = case
    x = values(shape, dtype, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ENDS[kind]

        def main(mesh):
            t = mm.distribute(x, mesh, source)
            save_array(path, t, chunks=chunks, **options(kind))
            same_bytes(plain_read(kind, path), x)
            mesh.barrier()
            with open_array(path, mesh, **options(kind)) as a:
                assert (a.shape, a.ndim, a.dtype) == (shape, len(shape), x.dtype.newbyteorder("="))
                again = a.read(target)
                assert again.layout == mm.Layout(mesh, target)
                same_bytes(again.full(), x)
            assert [one.name for one in path.parent.iterdir()] == [path.name]

        patches = small_steps() if small else ()
        for patch in patches:
            patch.start()
        try:
            on(dims, main)
        finally:
            for patch in patches:
                patch.stop()


@given(cases(), st.booleans(), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_what_others_wrote_is_read_and_written_in_parts(case, small, data):
    kind, shape, dims, dtype, _, chunks, seed = case
    x = values(shape, dtype, seed)
    key = tuple(
        data.draw(
            st.slices(length)
            if not length
            else st.one_of(st.slices(length), st.integers(-length, length - 1))
        )
        for length in shape
    )
    plain = tuple(
        slice(*sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))) for length in shape
    )
    order = data.draw(st.sampled_from("CF"))
    new = values(x[plain].shape, x.dtype.newbyteorder("="), seed + 1)
    expected = x.copy()
    expected[plain] = new
    source = data.draw(layouts(new.shape, int(dims[-1]), partial=False))
    source = source if "," not in dims else "R, R"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ENDS[kind]
        plain_write(kind, path, np.asarray(x, order=order), chunks)

        def main(mesh):
            with open_array(path, mesh, mode="r+", **options(kind)) as a:
                same_bytes(a[key], np.asarray(x[key]))
                same_bytes(a.read(index=key).full(), np.asarray(x[key]))
                a.write(mm.distribute(new, mesh, source), index=plain)
                same_bytes(a[...], expected)
            same_bytes(plain_read(kind, path), expected)

        patches = small_steps() if small else ()
        for patch in patches:
            patch.start()
        try:
            on(dims, main)
        finally:
            for patch in patches:
                patch.stop()


@pytest.mark.parametrize("kind", FORMATS)
def test_summands_are_added_up(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "SLAB_BYTES", 64)
    x = np.arange(60.0).reshape(12, 5)

    def main(mesh):
        save_array(tmp_path / ENDS[kind], split(x, mesh, "P, S1"), **options(kind))
        with open_array(tmp_path / ENDS[kind], mesh, **options(kind)) as a:
            summands = a.read("P, S0")
            assert summands.layout.partial_op == "sum"
            assert np.array_equal(summands.full(), x)

    on("a=2,b=2", main)
    assert np.array_equal(plain_read(kind, tmp_path / ENDS[kind]), x)


def test_structured_arrays_of_npy_and_hdf5(tmp_path):
    x = np.zeros((5, 3), STRUCTURED)
    x["a"], x["b"], x["c"] = 1.5, [[3, -4]], b"ab"

    def main(mesh):
        t = mm.distribute(x, mesh, "S0")
        for kind in ("npy", "hdf5"):
            path = tmp_path / ENDS[kind]
            save_array(path, t, **options(kind))
            same_bytes(plain_read(kind, path), x)
            with open_array(path, mesh, **options(kind)) as a:
                same_bytes(a.read("S1").full(), x)
        with raises(DTypeError, "Zarr"):
            save_array(tmp_path / "x.zarr", t)

    on("a=2", main)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_rank_reads_only_its_block(kind, tmp_path):
    x = np.arange(256 * 2048, dtype=np.float32).reshape(256, 2048)  # no row within a page
    plain_write(kind, tmp_path / ENDS[kind], x)

    def main(mesh):
        with open_array(tmp_path / ENDS[kind], mesh, **options(kind)) as a:
            counts = []
            for placement in ("S0, S1", "S1, S0", "R, S0", "S1, R"):
                before = a.read_bytes
                block = a.read(placement).local
                counts.append((a.read_bytes - before, block.nbytes))
            before = a.read_bytes
            part = a.read("R, S0", index=np.s_[:, 256:768])
            counts.append((a.read_bytes - before, part.local.nbytes))
        return counts

    for counts in on("a=2,b=2", main):
        assert all(count == wanted > 0 for count, wanted in counts)


def test_short_rows_are_read_with_the_gaps_of_their_page(tmp_path):
    x = np.arange(6000.0).reshape(1000, 6)
    np.save(tmp_path / "x.npy", x)
    with open_array(tmp_path / "x.npy") as a:
        assert np.array_equal(a[:, 2], x[:, 2])
        assert 8000 < a.read_bytes <= x.nbytes
        assert np.array_equal(a[::100, 1:3], x[::100, 1:3])


def test_without_a_mesh(tmp_path):
    x = np.arange(12.0).reshape(3, 4)
    for kind in FORMATS:
        path = tmp_path / ENDS[kind]
        save_array(path, x, **options(kind))
        with open_array(str(path), mode="r+", **options(kind)) as a:
            assert np.array_equal(a.read(), x)
            assert np.array_equal(a.read(index=1), x[1])
            a.write(-x[:, 1], index=np.s_[:, 1])
            with raises(LayoutError, "without a mesh"):
                a.read("dp=S0")
        assert plain_read(kind, path)[1, 1] == -x[1, 1]


def test_numpy_arrays_that_all_ranks_have_and_meshes_of_some_ranks(tmp_path):
    x = np.arange(30).reshape(10, 3)
    half = mm.Mesh("p=2", ids=[2, 0])

    def main(mesh):
        save_array(tmp_path / "whole.npy", x, mesh=mesh)
        with mm.DeviceMesh(half) as some:
            save_array(tmp_path / "some.npy", mm.distribute(x, some, "p=S0"))
            mesh.barrier()
            with open_array(tmp_path / "some.npy", some) as a:
                t = a.read("p=S1")
                assert t.is_member == (mesh.rank in (0, 2))
                whole = t.full()
                assert whole is None or np.array_equal(whole, x)

    on("a=3", main)
    for name in ("whole.npy", "some.npy"):
        assert np.array_equal(np.load(tmp_path / name), x)


@pytest.mark.parametrize("layout", ["S0", "S1", "R"])
def test_chunks_of_zarr_are_aligned_with_blocks(layout, tmp_path, monkeypatch):
    """Then each chunk is written by the rank that has it, and nothing is carried."""
    monkeypatch.setattr(arrays, "_carried", None)
    x = np.arange(512 * 512, dtype=np.float32).reshape(512, 512)

    def main(mesh):
        save_array(tmp_path / "x.zarr", mm.distribute(x, mesh, layout))

    on("a=4", main)
    array = zarr.open_array(tmp_path / "x.zarr", mode="r")
    assert array.chunks == {"S0": (128, 512), "S1": (512, 128), "R": (512, 512)}[layout]
    assert np.array_equal(array[...], x)


def test_no_two_ranks_write_one_chunk(tmp_path, monkeypatch):
    """Each chunk that is written is in boxes of one rank."""
    monkeypatch.setattr(arrays, "SLAB_BYTES", 1 << 11)
    x = np.arange(40 * 30.0).reshape(40, 30)
    seen: list[tuple[int, Any]] = []

    def main(mesh):
        t = mm.distribute(x, mesh, "S0(11,29), S1(7,23)")

        def spied(file, values):
            plain = file.write

            def note(box, part):
                seen.append((mesh.rank, box))
                plain(box, part)

            with mock.patch.object(file, "write", note):
                region = arrays.Region.of((), x.shape)
                arrays._write_region(file, region, values, tmp_path)

        with open_array(tmp_path / "x.zarr", mesh, mode="r+") as a:
            spied(a._file, t)

    zarr.create_array(tmp_path / "x.zarr", shape=x.shape, dtype=x.dtype, chunks=(8, 8))
    on("a=2,b=2", main)
    assert np.array_equal(zarr.open_array(tmp_path / "x.zarr")[...], x)
    owners: dict[Any, int] = {}
    for rank, box in seen:
        for cell in np.ndindex(5, 4):
            inside = all(
                start < (place + 1) * 8 and stop > place * 8
                for place, (start, stop) in zip(cell, box, strict=True)
            )
            if inside:
                assert owners.setdefault(cell, rank) == rank
    assert len(owners) == 20
    assert len(set(owners.values())) == 4


def test_other_datasets_of_an_hdf5_file_stay(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["other"] = np.arange(5)
        file["g/x"] = np.zeros(3)
        file["group/y"] = 1
    x = np.arange(8.0)
    save_array(path, x, dataset="g/x")
    with h5py.File(path, "r") as file:
        assert np.array_equal(file["g/x"], x)
        assert np.array_equal(file["other"], np.arange(5))
    with raises(StoreError, "group"):
        save_array(path, x, dataset="group")
    with raises(StoreError, "missing", "g/x"):
        open_array(path, dataset="missing")


def test_a_zarr_array_takes_the_place_of_another(tmp_path):
    path = tmp_path / "x.zarr"
    for x in (np.arange(12.0), np.arange(6, dtype=np.int8).reshape(2, 3)):
        save_array(path, x)
        assert np.array_equal(plain_read("zarr", path), x)
        assert [one.name for one in tmp_path.iterdir()] == ["x.zarr"]


def test_ranks_that_call_it_otherwise_are_told(tmp_path):
    x = np.arange(4.0)

    def main(mesh):
        t = mm.distribute(x, mesh, "S0")
        whole = t.redistribute("R")
        with raises(MismatchError, "save_array"):
            save_array(tmp_path / f"{mesh.rank}.npy", t)
        with raises(StoreError, "rank 1"):
            save_array(tmp_path / ("x.npy" if mesh.rank == 0 else "x.txt"), t)
        save_array(tmp_path / "x.npy", t)
        with open_array(tmp_path / "x.npy", mesh, mode="r+") as a:
            with raises(MismatchError, "read"):
                a.read("S0" if mesh.rank else "R")
            with raises(ShapeError, (3,)):
                a.write(t, index=np.s_[mesh.rank : 3] if mesh.rank == 0 else np.s_[:])
            with raises(MismatchError, "write"):
                a.write(t if mesh.rank else whole)
            a.write(t)
        assert np.array_equal(np.load(tmp_path / "x.npy"), x)

    on("a=2", main)
