"""TensorFlow DTensor's checkpoints, data set of split batches, and heartbeat.

By a heartbeat ranks see each other. TensorFlow beats in a thread. Here the program beats, where all
its ranks come by anyway: a rank that hangs in its own code is missed, too, and there is no second
order of messages beside the program's.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items, as_time, check_kind, rank_names, shown
from mpimesh.arrays import HostArray
from mpimesh.data import Batches, UnreadRows
from mpimesh.dtensor import DTensor, DVariable
from mpimesh.errors import (
    CollectiveTimeoutError,
    DTypeError,
    GroupError,
    LayoutError,
    MeshError,
    MismatchError,
    ModuleError,
    PeerLostError,
    ShapeError,
    StoreError,
    on_all_ranks,
)
from mpimesh.layout import Layout, Shard
from mpimesh.parallel.microbatch import Tree, tree_map
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.agreement import agree_alike
from mpimesh.runtime.tracebacks import write_error
from mpimesh.runtime.watchdog import EXIT_CODE
from mpimesh.store import load, save

__all__ = [
    "DTensorCheckpoint",
    "DTensorDataset",
    "Heartbeat",
    "enable_save_as_bf16",
    "heartbeat_enabled",
    "name_based_restore",
    "name_based_save",
    "sharded_save",
]

_SPEAKERS = 2
"""Ranks from this one on are silent about the first strikes: of the others one is there."""


def heartbeat_enabled() -> bool:
    """Tell whether ``DTENSOR_ENABLE_HEARTBEAT`` is unset, ``true`` or ``1``. Local."""
    return os.environ.get("DTENSOR_ENABLE_HEARTBEAT", "true").lower() in ("true", "1")


class Heartbeat:
    """A check of liveness, for a program whose ranks might hang or be stopped without an end.

    Making it is collective over the mesh. What the variable of :func:`heartbeat_enabled` says on
    the first rank holds for all: if it is off, beats do nothing.

    Args:
        mesh: Whose ranks beat.
        timeout_s: Longest wait for the others until a strike.
        strikes: At so many in a row the rank raises.

    Raises:
        MeshError: If `mesh` is no mesh.
        GroupError: If `timeout_s` or `strikes` will not do.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     heartbeat = mm.compat.tensorflow.Heartbeat(mesh, timeout_s=20.0)
        ...     for step in range(3):
        ...         heartbeat.beat()
        ...     heartbeat.beats
        3
    """

    def __init__(self, mesh: DeviceMesh, *, timeout_s: float = 20.0, strikes: int = 3) -> None:
        check_kind(mesh, DeviceMesh, "mesh", MeshError, wanted="a DeviceMesh")
        limit_s = as_time(timeout_s, "timeout_s", GroupError)
        if not limit_s:
            raise GroupError(
                f"timeout_s must be a number of seconds above 0, got {shown(timeout_s)}"
            )
        self.beats = 0
        self._limit_s = limit_s
        self._strikes = as_int(strikes, "strikes", GroupError, least=1)
        self._group = mesh.group()
        token = 1 + secrets.randbelow(2**16 - 1) if heartbeat_enabled() else 0
        self._token = int(self._group.broadcast(np.array([token])).resolve()[0])

    @property
    def enabled(self) -> bool:
        """True if beats are exchanged: the same on all ranks."""
        return self._token != 0

    def beat(self) -> None:
        """Wait for all ranks of the mesh, each of which shows the token of this job. Collective.

        After `timeout_s` without one of them it is a strike, which the first ranks write to stderr;
        at the last strike the rank raises. If nobody catches that, it ends the job, with exit code
        124 where the launcher hands it on.

        Raises:
            PeerLostError: At the last strike, naming the ranks that have not come.
            MismatchError: On every rank, naming ranks that have shown another token.

        Cost:
            An all-reduce of 8 bytes for each rank, and the messages of a barrier with a limit.
        """
        if not self.enabled:
            return
        group = self._group
        signal = np.zeros(group.size, np.int64)
        signal[group.rank] = self._token
        # Started before the wait: a rank that comes late finds all others in it.
        received = self._wait(group.all_reduce(signal, label="heartbeat"))
        wrong = np.flatnonzero(received != self._token).tolist()
        if wrong:
            raise on_all_ranks(
                MismatchError(
                    f"heartbeat {self.beats} of group {group.name!r}: {rank_names(wrong)} did not "
                    f"show the token {self._token} but {received[wrong[:4]].tolist()}: memory or "
                    "messages are damaged; start the job anew"
                )
            )
        self.beats += 1

    def _wait(self, shown_tokens: CollectiveTensor) -> HostArray:
        group, missing, text = self._group, "", ""
        for strike in range(1, self._strikes + 1):
            try:
                if strike == 1:  # it names who is missing
                    group.barrier(timeout_s=self._limit_s, label="heartbeat")
                tokens: HostArray = shown_tokens.resolve(self._limit_s)
                return tokens
            except CollectiveTimeoutError as error:
                missing = missing or str(error)
                text = f"heartbeat {self.beats}, strike {strike} of {self._strikes}: {missing}"
                if group.world_rank in group.ranks[:_SPEAKERS] and strike < self._strikes:
                    write_error(group.world_rank, f"mpimesh: {text}")
        lost = PeerLostError(
            f"{text}; after {self._strikes} strikes of {self._limit_s:g} s they count as lost, and "
            "this rank ends the job: look at what they do, or give a longer timeout_s"
        )
        lost.exit_code = EXIT_CODE
        raise lost


class DTensorDataset:
    """Batches of a data set as split arrays, of which each rank reads its own rows.

    Making it is collective over the mesh, and so is the first batch that a function reads;
    iterating is local otherwise, and begins at the first row each time. Rows come in order, and the
    last ones that are too few for a batch are left out, as in TensorFlow;
    :class:`mpimesh.data.Batches`, on which it is built, does otherwise, too.

    Args:
        dataset: What :class:`~mpimesh.data.Batches` reads: arrays, or a function with `rows`.
        mesh: The mesh of all layouts.
        layouts: A layout for each array of the data set, built as it is; with the axis of rows.
        global_batch_size: Rows of a batch, which the ranks along `batch_dim` must share evenly.
        dataset_already_batched: Must be False: the data set has rows.
        batch_dim: The dim along which rows are split; None if each rank has all.
        prefetch: Most batches that are read ahead; 1 if None.
        rows: Rows that a function can read.

    Raises:
        LayoutError: On every rank, if a layout is on another mesh, or splits rows otherwise.
        ModuleError: On every rank, if rows cannot be shared evenly, or an argument is wrong.
        MismatchError: On every rank, if batches or layouts differ, or only some have such an error.

    Example:
        >>> with mm.DeviceMesh("batch=-1") as mesh:
        ...     layout = mm.compat.tensorflow.Layout(["batch", "unsharded"], mesh)
        ...     data = mm.compat.tensorflow.DTensorDataset(
        ...         np.eye(8), mesh=mesh, layouts=layout, global_batch_size=4, batch_dim="batch")
        ...     [x.shape for x in data]
        [(4, 8), (4, 8)]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        mesh: DeviceMesh,
        layouts: Tree,
        global_batch_size: int,
        dataset_already_batched: bool = False,
        batch_dim: str | None = None,
        prefetch: int | None = None,
        rows: int | None = None,
    ) -> None:
        check_kind(mesh, DeviceMesh, "mesh", MeshError, wanted="a DeviceMesh")

        def checked() -> tuple[int, dict[str, Layout]]:
            if as_flag(dataset_already_batched, "dataset_already_batched", ModuleError):
                raise ModuleError(
                    "dataset_already_batched must be False: give the rows, not batches"
                )
            size = as_int(global_batch_size, "global_batch_size", ModuleError, least=1)
            shards = 1 if batch_dim is None else mesh.dim_size(batch_dim)
            if size % shards:
                raise ModuleError(
                    f"global_batch_size must be a multiple of the {shards} ranks along "
                    f"{batch_dim!r}, got {size}"
                )
            return size, {
                path: _row_layout(one, f"layouts{path}", mesh, batch_dim)
                for path, one in _by_path(layouts).items()
            }

        self._mesh = mesh
        size, self._layouts = agree_alike(mesh.group(), "DTensorDataset", checked)
        self._batches = Batches(
            dataset,
            mesh,
            size,
            rows=rows,
            shuffle=False,
            drop_last=True,
            dim=batch_dim,
            prefetch=1 if prefetch is None else prefetch,
        )

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Tree]:
        """Give the batches from the first on."""
        self._batches.load_state_dict({**self._batches.state_dict(), "position": 0})
        return map(self._placed, self._batches)

    def close(self) -> None:
        """End what reads ahead. Local, and may be called again."""
        self._batches.close()

    def _placed(self, batch: Tree) -> Tree:
        """Return the arrays of a batch in their layouts, of which this rank has all rows it needs.

        Raises:
            ModuleError: If the layouts are built otherwise than the batch.
        """
        paths = _by_path(batch).keys()
        if paths != self._layouts.keys():
            raise ModuleError(
                "layouts must have a layout in the place of each array of the data set, which has "
                f"{', '.join(f'dataset{path}' for path in paths)}, got "
                f"{', '.join(f'layouts{path}' for path in self._layouts)}"
            )

        def placed(leaf: Any, path: str) -> Any:
            if isinstance(leaf, UnreadRows):
                return leaf
            layout = self._layouts[path]
            _, *inner = layout.box(leaf.shape, self._mesh.rank)
            block = leaf.local[(slice(None), *(slice(*one) for one in inner))].copy()
            return DTensor(self._mesh, layout, leaf.shape, leaf.dtype, block)

        return tree_map(placed, batch)


