"""The environment of an MPI job: variables, the cache, and the UCX that is loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from mpimesh.comm.mpi_environment import (
    Ucx,
    cache_folder,
    cache_problem,
    clean_environment,
    loaded_ucx,
    tuning,
)


def test_a_child_knows_nothing_of_the_job_and_all_of_the_person():
    person = {"HOME": "/h", "UCX_TLS": "all", "OMPI_MCA_pml": "ucx", "LD_LIBRARY_PATH": "/l"}
    job = {
        "PMI_RANK": "1",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_MCA_initial_wdir": "/w",
        "PRTE_LAUNCHED": "1",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n0",
        "MPI_LOCALRANKID": "1",
        "HYDI_CONTROL_FD": "5",
    }
    clean = clean_environment(person | job)
    assert {name: clean.get(name) for name in person} == person
    assert not clean.keys() & job.keys()
    assert (Path(clean["PYTHONPATH"]) / "mpimesh").is_dir()
    assert tuning(person | job) == ["LD_LIBRARY_PATH=/l", "OMPI_MCA_pml=ucx", "UCX_TLS=all"]


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("/var/cache", Path("/var/cache/mpimesh")),
        ("", Path.home() / ".cache/mpimesh"),
        ("relative", Path.home() / ".cache/mpimesh"),
    ],
)
def test_the_cache_is_where_the_system_keeps_such_files(given, folder):
    assert cache_folder({"XDG_CACHE_HOME": given}) == folder
    assert cache_folder({}) == Path.home() / ".cache/mpimesh"


def test_whether_anything_can_be_kept(tmp_path):
    assert cache_problem(tmp_path / "new" / "mpimesh") == ""
    assert not list((tmp_path / "new" / "mpimesh").iterdir())
    file = tmp_path / "file"
    file.touch()
    assert re.search("file.* cannot be written: .*directory", cache_problem(file / "mpimesh"))


# -- UCX -----------------------------------------------------------------------------------


class Library:
    """Stands in for what ctypes makes of a libucp."""

    class Function:
        restype = None

        def __call__(self):
            return b"1.22.0"

    def __init__(self, path):
        if "broken" in path:
            raise OSError(path)
        self.ucp_get_version_string = Library.Function()


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Return what is found where `names` are mapped, beside `modules` that are not."""
    monkeypatch.setattr(ctypes, "CDLL", Library)
    folder = tmp_path / "a folder"
    (folder / "ucx").mkdir(parents=True)

    def find(*names: str, modules: tuple[str, ...] = ()) -> Ucx:
        for module in modules:
            (folder / "ucx" / module).write_text("")
        maps = tmp_path / "maps"
        lines = [f"7f0{i}-7f1{i} r--p 00000000 08:01 5  {name}" for i, name in enumerate(names)]
        maps.write_text(
            "\n".join(["7f00-7f01 rw-p 00000000 00:00 0", *lines]).replace("@", str(folder))
        )
        return loaded_ucx(maps)

    find.folder = folder  # type: ignore[attr-defined]
    return find


def test_its_version_and_its_place(mapped):
    found = mapped("@/libucs.so.0", "@/libucp.so.0", "/usr/lib/libm.so.6")
    assert found == Ucx("1.22.0", str(mapped.folder / "libucp.so.0"))
    assert str(found) == "1.22.0, no CUDA transports"


def test_whether_it_has_cuda_and_whether_that_is_loaded(mapped):
    beside = mapped("@/libucp.so.0", modules=("libuct_cuda.so.0", "libuct_cma.so.0"))
    assert (beside.cuda, str(beside)) == ("not loaded", "1.22.0, CUDA transports not loaded")
    loaded = mapped("@/libucp.so.0", "@/ucx/libuct_cuda.so.0")
    assert (loaded.cuda, str(loaded)) == ("loaded", "1.22.0, CUDA transports loaded")


def test_other_modules_are_not_cuda(mapped):
    assert mapped("@/libucp.so.0", modules=("libuct_cma.so.0", "libucm_cuda.so.0")).cuda == ""


@pytest.mark.parametrize("names", [(), ("/usr/lib/libmpi.so.40",), ("/broken/libucp.so.0",)])
def test_a_process_without_one(names, mapped):
    assert mapped(*names) == Ucx()
    assert str(Ucx()) == ""
