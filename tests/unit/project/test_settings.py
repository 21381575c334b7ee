"""Settings of the environment, refusals of wrong ones, and a warning of what is none."""

from __future__ import annotations

import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, SettingsError
from mpimesh.runtime import mesh_core
from mpimesh.settings import Settings, unknown_variables
from tests.helpers.raises import names, raises


def test_nothing_set_is_the_defaults():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


def test_each_variable_reaches_its_field():
    environment = {
        "MPIMESH_CHECKS": "2",
        "MPIMESH_TIMEOUT_S": "1.5",
        "MPIMESH_RECORD_DIR": "/tmp/records",
        "MPIMESH_CUDA_AWARE": "no",
        "MPIMESH_NODE_SHARED": "always",
    }
    read = Settings.from_environment(environment)
    assert read == Settings(2, 1.5, "/tmp/records", "no", "always")


@pytest.mark.parametrize(
    ("variable", "text", "values"),
    [
        ("MPIMESH_CHECKS", "3", ("0, 1, 2", "'3'")),
        ("MPIMESH_CHECKS", "1.5", ("0, 1, 2", "'1.5'")),
        ("MPIMESH_TIMEOUT_S", "-1", ("negative", "'-1'")),
        ("MPIMESH_TIMEOUT_S", "nan", ("negative", "'nan'")),
        ("MPIMESH_TIMEOUT_S", "1e-9", ("0.1", "'1e-9'")),
        ("MPIMESH_TIMEOUT_S", "soon", ("seconds", "'soon'")),
        ("MPIMESH_CUDA_AWARE", "1", ("auto, yes, no", "'1'")),
        ("MPIMESH_NODE_SHARED", "", ("auto, always, never", "''")),
    ],
)
def test_what_cannot_be_is_refused_by_name(variable, text, values):
    with raises(SettingsError, variable, *values):
        Settings.from_environment({variable: text})


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("MPIMESH_CUDAAWARE", "MPIMESH_CUDA_AWARE"),
        ("MPIMESH_TIMEOUT", "MPIMESH_TIMEOUT_S"),
        ("MPIMESH_checks", "MPIMESH_CHECKS"),
        ("MPIMESH_", "MPIMESH_CHECKS"),
    ],
)
def test_what_is_no_setting_is_told_with_the_nearest(variable, near):
    (text,) = unknown_variables({"PATH": "/bin", "MPIMESH_BUILD_ZIG": "1", variable: "1"})
    names(text, variable, near, "ignored")
    assert Settings.from_environment({variable: "1"}) == Settings()


def test_the_first_rank_warns_of_what_is_no_setting_once_in_a_process(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHEKCS", "1")
    monkeypatch.setattr(mesh_core, "_WARNED", set())

    def two_meshes():
        for _ in range(2):
            mm.DeviceMesh("x=-1").close()

    with pytest.warns(RuntimeWarning, match=r"MPIMESH_CHEKCS .* MPIMESH_CHECKS") as caught:
        mm.run_virtual(3, two_meshes)
    assert [one.filename for one in caught] == [__file__]


def test_all_ranks_raise_a_warning_that_is_an_error(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHEKCS", "1")
    monkeypatch.setattr(mesh_core, "_WARNED", set())

    def main():
        with raises(MismatchError, "MPIMESH_CHEKCS", "RuntimeWarning"):
            mm.DeviceMesh("x=-1")

    mm.run_virtual(3, main)