def _by_path(tree: Tree) -> dict[str, Any]:
    """Return what a tree holds by where it stands."""
    found: dict[str, Any] = {}
    tree_map(lambda leaf, path: found.update({path: leaf}), tree)
    return found


def _row_layout(one: Any, path: str, mesh: DeviceMesh, batch_dim: str | None) -> Layout:
    """Return a layout if rows are split along `batch_dim` and nothing else.

    Raises:
        LayoutError: If it is none, or they are not.
    """
    if not hasattr(one, "placement"):
        raise LayoutError(f"{path} must be a Layout, got {shown(one)}")
    layout = Layout(mesh, one)
    by = [
        dim
        for dim, spec in zip(mesh.dim_names, layout.placement, strict=True)
        if isinstance(spec, Shard) and spec.axis == 0
    ]
    if by != ([] if batch_dim is None else [batch_dim]) or layout.partial_op:
        raise LayoutError(
            f"{path} must split axis 0, the rows, along batch_dim={batch_dim!r} and no other dim, "
            f"got {layout.text!r}"
        )
    return layout


# -- checkpoints ----------------------------------------------------------------------------------

Tensors: TypeAlias = Mapping[str, DTensor | DVariable]


def name_based_save(mesh: DeviceMesh, checkpoint_prefix: str, name_tensor_dict: Tensors) -> None:
    """Save split arrays and variables by name. Collective over the mesh.

    Each part is written once, by a rank that has it. A float32 variable with `save_as_bf16` is
    rounded. What comes of it is a folder for :func:`mpimesh.save` and :func:`mpimesh.load`, too.

    Args:
        mesh: The mesh of all of them.
        checkpoint_prefix: The path.
        name_tensor_dict: What to save.

    Raises:
        StoreError: On every rank, if something is no split array, or cannot be written.
        MeshError: On every rank, if something lies on another mesh.
        MismatchError: On every rank, if the ranks save different names.
    """
    tensors = _checked(mesh, "name_based_save", lambda: name_tensor_dict)
    save(checkpoint_prefix, tensors, mesh=mesh)


