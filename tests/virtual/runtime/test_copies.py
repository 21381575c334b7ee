"""Objects of this process's part of a job are neither copied nor pickled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import GroupError, MeshError, UnresolvedError

WAYS: dict[str, Any] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_a_group_and_a_handle_refuse_to_be_copied(way):
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.group("dp")
            handle = group.all_reduce(np.ones(2))
            for thing, kind, cure in (
                (mesh, MeshError, "mesh.copy()"),
                (group, GroupError, "mesh.group(name)"),
                (handle, UnresolvedError, "resolve()"),
            ):
                for holder in (thing, [thing]):
                    if holder is thing or way != "copy":
                        with pytest.raises(kind) as caught:
                            WAYS[way](holder)
                        assert cure in str(caught.value)
            assert handle.resolve()[0] == 2

    mm.run_virtual(2, main)


def test_the_value_of_a_mesh_can_be_pickled():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            return pickle.loads(pickle.dumps(mesh.mesh)) == mesh.mesh == copy.deepcopy(mesh.mesh)

    assert mm.run_virtual(2, main) == [True, True]
