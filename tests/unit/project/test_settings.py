"""Settings of the environment, and refusals of wrong ones."""

from __future__ import annotations

import pytest

from mpimesh.errors import SettingsError
from mpimesh.settings import Settings
from tests.helpers.raises import raises


def test_nothing_set_is_the_defaults():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


def test_each_variable_reaches_its_field():
    given = {
        "MPIMESH_CHECKS": "2",
        "MPIMESH_TIMEOUT_S": "1.5",
        "MPIMESH_CUDA_AWARE": "no",
    }
    read = Settings.from_environment(given)
    assert (read.checks, read.timeout_s) == (2, 1.5)
    assert read.cuda_aware == "no"


@pytest.mark.parametrize(
    ("variable", "text", "values"),
    [
        ("MPIMESH_CHECKS", "3", ("0, 1 or 2", 3)),
        ("MPIMESH_CHECKS", "1.5", ("whole", "'1.5'")),
        ("MPIMESH_TIMEOUT_S", "-1", ("negative", "'-1'")),
        ("MPIMESH_TIMEOUT_S", "1e-9", ("0.1", "1e-09")),
        ("MPIMESH_TIMEOUT_S", "soon", ("seconds", "'soon'")),
        ("MPIMESH_CUDA_AWARE", "1", ("auto, yes, no", "'1'")),
        ("MPIMESH_CUDAAWARE", "yes", ("known", "MPIMESH_CUDA_AWARE")),
    ],
)
def test_what_cannot_be_is_refused_by_name(variable, text, values):
    with raises(SettingsError, variable, *values):
        Settings.from_environment({variable: text})