def sharded_save(
    mesh: DeviceMesh,
    file_prefix: str,
    tensor_names: Sequence[str],
    shape_and_slices: Sequence[str] | None,
    tensors: Sequence[DTensor | DVariable],
) -> None:
    """Save split arrays and variables, as :func:`name_based_save`. Collective over the mesh.

    Args:
        mesh: The mesh of all of them.
        file_prefix: The path.
        tensor_names: Their names.
        shape_and_slices: An empty text for each, or None: all of each is saved.
        tensors: What to save.

    Raises:
        StoreError: So, and if there are not as many names as arrays, or a name stands twice.
    """

    def paired() -> Tensors:
        names = as_items(tensor_names, "tensor_names", StoreError)
        arrays = as_items(tensors, "tensors", StoreError)
        slices = ("",) * len(names)
        if shape_and_slices is not None:
            slices = as_items(shape_and_slices, "shape_and_slices", StoreError)
        odd = any(not isinstance(one, str) or one for one in slices)
        if odd or not len(names) == len(slices) == len(arrays):
            raise StoreError(
                "sharded_save takes a name, an empty slice and an array for each, got "
                f"{len(names)} names, slices {shown(slices)} and {len(arrays)} arrays"
            )
        if any(not isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise StoreError(f"each name is a text and stands once, got {shown(names)}")
        return dict(zip(names, arrays, strict=True))

    save(file_prefix, _checked(mesh, "sharded_save", paired), mesh=mesh)


def name_based_restore(
    mesh: DeviceMesh, checkpoint_prefix: str, name_tensor_dict: Tensors
) -> dict[str, DTensor]:
    """Return saved arrays by name, as new ones in given layouts. Collective over the mesh.

    They may have been saved in any layout, on any number of ranks. What else was saved is not read.

    Args:
        mesh: The mesh.
        checkpoint_prefix: The path.
        name_tensor_dict: For each name an array or a variable of its shape, dtype and layout, whose
            values stay as they are: ``variable.assign(restored[name])`` takes them over.

    Raises:
        StoreError: On every rank, if a name is not in the checkpoint, or there is none.
        ShapeError: On every rank, if an array was saved with another shape.
        DTypeError: On every rank, if it was saved with another dtype; but a variable with
            `save_as_bf16` may have been saved as bfloat16.
    """
    wanted = _checked(mesh, "name_based_restore", lambda: name_tensor_dict)

    def layout(name: str, shape: tuple[int, ...], dtype: Any) -> Layout:
        one = wanted[name]
        if tuple(shape) != tuple(one.shape):
            raise ShapeError(f"{name!r} was saved with shape {shape}, and {one!r} has {one.shape}")
        rounded = isinstance(one, DVariable) and one.save_as_bf16 and dtype.name == "bfloat16"
        if dtype != one.dtype and not rounded:
            raise DTypeError(f"{name!r} was saved as {dtype}, and {one!r} is of {one.dtype}")
        return one.layout

    found: dict[str, DTensor] = load(
        checkpoint_prefix,
        mesh=mesh,
        layout=layout,
        rename=lambda name: name if name in wanted else None,
    )
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise StoreError(f"{checkpoint_prefix} has nothing of the names {missing}")
    return {name: found[name].astype(one.dtype, copy=False) for name, one in wanted.items()}


def enable_save_as_bf16(variables: Iterable[Any]) -> None:
    """Have float32 variables saved as bfloat16, and restored from it. Local, alike on all ranks.

    What is no :class:`~mpimesh.dtensor.DVariable` is passed over.

    Raises:
        DTypeError: If a variable is not of float32.
        StoreError: If these are no variables.
    """
    for one in as_items(variables, "variables", StoreError):
        if isinstance(one, DVariable):
            one.save_as_bf16 = True


class DTensorCheckpoint:
    """A tree that is saved again and again, each time under a number. Local to make.

    Args:
        mesh: The ranks that save it.
        root: A tree as :func:`mpimesh.save` takes it: a model, a dict of variables and others.
        **entries: More of it, by name.

    Attributes:
        save_counter: How often it was saved, also before what was restored.

    Example:
        >>> checkpoint = DTensorCheckpoint(mesh, model=model, optimizer=optimizer)
        >>> path = checkpoint.save("run/checkpoint")  # run/checkpoint-1
        >>> checkpoint.restore(path)
    """

    def __init__(self, mesh: DeviceMesh, root: Any = None, **entries: Any) -> None:
        check_kind(mesh, DeviceMesh, "mesh", MeshError, wanted="a DeviceMesh")
        self._mesh = mesh
        self._tree = {**entries, **({} if root is None else {"root": root})}
        self.save_counter = 0

    def save(self, file_prefix: str) -> str:
        """Save it as ``{file_prefix}-{number}``, and return that path. Collective.

        Raises:
            StoreError: As :func:`mpimesh.save`, on every rank.
        """
        path = f"{file_prefix}-{self.save_counter + 1}"
        save(path, {**self._tree, _COUNTER: self.save_counter + 1}, mesh=self._mesh)
        self.save_counter += 1
        return path

    def restore(self, save_path: str) -> dict[str, Any]:
        """Take over what was saved, in the layouts that arrays and variables have. Collective.

        All that is in the tree must have been saved, as TensorFlow's ``assert_consumed`` asks.

        Returns:
            The tree, which has the values of the checkpoint also where there is nothing to be
            written into, such as numbers.

        Raises:
            StoreError: As :func:`mpimesh.load`, on every rank.
        """
        tree: dict[str, Any] = load(save_path, {**self._tree, _COUNTER: 0}, mesh=self._mesh)
        self.save_counter = tree.pop(_COUNTER)
        self._tree = tree
        return tree


_COUNTER = "save_counter"


def _checked(
    mesh: DeviceMesh, caller: str, make: Callable[[], Tensors]
) -> dict[str, DTensor | DVariable]:
    """Return arrays and variables by name, if they are such, on the mesh, and alike on all ranks.

    Collective over the mesh.
    """
    check_kind(mesh, DeviceMesh, "mesh", MeshError, wanted="a DeviceMesh")

    def checked() -> dict[str, DTensor | DVariable]:
        tensors = make()
        if not isinstance(tensors, Mapping):
            raise StoreError(f"{caller} takes arrays by name, got {shown(tensors)}")
        for name, one in tensors.items():
            if not isinstance(name, str) or not isinstance(one, DTensor | DVariable):
                raise StoreError(
                    f"{caller} takes a DTensor or a DVariable for each name, got {shown(one)} for "
                    f"{name!r}: mm.distribute makes one of an array"
                )
            if one.mesh is not mesh:
                raise MeshError(
                    f"{caller}: {name!r} lies on mesh {one.mesh.dims_text}, and all are saved on "
                    f"{mesh.dims_text}"
                )
        return dict(tensors)

    return agree_alike(mesh.group(), caller, checked, ", ".join)
