"""Checkpoints that are either complete and intact or do not count.

A run's checkpoint of step 1000 is the folder ``00001000`` with its manifest ``00001000.sha256``
beside it. Orbax writes the folder, asynchronously, and moves it into place in one piece. Once all
files are on the disk, the SHA-256 of each is written atomically to the manifest, in the format of
``sha256sum --check``. A folder without a manifest does not count. If the manifest does not agree,
this is reported and the previous checkpoint is used. (Orbax itself silently restores arrays with
flipped bytes.)

This is the only file that knows orbax.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint.experimental.v1 as ocp

from train.checks import require
from train.files import sync, write_atomically
from train.training import distributed

T = TypeVar("T")
Report = Callable[[str], None]

_STEP_ENTRY = re.compile(r"(\d{8,})(\..+)?")
_MANIFEST_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
      folder: where they are; created by the first save.
    """

    def __init__(self, folder: Path, *, keep: int = 3, report: Report = print):
        """
        Args:
          folder: where the checkpoints are.
          keep: how many of the newest to keep, at least 1.
          report: called with a sentence about each damaged checkpoint.
        """
        require(keep >= 1, f"checkpoints: keep must be at least 1; got {keep}")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._report = report
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, Exception) and distributed.is_peer_lost(error):
            # The pending save waits for the other process, and never becomes complete.
            self._worker.shutdown(wait=False)
            return
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have a manifest, ascending."""
        return saved_steps(self.folder)

    def save(self, step: int, state: Any, data: Any = None, sums: Any = None) -> None:
        """Saves in the background; waits only for the save before this one.

        ``state`` may be donated or overwritten, and the others advanced, once this returns. A step
        that already has its manifest is not written again.

        Args:
          step: number of optimiser steps taken.
          state: pytree of arrays.
          data: a grain iterator, whose position is saved; or None.
          sums: anything else that has ``get_state`` and ``set_state``, in JSON types; or None.
        """
        self.wait()
        if distributed.agreed(lambda: step in self.steps()):
            return
        parts = {"state": state} | _positions(data=data, sums=sums)
        context = ocp.Context()
        # Otherwise each process checks for a folder of that name. One that checks after the first
        # has removed it waits in another place than the others.
        context.file_options.skip_sync_file_validations = True
        with context:
            response = ocp.save_checkpointables_async(self._path(step), parts, overwrite=True)
        self._pending = self._worker.submit(self._commit, step, response)

    def wait(self) -> None:
        """Returns once the last save has its manifest; raises any error of it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def wait_for_all(self) -> None:
        """Returns once the last save counts: the first process writes the manifest.

        All processes must call it. One that left earlier would end the first too.
        """
        self.wait()
        distributed.wait_for_all()

    def problems(self, step: int) -> list[str]:
        """Lists the problems of the checkpoint of ``step`` according to its manifest."""
        expected = {}
        for line in self._manifest(step).read_text(encoding="utf-8", errors="replace").splitlines():
            match = _MANIFEST_LINE.fullmatch(line)
            if not match:
                return [f"{self._manifest(step).name} is not a manifest"]
            expected[match[2]] = match[1]
        found = self._files(step)
        missing = [f"{name} is missing" for name in expected if name not in found]
        unknown = [f"{name} is not in the manifest" for name in found if name not in expected]
        changed = [
            f"{name} has changed"
            for name, path in found.items()
            if name in expected and _sha256(path) != expected[name]
        ]
        return missing + unknown + changed or ([] if expected else ["the manifest is empty"])

    def restore(
        self, template: T, data: Any = None, sums: Any = None, *, partial: bool = False
    ) -> tuple[int, T]:
        """Loads the newest intact checkpoint.

        All processes must call it if ``template`` lies on the devices of several. For a template
        on this process's own devices, as in an evaluation, only this process loads.

        Args:
          template: pytree of arrays or ``jax.ShapeDtypeStruct``; a leaf without sharding is put on
            this process's first device.
          data: a grain iterator to be moved to its saved position; or None.
          sums: is set to the saved ``sums``, or unchanged if there are none; or None.
          partial: ``template`` holds only some of the saved entries, such as ``{"params": ...}``.

        Returns:
          The step and the state, in the structure of ``template``.

        Raises:
          ValueError: if there is no intact checkpoint, or it does not fit ``template``.
        """
        abstract = _placed(template)
        alone = all(x.sharding.is_fully_addressable for x in jax.tree.leaves(abstract))
        step = self._newest_intact() if alone else distributed.agreed(self._newest_intact)
        if not (self._path(step) / "sums").is_dir():
            sums = None
        context = ocp.Context()
        context.pytree_options.loading.partial_load = partial
        if alone:
            context.multiprocessing_options.primary_host = jax.process_index()
            context.multiprocessing_options.active_processes = {jax.process_index()}
        with context:
            return step, self._load(step, abstract, _positions(data=data, sums=sums))

    def forget_after(self, step: int) -> None:
        """Makes the checkpoints later than ``step`` not count; their folders stay for now."""

        def forget() -> None:
            for later in self.steps():
                if later > step:
                    manifest = self._manifest(later)
                    manifest.replace(manifest.with_suffix(".sha256.damaged"))

        distributed.agreed(forget)

    def _newest_intact(self) -> int:
        steps = self.steps()
        require(bool(steps), f"no checkpoint in {self.folder}")
        for step in reversed(steps):
            problems = self.problems(step)
            if not problems:
                return step
            self._report(f"checkpoint {self._path(step)} is damaged and not used: {problems[0]}")
        raise ValueError(f"all {len(steps)} checkpoints in {self.folder} are damaged")

    def _load(self, step: int, abstract: T, others: dict[str, Any]) -> T:
        parts = {"state": abstract} | others
        try:
            state = ocp.load_checkpointables(self._path(step), parts)["state"]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"checkpoint {self._path(step)} does not fit this model: {error}"
            ) from error
        for part in others.values():
            require(part.refused is None, f"cannot go on from {self._path(step)}: {part.refused}")
        return state

    def _commit(self, step: int, response: ocp.AsyncResponse) -> None:
        try:
            response.result()
            if distributed.is_main():
                # Files of other hosts went to the shared file system when they were closed.
                for path in (*self._path(step).rglob("*"), self._path(step), self.folder):
                    sync(path)
                lines = [f"{_sha256(path)}  {name}\n" for name, path in self._files(step).items()]
                write_atomically(self._manifest(step), "".join(lines))
        except (OSError, ValueError) as error:
            raise OSError(
                f"the checkpoint {self._path(step)} could not be written, those before it are "
                f"intact: {error}"
            ) from error
        if distributed.is_main():
            try:
                self._prune()
            except OSError as error:
                self._report(f"an old checkpoint could not be removed: {error}")

    def _prune(self) -> None:
        """Removes all but the newest ``keep`` checkpoints, and remains of earlier crashes.

        Manifests are removed before folders, and nothing after an error, so that a half-removed
        checkpoint does not count. Later folders than the newest checkpoint stay:
        :meth:`forget_after` set them aside.
        """
        kept = self.steps()[-self._keep :]
        old = [
            entry
            for entry in _entries(self.folder)
            if (match := _STEP_ENTRY.fullmatch(entry.name))
            and int(match[1]) not in kept
            and int(match[1]) < kept[-1]
        ]
        for entry in sorted(old, key=Path.is_dir):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _files(self, step: int) -> dict[str, Path]:
        """The files of a checkpoint by their names relative to the folder of all checkpoints."""
        return {
            path.relative_to(self.folder).as_posix(): path
            for path in sorted(self._path(step).rglob("*"))
            if path.is_file()
        }

    def digest(self, step: int) -> str:
        """Returns 16 hexadecimal digits that tell the checkpoint of ``step`` from others."""
        return _sha256(self._manifest(step))[:16]

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _manifest(self, step: int) -> Path:
        return self.folder / f"{step:08d}.sha256"


