"""Boxes of arrays read from files: the same as NumPy has them, and no bytes beside them."""

from __future__ import annotations

import os
import tempfile
import threading
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.errors import DamagedError, StoreError
from mpimesh.layout.boxes import Box, extent, view, whole
from mpimesh.store import array_formats, loading
from mpimesh.store.format import ArrayEntry, Manifest, Piece, digest_of, file_dtype
from mpimesh.store.loading import FileReader
from tests.helpers.depth import examples
from tests.helpers.raises import raises

DTYPES = [np.dtype(dtype) for dtype in ("?", "i1", "<f4", "<c16", ml_dtypes.bfloat16)]


def boxes_of(draw, shape):
    return tuple(
        tuple(sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape
    )


def grid(draw, shape):
    """Cut an array into a grid of boxes."""
    boxes: list[Box] = [()]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        edges = list(pairwise(cuts)) or [(0, 0)]
        boxes = [(*box, pair) for box in boxes for pair in edges]
    return boxes


def write(folder: Path, array: np.ndarray, boxes: list[Box], offset: int = 5) -> Manifest:
    """Write the boxes of an array, by turns into two files."""
    texts = [b"x" * offset, b""]
    pieces = []
    for number, box in enumerate(boxes):
        data = view(array, box).astype(file_dtype(array.dtype)).tobytes()
        pieces.append(Piece(number % 2, box, len(texts[number % 2]), digest_of(data)))
        texts[number % 2] += data
    (folder / "sub").mkdir()
    files = []
    for name, text in zip(("a", "sub/b"), texts, strict=True):
        (folder / name).write_bytes(text)
        files.append((name, len(text)))
    entry = ArrayEntry(array.shape, array.dtype, tuple(pieces))
    return Manifest({"w": entry}, {}, None, tuple(files))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    dtype = draw(st.sampled_from(DTYPES))
    raw = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, (*shape, dtype.itemsize))
    array = np.ascontiguousarray(raw, np.uint8).view(dtype).reshape(shape)
    # Small limits, so that small arrays meet all of them.
    limits = draw(st.tuples(st.integers(16, 200), st.integers(0, 40)))
    return array, grid(draw, shape), boxes_of(draw, shape), draw(st.sampled_from("CFs")), limits


@settings(max_examples=examples(1500))
@given(cases())
def test_any_box_of_any_pieces_is_numpys(case):
    array, boxes, box, order, (most_bytes, page_bytes) = case
    patch = pytest.MonkeyPatch()
    patch.setattr(loading, "_MOST_BYTES", most_bytes)
    patch.setattr(array_formats, "PIECE_BYTES", most_bytes)
    patch.setattr(array_formats, "_PAGE_BYTES", page_bytes)
    with patch.context(), tempfile.TemporaryDirectory() as name:
        manifest = write(Path(name), array, boxes)
        entry = manifest.arrays["w"]
        wanted = view(array, box)
        out = np.zeros(extent(box), array.dtype, order="F" if order == "F" else "C")
        if order == "s" and out.ndim:
            out = np.zeros((*out.shape[:-1], 2 * out.shape[-1]), array.dtype)[..., ::2]
        with FileReader(Path(name), manifest) as reader:
            for piece in entry.pieces:
                reader.read(piece, entry, box, out)
                reader.check(piece, entry)
        patch.undo()
    assert out.tobytes() == wanted.tobytes()


