from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpimesh.errors import MeshError
from mpimesh.mesh import MAX_RANKS, Mesh

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: name not in ("unsharded", "match", "world")
)


@given(
    st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(["", " "])
)
def test_text_mapping_and_pairs_are_the_same(sizes, space):
    mesh = Mesh(sizes)
    text = f"{space},{space}".join(f"{name}{space}={space}{size}" for name, size in sizes.items())
    assert Mesh.parse(text) == mesh == Mesh(list(sizes.items())) == Mesh(mesh.dims)
    assert mesh.dims_text == text.replace(" ", "")
    numpy_sizes: Any = ((name, np.int32(size)) for name, size in sizes.items())
    assert Mesh(numpy_sizes) == mesh


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("", "written 'dp=2,pp=2', got ''"),
        ("dp", "written 'dp=2,pp=2', got 'dp' in 'dp'"),
        ("dp=2,", "got '' in 'dp=2,'"),
        ("dp=two", "got 'dp=two'"),
        ("dp=2.0", "got 'dp=2.0'"),
        ("dp=²", "got 'dp=²'"),
        ("dp=0", "'dp' must have a size of at least 1, got 0"),
        ("dp=-2", "'dp' must have a size of at least 1, got -2"),
        ("dp=2,dp=3", "repeated mesh dimension 'dp' in dp=2,dp=3"),
        ("2d=2", "must be letters, digits and '_'"),
        ("d-p=2", "must be letters, digits and '_'"),
        ("=2", "must be letters, digits and '_'"),
        ("unsharded=2", "'unsharded' is reserved: it says in a layout"),
        ("match=2", "'match' is reserved"),
        ("world=2", "'world' is reserved: it names the group of all ranks"),
        ("a=-1,b=-1", "only one mesh dim may have the size -1"),
        ("a=-1", "give world_size="),
        ("a=65536,b=65536", f"more than {MAX_RANKS} ranks"),
        ({"dp": True}, "size of mesh dim 'dp' must be a whole number, got True"),
        ({"dp": 2.0}, "size of mesh dim 'dp' must be a whole number, got 2.0"),
        ({"dp": "2"}, "size of mesh dim 'dp' must be a whole number, got '2'"),
        ({3: 2}, "must be letters, digits and '_'.* got 3"),
        ([("dp",)], r"mapping or \(name, size\) pairs"),
        (4, r"mapping or \(name, size\) pairs"),
    ],
)
def test_dims_that_break_a_rule(dims, message):
    with pytest.raises(MeshError, match=message):
        Mesh(dims)
