"""A .npy file that grows, and is there only when it is whole."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from mpimesh.errors import SentencesError
from mpimesh.models.vectors_file import VectorsFile
from tests.helpers.raises import raises


@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 0, 4], [100, 27]])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_numpy_reads_what_was_appended(tmp_path, sizes, dtype):
    path = tmp_path / "v.npy"
    parts = [np.random.default_rng(n).normal(size=(n, 5)).astype(dtype) for n in sizes]
    with VectorsFile(path, 5, np.dtype(dtype)) as file:
        for part in parts:
            file.append(part)
        assert not path.exists()
        file.finish()
    found = np.load(path, mmap_mode="r")
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.concatenate([np.zeros((0, 5), dtype), *parts]))
    assert [one.name for one in tmp_path.iterdir()] == ["v.npy"]


def test_what_is_not_finished_leaves_what_was_there(tmp_path):
    path = tmp_path / "v.npy"
    path.write_bytes(b"before")
    with VectorsFile(path, 5, np.dtype("f4")) as file:
        file.append(np.ones((2, 5), np.float32))
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_link_leads_to_is_replaced(tmp_path):
    link, path = tmp_path / "link.npy", tmp_path / "v.npy"
    link.symlink_to(path)
    with VectorsFile(link, 1, np.dtype("f4")) as file:
        file.finish()
    assert link.is_symlink()
    assert np.load(path).shape == (0, 1)


def test_a_link_under_the_unfinished_name_is_not_followed(tmp_path):
    path, other = tmp_path / "v.npy", tmp_path / "other"
    other.write_bytes(b"other")
    (tmp_path / f"v.npy.{os.getpid()}.part").symlink_to(other)
    with VectorsFile(path, 1, np.dtype("f4")) as file:
        file.append(np.ones((2, 1), np.float32))
        file.finish()
    assert other.read_bytes() == b"other"
    assert np.load(path).shape == (2, 1)
    assert not path.is_symlink()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (".", ("folder",)),
        ("none/v.npy", ("no folder", "none")),
        ("v.txt", ("v.txt", ".npy")),
        ("/dev/null", ("/dev/null", "ordinary file")),
        ("/proc/v.npy", ("/proc/v.npy", "No such file")),
        ("x" * 300, ("File name too long",)),
        ("a\0b", ("null",)),
    ],
)
def test_where_nothing_can_be_written_it_is_said_at_once(tmp_path, name, values):
    with raises(SentencesError, *values):
        VectorsFile(tmp_path / name, 5, np.dtype("f4"))
    assert Path("/dev/null").is_char_device()


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path):
    """A limit on the size of files stands for it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with VectorsFile(tmp_path / "v.npy", 1 << 10, np.dtype("f4")) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with raises(SentencesError, tmp_path / "v.npy", "File too large"):
                file.append(np.zeros((1 << 6, 1 << 10), np.float32))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_after_its_end_it_says_so(tmp_path):
    file = VectorsFile(tmp_path / "v.npy", 5, np.dtype("f4"))
    file.close()
    file.close()
    with raises(SentencesError, tmp_path / "v.npy", "closed"):
        file.append(np.zeros((1, 5), np.float32))
