"""`Checkpoints`: the checkpoints of a run in a folder, by the number of the step."""

from __future__ import annotations

import logging
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mpimesh.arguments import as_flag, as_int, shown
from mpimesh.errors import DamagedError, StoreError
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.store.drafts import clear_left, drop
from mpimesh.store.files import agreeing, as_folder, check_mesh
from mpimesh.store.format import MANIFEST, is_manifest, listed_files
from mpimesh.store.loading import Verify, load
from mpimesh.store.saving import FILE_BYTES, save, settle
from mpimesh.trace.log import log

__all__ = ["Checkpoints", "DamagedCheckpointWarning", "LeftCheckpointWarning", "steps_in"]

_NAME = re.compile(r"step-(\d{8,18})")
_MOST_STEP = 10**18 - 1


class DamagedCheckpointWarning(RuntimeWarning):
    """A checkpoint is damaged, and an older one is loaded in its place; the message names it."""


class LeftCheckpointWarning(RuntimeWarning):
    """A checkpoint of a later step than the one just saved was set aside; the message names it."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, the oldest first. Local.

    Only those that were committed; it may still turn out that a file of one is damaged, or its
    manifest.
    """
    try:
        names = [each.name for each in folder.iterdir() if (each / MANIFEST).is_file()]
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


class Checkpoints:
    """The checkpoints of a run: saved every so many steps, the last few kept, loaded to go on.

    They stand in a folder as ``step-00000100``, each as :func:`mpimesh.save` saves it: whole, or
    not there. To be used as a context manager, whose end waits for the last one. Making it is
    collective.

    A run that goes on from an older one leaves those of later steps behind: when it saves, these
    are renamed, with a warning, to ``step-00000100.left``, and never loaded or removed. Of an older
    one the files go that it was saved as, and its folder if nothing else is in it.

    Args:
        folder: Where they are, which all ranks can see; made if it is not there.
        mesh: The ranks that save together; None for one process alone, without MPI.
        keep: Number of checkpoints that stay; None for all. An older one goes when a newer one is
            whole.
        every: Steps from one save to the next.
        wait: False has them written in a thread while the training goes on. A save that fails
            then is told by the next one, or by :meth:`close`.
        file_bytes: See :func:`mpimesh.save`.

    Raises:
        StoreError: On every rank, if the folder cannot be made or written, or an argument is wrong.

    Example:
        >>> with mm.Checkpoints("run", mesh, keep=3, every=100) as checkpoints:
        ...     state = {"model": model, "optimizer": optimizer, "step": 0, "losses": []}
        ...     state = checkpoints.load(state) or state
        ...     for step in range(state["step"] + 1, steps + 1):
        ...         state["losses"].append(train(step))
        ...         state["step"] = step
        ...         checkpoints.save(step, state)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mesh: DeviceMesh | None = None,
        *,
        keep: int | None = 3,
        every: int = 1,
        wait: bool = True,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.folder = as_folder(folder)
        doing = f"keep checkpoints in {self.folder}"
        check_mesh(mesh, doing)
        self._mesh = mesh
        self._core = None if mesh is None else mesh.group()._core
        self._handle: CollectiveTensor | None = None
        self._closed = False
        # On the first rank: steps of before, and saved here, but not by another program.
        self._known: set[int] = set()
        self._settle()  # another one's save may be under way, in a folder that is removed here
        with agreeing(self._core, f"Checkpoints in {self.folder}", doing) as rows:
            self.keep = None if keep is None else as_int(keep, "keep", StoreError, least=1)
            self.every = as_int(every, "every", StoreError, least=1)
            self.wait = as_flag(wait, "wait", StoreError)
            self._file_bytes = as_int(file_bytes, "file_bytes", StoreError, least=1)
            rows.append([self.keep, self.every, self.wait, self._file_bytes])
            if self._is_first:
                self._prepare()
        if any(row != rows[0] for row in rows):
            raise StoreError(f"all ranks keep the same checkpoints, got {rows}")
        self._step = self._pending = 0

    def _prepare(self) -> None:
        """Make the folder, and remove what was not finished in it. On the first rank."""
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(
                f"cannot keep checkpoints in {self.folder}: it is a file; name a folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise StoreError(f"cannot keep checkpoints in {self.folder}: it cannot be written")
        clear_left(self.folder, _NAME.pattern)
        self._known.update(self.steps)

    # -- what there is: local ----------------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints that there are, oldest first. Local; reads the folder."""
        return steps_in(self.folder)

    @property
    def step(self) -> int:
        """The step of the checkpoint that was loaded, or is whole, last; 0 before."""
        return self._step

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step; StoreError for what is no step. Local."""
        number = as_int(step, "step", StoreError, least=0)
        if number > _MOST_STEP:
            raise StoreError(f"step must be at most {_MOST_STEP}, got {number}")
        return self.folder / f"step-{number:08}"

    def is_due(self, step: int) -> bool:
        """Tell whether :meth:`save` saves after a step without being forced. Local."""
        return as_int(step, "step", StoreError, least=0) % self.every == 0

    # -- collective --------------------------------------------------------------------------------

    def save(self, step: int, tree: Any, *, force: bool = False) -> bool:
        """Save a tree after a step, if one is due. Collective then.

        Args:
            step: How many steps were done.
            tree: See :func:`mpimesh.save`.
            force: Save even if none is due, as before the job ends.

        Returns:
            Whether it was saved, or is being saved.

        Raises:
            StoreError: On every rank, if this save failed, or the one before that nobody waited
                for. Checkpoints that were there before stay.
        """
        self._check_open("save")
        if not (self.is_due(step) or as_flag(force, "force", StoreError)):
            return False
        self._settle()
        path = self.path(step)
        self._make_way(step)
        options: Any = {"mesh": self._mesh, "file_bytes": self._file_bytes}
        if self.wait:
            save(path, tree, **options)
            self._step = step
            self._drop_old()
        else:
            self._handle = save(path, tree, wait=False, **options)
            self._pending = step
        return True

    def load(
        self,
        into: Any = None,
        *,
        step: int | None = None,
        verify: Verify = "before",
        **options: Any,
    ) -> Any:
        """Load the last good checkpoint. Collective.

        A damaged one is stepped over, with a warning that names it on the first rank.

        Args:
            into: The tree; see :func:`mpimesh.load`.
            step: That of a step; None for the last one.
            verify: See :func:`mpimesh.load`.
            options: More of :func:`mpimesh.load`: `layout`, `only`, `rename`, `strict`.

        Returns:
            The tree; None if there is no checkpoint. :attr:`step` is its step then.

        Raises:
            DamagedError: On every rank, if there are checkpoints, and all are damaged; or that of
                `step` is.
            StoreError: On every rank, if there is none of `step`; and as :func:`mpimesh.load`.
        """
        self._check_open("load")
        self._settle()
        doing = f"load from {self.folder}"
        with agreeing(self._core, f"{doing}, step={shown(step)}", doing) as rows:
            # One rank looks: what others see of a file system may be older.
            rows.append(self.steps if self._is_first else [])
        steps = rows[0]
        if step is not None:
            if step not in steps:
                raise StoreError(f"{self.folder} has no checkpoint of step {step}; it has {steps}")
            steps = [step]
        for number in reversed(steps):
            try:
                tree = load(self.path(number), into, mesh=self._mesh, verify=verify, **options)
            except DamagedError as error:
                if number == steps[0]:
                    raise
                if self._is_first:
                    warnings.warn(
                        f"the checkpoint of step {number} is stepped over: {error}",
                        DamagedCheckpointWarning,
                        stacklevel=2,
                    )
                continue
            self._step = number
            rank = 0 if self._mesh is None else self._mesh.rank
            log(logging.INFO, rank, "the checkpoint of step %d is read", number)
            return tree
        return None

    def close(self) -> None:
        """Wait for a save that is under way. Collective.

        Raises:
            StoreError: On every rank, if it failed.
        """
        if not self._closed:
            self._closed = True
            self._settle()

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        return self._core is None or self._core.rank == 0

    def _settle(self) -> None:
        """Wait for the save that is under way; old checkpoints go once it is whole."""
        handle, self._handle = self._handle, None
        if self._core is not None:
            settle(self._core)
        if handle is not None:
            handle.resolve()
            self._step = self._pending
            self._drop_old()

    def _drop_old(self) -> None:
        """Remove the checkpoints that are too many, and set later ones aside. On the first rank."""
        if not self._is_first:
            return
        # What has another manifest, or a lost one, is neither renamed nor counted.
        ours = [step for step in self.steps if is_manifest(self.path(step) / MANIFEST)]
        later = self._known.intersection(step for step in ours if step > self._step)
        self._known = {step for step in self._known if step <= self._step} | {self._step}
        for step in sorted(later):
            left = self._set_aside(step)
            warnings.warn(
                f"the checkpoint of step {step} is of a course that was left after step "
                f"{self._step}: it is {left} now",
                LeftCheckpointWarning,
                stacklevel=4,
            )
        older = [step for step in ours if step < self._step]
        extra = 0 if self.keep is None else max(0, len(older) + 1 - self.keep)
        for step in older[:extra]:
            with suppress(OSError):  # such as of a manifest that is damaged
                drop(self.path(step))

    def _set_aside(self, step: int) -> Path:
        """Give the folder of a step a name that nothing has, and return it."""
        path = self.path(step)
        left, number = path.with_name(f"{path.name}.left"), 1
        while os.path.lexists(left):
            number += 1
            left = path.with_name(f"{path.name}.{number}.left")
        with suppress(OSError):
            path.rename(left)
        return left

    def _make_way(self, step: int) -> None:
        """Set aside a checkpoint of a step that is to be saved anew and cannot be replaced."""
        manifest = self.path(step) / MANIFEST
        try:
            if self._is_first and is_manifest(manifest):
                listed_files(manifest)
        except DamagedError as error:
            left = self._set_aside(step)
            warnings.warn(
                f"the checkpoint of step {step} is saved anew, and the one there is {left} now: "
                f"{error}",
                DamagedCheckpointWarning,
                stacklevel=3,
            )

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise StoreError(f"cannot {action}: these Checkpoints are closed; make new ones")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; after an error without waiting for the others, who may not come."""
        if error is None:
            self.close()
        self._closed = True

    def __repr__(self) -> str:
        return f"<Checkpoints in {self.folder}, every {self.every} steps, {len(self.steps)} there>"
