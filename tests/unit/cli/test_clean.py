"""Files of aborted MPI jobs: found only where nobody uses them."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

import mpimesh.cli.doctor as cli_doctor
from mpimesh.cli import app
from mpimesh.cli.facts import Leftover, find_leftovers, remove
from tests.helpers.depth import examples


@pytest.fixture
def shm(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    (folder / "41" / "fd").mkdir(parents=True)
    (folder / "self").mkdir()
    return folder


UID = os.geteuid()
HOUR_S = 3600.0


def file(shm: Path, name: str) -> Path:
    path = shm / name
    path.touch(0o600)
    path.write_bytes(bytes(8192))
    return path


def listed(shm: Path, proc: Path, after_s: float = HOUR_S) -> tuple[Leftover, ...]:
    # The files are made now, and seen from an hour later.
    return find_leftovers(shm, proc, now_s=shm.stat().st_mtime + after_s)


def found(shm: Path, proc: Path) -> list[str]:
    return [Path(one.path).name for one in listed(shm, proc) if not one.doubt]


def doubts(shm: Path, proc: Path, after_s: float = HOUR_S) -> dict[str, str]:
    return {Path(one.path).name: one.doubt for one in listed(shm, proc, after_s) if one.doubt}


MPI_NAMES = [
    "mpich_shm_12ab_0",
    "mpich_vci_12ab_0",
    f"sm_segment.node-1.{UID}.2f0000.0",
    "vader_segment.vm.2f0000.1",
    f"vader_segment.vm.{UID}.2f0000.1",
    "psm_shm.41e04667-f3ba-e503-8464-db6c209b3430",
    f"psm2_shm.{UID}00000000000203020",
    f"psm3_shm.{UID}.1a:2b:3.0",
]


@pytest.mark.parametrize("name", MPI_NAMES)
def test_a_file_of_an_mpi_is_found(name, shm, proc):
    file(shm, name)
    assert found(shm, proc) == [name]


@pytest.mark.parametrize("name", ["sem.mine", "mpich", "pulse-shm-1", "nccl-1", "psm_x"])
def test_any_other_file_is_not(name, shm, proc):
    file(shm, name)
    assert listed(shm, proc) == ()


@pytest.mark.parametrize(
    "name",
    ["mpich_shm_results", "mpich_shm_12ab_0.bak", "sm_segment.vm.4711.2f.0", "psm2_shm.12"],
)
def test_a_name_that_mpi_does_not_write_is_left(name, shm, proc):
    file(shm, name)
    assert "name" in doubts(shm, proc)[name]


def test_a_file_that_others_may_read_is_left(shm, proc):
    file(shm, "mpich_shm_a_0").chmod(0o644)
    (shm / "mine").hardlink_to(file(shm, "mpich_shm_b_0"))
    told = doubts(shm, proc)
    assert "644" in told["mpich_shm_a_0"]
    assert told["mpich_shm_b_0"].endswith("2")


def test_a_file_that_a_process_maps_is_in_use(shm, proc):
    used, unused = file(shm, "mpich_shm_a_0"), file(shm, "mpich_shm_b_0")
    (proc / "41" / "maps").write_text(
        "55d0-55d1 r--p 00000000 00:01 7  /usr/bin/python\n"
        "7f00-7f01 rw-p 00000000 00:00 0\n"
        f"7f02-7f03 rw-s 00000000 00:17 9                          {used}\n"
    )
    assert found(shm, proc) == [unused.name]


def test_a_file_that_is_mapped_under_another_name_is_in_use(shm, proc):
    facts = file(shm, "mpich_shm_a_0").stat()
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    maps = f"7f02-7f03 rw-s 00000000 {device} {facts.st_ino}  /host/shm/a\n"
    (proc / "41" / "maps").write_text(maps)
    assert "41" in doubts(shm, proc)["mpich_shm_a_0"]


def test_a_file_that_a_process_has_open_is_in_use(shm, proc):
    (proc / "41" / "maps").touch()
    (proc / "41" / "fd" / "3").symlink_to(file(shm, "mpich_shm_a_0"))
    assert "41" in doubts(shm, proc)["mpich_shm_a_0"]


@pytest.mark.parametrize(
    ("owner", "shared", "may_use"), [(UID, 4, 1), (UID, 0, 0), (UID + 1, 4, 0)]
)
def test_a_process_that_may_not_be_looked_at(owner, shared, may_use, shm, proc, monkeypatch):
    file(shm, "mpich_shm_a_0")
    status = f"Name:\tssh\nUid:\t{owner}\t{owner}\nRssShmem:\t    {shared} kB\n"
    (proc / "41" / "status").write_text(status)

    def refused(path: Path, **options: Any) -> str:
        if path.name == "maps":
            raise PermissionError
        return READ(path, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    # Another user's cannot have a file of mode 600 open.
    assert len(found(shm, proc)) == 1 - may_use


READ = Path.read_text


def test_a_young_file_may_be_about_to_be_used(shm, proc):
    file(shm, "mpich_shm_a_0")
    assert "minute" in doubts(shm, proc, after_s=1)["mpich_shm_a_0"]


def test_a_file_of_another_user_is_left_alone(shm, proc, monkeypatch):
    file(shm, "mpich_shm_a_0")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert listed(shm, proc) == ()


def test_a_link_is_left_alone(shm, proc, tmp_path):
    (shm / "mpich_shm_a_0").symlink_to(file(tmp_path, "precious"))
    (shm / "mpich_shm_b_0").mkdir(0o600)
    assert "ordinary" in doubts(shm, proc)["mpich_shm_a_0"]
    assert "ordinary" in doubts(shm, proc)["mpich_shm_b_0"]


def test_removing_tells_what_it_did(shm, proc):
    file(shm, "mpich_shm_a_0")
    leftovers = listed(shm, proc)
    gone = Leftover(str(shm / "mpich_shm_gone"), 1)
    assert [one.nbytes for one in leftovers] == [8192]
    assert remove([*leftovers, gone]) == leftovers
    assert [*shm.iterdir()] == []


def test_another_file_that_has_come_to_its_place_stays(shm, proc):
    file(shm, "mpich_shm_a_0")
    leftovers = listed(shm, proc)
    file(shm, "other").rename(shm / "mpich_shm_a_0")
    assert remove(leftovers) == ()
    assert len([*shm.iterdir()]) == 1


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_nothing_goes_but_what_mpi_has_written(seed):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        shm, proc = Path(name, "shm"), Path(name, "proc")
        shm.mkdir()
        (proc / "41" / "fd").mkdir(parents=True)
        (proc / "41" / "maps").touch()
        stay = set()
        for number in range(draw.randrange(1, 12)):
            name = draw.choice(MPI_NAMES).removesuffix("0").removesuffix("1") + str(number)
            if "psm_shm" in name:
                name = f"psm_shm.41e04667-f3ba-e503-8464-db6c209b{number:04}"
            kind = draw.choice(["dead", "dead", "name", "link", "folder", "mode", "open", "owner"])
            if kind == "name":
                name += draw.choice([".h5", " ", "~", "_", "\n", "x"])
            if kind == "link":
                (shm / name).symlink_to(file(proc, f"target{number}"))
            elif kind == "folder":
                (shm / name).mkdir()
            else:
                path = file(shm, name)
                if kind == "mode":
                    path.chmod(draw.choice([0o644, 0o640, 0o700, 0o400]))
                elif kind == "open":
                    (proc / "41" / "fd" / str(number)).symlink_to(path)
                elif kind == "owner" and UID == 0:
                    os.chown(path, 4711, -1)
            if kind != "dead" and not (kind == "owner" and UID):
                stay.add(name)
        remove(listed(shm, proc))
        assert {one.name for one in shm.iterdir()} == stay


def test_a_folder_that_is_not_there_has_none(tmp_path, proc):
    assert find_leftovers(tmp_path / "none", proc) == ()


# -- doctor --clean ---------------------------------------------------------------------


@pytest.fixture
def doctor(shm, proc, monkeypatch):
    """Call ``doctor --clean`` with more arguments on the folders of this test."""
    hour_s = shm.stat().st_mtime + 3600
    monkeypatch.setattr(
        cli_doctor, "find_leftovers", lambda: find_leftovers(shm, proc, now_s=hour_s)
    )

    def call(*arguments: str, **variables: str) -> Any:
        return CliRunner().invoke(app, ["doctor", "--clean", *arguments], env=variables)

    return call


def test_clean_removes_and_tells(shm, doctor):
    path = file(shm, "mpich_shm_a_0")
    dry = doctor("--dry-run")
    assert dry.output == f"{path} 8 KiB\nwould remove 1 files, 8 KiB\n"
    assert path.exists()
    assert doctor("--json", "--dry-run").output.startswith('{\n "removed": false')
    told = json.loads(doctor("--json").output)
    assert told == {"removed": True, "bytes": 8192, "files": [str(path)], "left": {}}
    assert not path.exists()
    assert doctor().output == "removed 0 files, 0 B\n"


def test_clean_tells_what_is_in_doubt(shm, doctor):
    path = file(shm, "mpich_shm_results")
    assert doctor().output.startswith(f"{path} left: ")
    told = json.loads(doctor("--json").output)
    assert (told["files"], [*told["left"]]) == ([], [str(path)])
    assert path.exists()


def test_one_rank_of_a_node_cleans(shm, doctor):
    path = file(shm, "mpich_shm_a_0")
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURMD_NODENAME": "n1"}
    assert doctor(SLURM_LOCALID="1", **step).output == ""
    assert path.exists()
    assert doctor(SLURM_LOCALID="0", **step).output.endswith("n1: removed 1 files, 8 KiB\n")
