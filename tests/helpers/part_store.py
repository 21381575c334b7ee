"""A checkpoint in memory, of objects that virtual ranks store by their parts: the simplest store.

It checks what the protocol asks for: each element is told, and alike where several ranks tell it;
values are such that JSON can say them; and no two ranks read into the same memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.layout.boxes import slices, volume
from mpimesh.optim import Optimizer
from mpimesh.store.modules import (
    module_parts,
    optimizer_parts,
    restored_module,
    restored_optimizer,
)
from mpimesh.store.parts import Parts, Saved


def names_of(model: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


class PartStore:
    """Whole arrays and values by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        self._told: dict[str, np.ndarray] = {}
        self._targets: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def save(self, mesh: mm.DeviceMesh, prefix: str, obj: Any, names: Any = None) -> None:
        """Collective over the mesh."""
        with self._lock:
            self._add(prefix, self.parts_of(obj, names))
        mesh.group().barrier()
        for name, told in self._told.items():
            assert told.all(), f"{name} has elements that no rank told"
        mesh.group().barrier()

    @staticmethod
    def parts_of(obj: Any, names: Any) -> Mapping[str, Any]:
        if isinstance(obj, Optimizer):
            return optimizer_parts(obj, names)
        return obj._stored_parts() if hasattr(obj, "_stored_parts") else module_parts(obj)

    def _add(self, prefix: str, parts: Mapping[str, Any]) -> None:
        for key, leaf in parts.items():
            name = f"{prefix}.{key}"
            if not isinstance(leaf, Parts):
                assert json.loads(json.dumps(leaf)) == (
                    list(leaf) if isinstance(leaf, tuple) else leaf
                )
                assert self.values.setdefault(name, leaf) == leaf, name
                continue
            whole = self.arrays.setdefault(name, np.zeros(leaf.shape, leaf.dtype))
            assert (whole.shape, whole.dtype) == (leaf.shape, leaf.dtype), name
            told = self._told.setdefault(name, np.zeros(leaf.shape, bool))
            for box, array in leaf.parts:
                assert volume(box), f"{name} has an empty box"
                at: Any = (*slices(box), ...)
                again = told[at]
                np.testing.assert_array_equal(whole[at][again], array[again], err_msg=name)
                whole[at] = array
                told[at] = True

    def under(self, prefix: str) -> dict[str, Any]:
        found = {name: Saved(a.shape, a.dtype) for name, a in self.arrays.items()} | self.values
        return {
            name.removeprefix(f"{prefix}."): entry
            for name, entry in found.items()
            if name.startswith(f"{prefix}.")
        }

    def load(
        self, mesh: mm.DeviceMesh, prefix: str, obj: Any, names: Any = None, *, strict: bool = True
    ) -> int:
        """Collective over the mesh. Returns the bytes that this rank has read."""
        saved = self.under(prefix)
        if isinstance(obj, Optimizer):
            wanted, finish = restored_optimizer(obj, names, saved, strict=strict)
        elif hasattr(obj, "_stored_parts"):
            wanted, finish = obj._restored_parts(saved, strict=strict)
        else:
            wanted, finish = restored_module(obj, saved, strict=strict)
        nbytes = 0
        mesh.group().barrier()
        for name, parts in wanted.items():
            whole = self.arrays[f"{prefix}.{name}"]
            assert parts.shape == whole.shape, name
            for box, array in parts.parts:
                nbytes += array.nbytes
                assert array.flags.c_contiguous
                start = array.__array_interface__["data"][0]
                with self._lock:
                    self._targets.append((start, start + array.nbytes, mesh.rank))
                at: Any = (*slices(box), ...)
                array[...] = whole[at]
        mesh.group().barrier()
        with self._lock:
            ordered = sorted(self._targets)
            for (_, stop, rank), (start, _, other) in pairwise(ordered):
                assert stop <= start, f"ranks {rank} and {other} read into the same memory"
        mesh.group().barrier()
        self._targets.clear()
        finish()
        return nbytes
