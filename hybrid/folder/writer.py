"""A checkpoint is written by all ranks together: it is whole, or it is not there."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from hybrid.files import remove, sync, write_durably
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import MANIFEST
from hybrid.folder.manifest import ManifestPart
from hybrid.links import AgreedError, RankLinks
from hybrid.settings.selection import Selection

Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> name -> tensor."""
Entries = dict[str, dict[str, Any]]
"""The manifest's entries of the files that a rank has written: "units" and "states" by name."""


class Writer:
    """One rank's part in writing checkpoints.

        every rank   writes its files into .STEP.TOKEN.partial
        rank 0       writes the manifest there, once all have, and renames the folder to STEP

    The rename comes last, so a folder of that name is whole; just before, a checkpoint of the same
    step is removed, while the new one is whole under its other name. Checkpoints of later steps,
    which a roll-back has discarded, are removed.
    """

    def __init__(
        self,
        root: Path,
        links: RankLinks,
        keep_last: int,
        token: str = "",
        check: Callable[[], None] = lambda: None,
        keep_best: Selection | None = None,
        kind: type[ManifestPart] = ManifestPart,
    ) -> None:
        self.root, self.links, self.keep_last, self.token = root, links, keep_last, token
        self.check = check
        """Raises ValueError if this run no longer owns the folder; every rank calls it."""
        self.keep_best, self.kind = keep_best, kind
        self.seconds = 0.0
        """How long training has waited for checkpoints."""

    def write(self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`: this rank's units and the states of its parts.

        All ranks call it. A failure is raised on all of them, as AgreedError, and leaves no partial
        folder.
        """
        start, partial = perf_counter(), self.root / f".{step:08d}.{self.token or 0}.partial"
        entries: Entries = {}
        try:
            with self._agreement():
                self.check()
                for folder in (self.root, partial):  # a run folder that is gone stays so
                    folder.mkdir(exist_ok=True)
                stateful = {name: tensors for name, tensors in states.items() if tensors}
                for kind, files in ("units", units), ("states", stateful):
                    entries[kind] = {n: checkpoint.write(partial, n, t) for n, t in files.items()}
            everyone = self.links.gather(entries)
            with self._agreement():
                if everyone is not None:
                    self._commit(partial, step, everyone, manifest)
        except AgreedError:
            if self.links.place.number == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.seconds += perf_counter() - start

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        """That of all ranks; if this run has lost its folder, that is why writing fails."""
        with self.links.agreement():
            try:
                yield
            except OSError:
                self.check()
                raise

    def _commit(
        self, partial: Path, step: int, everyone: Sequence[Entries], manifest: Mapping[str, Any]
    ) -> None:
        """Complete the folder, rename it and remove older checkpoints."""
        final = self.root / f"{step:08d}"
        body = {**manifest, "format": checkpoint.FORMAT, "step": step}
        for kind in ("units", "states"):
            body[kind] = {name: entry for rank in everyone for name, entry in rank[kind].items()}
        body = json.loads(json.dumps(body))  # as it is read: keys are texts, tuples are lists
        text = json.dumps({**body, "sha256": checkpoint.digest(body)}, indent=1)
        checkpoint.check_readable(self.kind, body, text)
        write_durably(partial / MANIFEST, text)
        sync(partial)
        self.check()
        if os.path.lexists(final):
            remove(final, MANIFEST)
        os.replace(partial, final)
        for later in checkpoint.complete(self.root):
            if int(later.name) > step:
                remove(later, MANIFEST)
        sync(self.root)
        folders = checkpoint.complete(self.root)
        spared = checkpoint.best(folders, self.keep_best) if self.keep_best else None
        for old in folders[: -self.keep_last] if self.keep_last else []:
            if old != spared:
                remove(old, MANIFEST)
