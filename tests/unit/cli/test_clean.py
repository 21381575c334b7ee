"""Files of aborted MPI jobs: found only where nobody uses them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mpimesh.cli.doctor as cli_doctor
from mpimesh.cli import app
from mpimesh.cli.facts import Leftover, find_leftovers, remove


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


def file(shm: Path, name: str) -> Path:
    path = shm / name
    path.write_bytes(bytes(8192))
    return path


def found(shm: Path, proc: Path, *, now_s: float | None = None) -> list[str]:
    # The files are made now, and seen from an hour later.
    now_s = shm.stat().st_mtime + 3600 if now_s is None else now_s
    return [Path(one.path).name for one in find_leftovers(shm, proc, now_s=now_s)]


@pytest.mark.parametrize(
    "name",
    ["mpich_shm_12ab_0", "sm_segment.vm.0.2f.0", "vader_segment.vm.1", "psm2_shm.12"],
)
def test_a_file_of_an_mpi_is_found(name, shm, proc):
    file(shm, name)
    assert found(shm, proc) == [name]


@pytest.mark.parametrize("name", ["sem.mine", "mpich", "pulse-shm-1", "nccl-1", "psm_x"])
def test_any_other_file_is_not(name, shm, proc):
    file(shm, name)
    assert found(shm, proc) == []


def test_a_file_that_a_process_maps_is_in_use(shm, proc):
    used, unused = file(shm, "mpich_shm_a_0"), file(shm, "mpich_shm_b_0")
    (proc / "41" / "maps").write_text(
        "55d0-55d1 r--p 00000000 00:01 7  /usr/bin/python\n"
        "7f00-7f01 rw-p 00000000 00:00 0\n"
        f"7f02-7f03 rw-s 00000000 00:17 9                          {used}\n"
    )
    assert found(shm, proc) == [unused.name]


def test_a_file_that_a_process_has_open_is_in_use(shm, proc):
    (proc / "41" / "fd" / "3").symlink_to(file(shm, "mpich_shm_a_0"))
    assert found(shm, proc) == []


def test_a_young_file_may_be_about_to_be_used(shm, proc):
    file(shm, "mpich_shm_a_0")
    assert found(shm, proc, now_s=shm.stat().st_mtime + 1) == []


def test_a_file_of_another_user_is_left_alone(shm, proc, monkeypatch):
    file(shm, "mpich_shm_a_0")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert found(shm, proc) == []


def test_a_link_is_left_alone(shm, proc, tmp_path):
    (shm / "mpich_shm_a_0").symlink_to(file(tmp_path, "precious"))
    assert found(shm, proc) == []


def test_removing_tells_what_it_did(shm, proc):
    file(shm, "mpich_shm_a_0")
    leftovers = find_leftovers(shm, proc, now_s=shm.stat().st_mtime + 3600)
    gone = Leftover(str(shm / "mpich_shm_gone"), 1)
    assert [one.nbytes for one in leftovers] == [8192]
    assert remove([*leftovers, gone]) == leftovers
    assert [*shm.iterdir()] == []


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
    assert told == {"removed": True, "bytes": 8192, "files": [str(path)]}
    assert not path.exists()
    assert doctor().output == "removed 0 files, 0 B\n"


def test_one_rank_of_a_node_cleans(shm, doctor):
    path = file(shm, "mpich_shm_a_0")
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURMD_NODENAME": "n1"}
    assert doctor(SLURM_LOCALID="1", **step).output == ""
    assert path.exists()
    assert doctor(SLURM_LOCALID="0", **step).output.endswith("n1: removed 1 files, 8 KiB\n")