def test_values_are_cast(tmp_path):
    array = np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 6)
    manifest = write(tmp_path, array, [((0, 4), (0, 3)), ((0, 4), (3, 6))])
    out = np.empty((4, 6), ml_dtypes.bfloat16)
    with FileReader(tmp_path, manifest) as reader:
        for piece in manifest.arrays["w"].pieces:
            reader.read(piece, manifest.arrays["w"], whole((4, 6)), out)
    assert (out == array.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize(
    ("box", "nbytes"),
    [
        (((5, 9), (0, 8192)), 4 * 8192 * 4),  # a run
        (((0, 16), (0, 1024)), 16 * 1024 * 4),  # gaps of 28 KiB: each run by itself
        (((0, 16), (0, 6144)), 16 * 6144 * 4),  # of 8 KiB
        (((0, 16), (8190, 8192)), 16 * 2 * 4),
        (((3, 3), (0, 8192)), 0),
    ],
)
def test_what_is_not_wanted_is_not_read(tmp_path, box, nbytes):
    array = np.arange(16 * 8192, dtype=np.int32).reshape(16, 8192)
    manifest = write(tmp_path, array, [whole(array.shape)])
    out = np.empty(extent(box), array.dtype)
    with FileReader(tmp_path, manifest) as reader:
        reader.read(manifest.arrays["w"].pieces[0], manifest.arrays["w"], box, out)
        assert reader.read_bytes == nbytes
    assert (out == view(array, box)).all()


def test_large_pieces_are_read_through_little_memory(tmp_path):
    array = np.random.default_rng(0).random((1500, 2000))
    manifest = write(tmp_path, array, [whole(array.shape)])
    entry = manifest.arrays["w"]
    with FileReader(tmp_path, manifest) as reader:
        straight, turned = np.empty_like(array), np.empty_like(array, order="F")
        reader.read(entry.pieces[0], entry, whole(array.shape), straight)
        assert reader._memory.size == 0
        reader.read(entry.pieces[0], entry, whole(array.shape), turned)
        assert 0 < reader._memory.size <= 8 << 20
    assert (straight == array).all()
    assert (turned == array).all()


# -- files that are not what they should be --------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    array = np.arange(60, dtype=np.float64).reshape(6, 10)
    return tmp_path, write(tmp_path, array, [((0, 3), (0, 10)), ((3, 6), (0, 10))])


def read_all(folder: Path, manifest: Manifest, out: np.ndarray | None = None, **options) -> None:
    entry = manifest.arrays["w"]
    out = np.empty(entry.shape, entry.dtype) if out is None else out
    with FileReader(folder, manifest, **options) as reader:
        for piece in entry.pieces:
            reader.read(piece, entry, whole(entry.shape), out)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("place", [0, 100, 239])
def test_a_changed_byte_is_found(stored, order, place):
    folder, manifest = stored
    path = folder / "sub" / "b"
    text = bytearray(path.read_bytes())
    text[place] ^= 4
    path.write_bytes(text)
    with raises(DamagedError, str(path), "another checksum", "use another checkpoint"):
        read_all(folder, manifest, np.empty((6, 10), order=order))
    with FileReader(folder, manifest) as reader, raises(DamagedError, str(path)):
        reader.check(manifest.arrays["w"].pieces[1], manifest.arrays["w"])


def test_a_file_of_another_size_is_refused(stored):
    folder, manifest = stored
    path = folder / "sub" / "b"
    for text in (path.read_bytes()[:-1], path.read_bytes() + b"x", b""):
        path.write_bytes(text)
        with raises(DamagedError, str(path), f"has {len(text)} bytes", "written with 240"):
            read_all(folder, manifest)


def test_what_is_no_file_is_refused(stored):
    folder, manifest = stored
    path = folder / "sub" / "b"
    path.unlink()
    with raises(DamagedError, str(path), "is missing"):
        read_all(folder, manifest)
    os.mkfifo(path)
    with raises(DamagedError, str(path), "has 0 bytes"):
        read_all(folder, manifest)
    path.unlink()
    path.mkdir()
    with raises(DamagedError, str(path)):
        read_all(folder, manifest)
    path.rmdir()
    path.symlink_to(path)
    with raises(StoreError, str(path), "cannot read"):
        read_all(folder, manifest)


def test_a_file_that_is_cut_off_while_it_is_open(stored):
    folder, manifest = stored
    entry = manifest.arrays["w"]
    with FileReader(folder, manifest) as reader:
        reader.check(entry.pieces[0], entry)
        os.truncate(folder / "a", 100)
        with raises(DamagedError, str(folder / "a"), "100 bytes", "cut off"):
            reader.read(entry.pieces[0], entry, whole(entry.shape), np.empty(entry.shape))


def test_a_file_that_a_network_shows_late(stored):
    folder, manifest = stored
    path, late = folder / "a", folder / "late"
    path.rename(late)
    with raises(DamagedError, "is missing"):
        read_all(folder, manifest, wait_s=0.1)
    timer = threading.Timer(0.3, late.rename, [path])
    timer.start()
    read_all(folder, manifest, wait_s=30)
    timer.join()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_files_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_MOST_OPEN", 2)
    names = [f"f{number}" for number in range(5)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([number]))
    entry = ArrayEntry(
        (5,), np.dtype("u1"), tuple(Piece(n, ((n, n + 1),), 0, None) for n in range(5))
    )
    manifest = Manifest({"w": entry}, {}, None, tuple((name, 1) for name in names))
    before = open_files()
    out = np.empty(5, np.uint8)
    with FileReader(tmp_path, manifest) as reader:
        for piece in entry.pieces * 2:
            reader.read(piece, entry, whole((5,)), out)
        assert open_files() == before + 2
    assert open_files() == before
    assert out.tolist() == list(range(5))