def _placed(template: T) -> T:
    """Returns shapes and types with their places, by default this process's first device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", None) or device
        ),
        template,
    )


def _positions(**parts: Any) -> dict[str, Any]:
    """Returns a :class:`_Position` of each part that is not None, by name."""
    return {name: _Position(part) for name, part in parts.items() if part is not None}


class _Position:
    """The position of a grain iterator, or the like, which is the same in all processes.

    Written once, it can be read by any number of processes. Grain itself writes a file for each
    process, which only as many can read.
    """

    def __init__(self, iterator: Any):
        self._iterator = iterator
        # Why the iterator rejects the saved position. If raised, orbax would replace the message.
        self.refused: ValueError | None = None

    async def save(self, directory: Any) -> Awaitable[None]:
        text = json.dumps(self._iterator.get_state())

        async def write() -> None:
            folder = await directory.await_creation()
            if distributed.is_main():
                (Path(folder) / "position.json").write_text(text, encoding="utf-8")

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            (path,) = Path(directory).glob("*.json")
            try:
                self._iterator.set_state(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                self.refused = error

        return read()


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have a manifest, ascending."""
    found = (re.fullmatch(r"(\d{8,})\.sha256", path.name) for path in _entries(folder))
    return sorted(int(match[1]) for match in found if match)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
