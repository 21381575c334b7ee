from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError
from mpimesh.mesh import MAX_RANKS, Mesh
from tests.helpers.raises import raises

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: name not in ("unsharded", "match", "world")
)


@given(
    st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(["", " "])
)
def test_text_mapping_and_pairs_are_the_same(sizes, space):
    mesh = Mesh(sizes)
    text = f"{space},{space}".join(f"{name}{space}={space}{size}" for name, size in sizes.items())
    assert Mesh(text) == mesh == Mesh(list(sizes.items())) == Mesh(mesh.dims)
    assert mesh.dims_text == text.replace(" ", "")
    numpy_sizes: Any = ((name, np.int32(size)) for name, size in sizes.items())
    assert Mesh(numpy_sizes) == mesh


@pytest.mark.parametrize(
    ("dims", "values"),
    [
        ("", ("'dp=2,pp=2'", "''")),
        ("dp", ("'dp=2,pp=2'", "'dp'")),
        ("dp=2,", ("'dp=2,pp=2'", "'dp=2,'")),
        ("dp=two", ("'dp=2,pp=2'", "'dp=two'")),
        ("dp=2.0", ("'dp=2,pp=2'", "'dp=2.0'")),
        ("dp=²", ("'dp=2,pp=2'", "'dp=²'")),
        ("dp=0", ("size", "'dp'", 0)),
        ("dp=-2", ("size", "'dp'", -2)),
        ("dp=2,dp=3", ("repeated", "'dp'", "dp=2,dp=3")),
        ("2d=2", ("name", "'2d'")),
        ("d-p=2", ("name", "'d-p'")),
        ("=2", ("name", "''")),
        ("d" * 101 + "=2", ("name", "at most 100 characters", 101)),
        ("unsharded=2", ("reserved", "'unsharded'")),
        ("match=2", ("reserved", "'match'")),
        ("world=2", ("reserved", "'world'")),
        ("a=-1,b=-1", ("size -1", "a=-1,b=-1")),
        ("a=-1", ("size -1", "a=-1", "world_size")),
        ("a=65536,b=65536", (MAX_RANKS, "a=65536,b=65536")),
        ({"dp": True}, ("size", "'dp'", True)),
        ({"dp": 2.0}, ("size", "'dp'", 2.0)),
        ({"dp": "2"}, ("size", "'dp'", "'2'")),
        ({3: 2}, ("name", 3)),
        ([("dp",)], ("(name, size)", [("dp",)])),
        (4, ("(name, size)", 4)),
    ],
)
def test_dims_that_break_a_rule(dims, values):
    with raises(MeshError, *values):
        Mesh(dims)
