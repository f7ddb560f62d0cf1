"""A checkpoint is written by all ranks together: it is whole, or it is not there."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from time import perf_counter
from typing import Any

from torch import Tensor

from hybrid.files import remove, sync, write_durably
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import MANIFEST
from hybrid.folder.disks import Disks
from hybrid.folder.manifest import ManifestPart
from hybrid.links import AgreedError, RankLinks
from hybrid.settings.selection import Selection

Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> name -> tensor."""
Entries = dict[str, dict[str, Any]]
"""The manifest's entries of the files that a rank has written: "units" and "states" by name."""


class Writer:
    """One rank's part in writing checkpoints.

        every rank                 writes its files into .STEP.TOKEN.partial on its disk
        the first `copies` disks   get the files that they lack, where a run has several disks
        the first rank of each     writes the manifest, once all have, and renames that to STEP

    The rename comes last, so a folder of that name is whole; just before, a checkpoint of the same
    step is removed, while the new one is whole under its other name. Checkpoints of later steps,
    which a roll-back has discarded, are removed. With 0 copies each disk keeps what its ranks have
    written, and the manifest, which names the hosts.
    """

    def __init__(
        self,
        root: Path,
        links: RankLinks,
        keep_last: int,
        disks: Disks | None = None,
        copies: int = 1,
        keep_best: Selection | None = None,
        kind: type[ManifestPart] = ManifestPart,
    ) -> None:
        """Without `disks`, there is one, whose folder nobody has claimed."""
        self.root, self.links, self.keep_last, self.disks = root, links, keep_last, disks
        self.copies = copies
        self.keep_best, self.kind = keep_best, kind
        self.seconds = 0.0
        """How long training has waited for checkpoints."""

    def write(self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`: this rank's units and the states of its parts.

        All ranks call it. A failure is raised on all of them, as AgreedError, and leaves no partial
        folder.
        """
        start, disks = perf_counter(), self.disks
        partial = self.root / f".{step:08d}.{disks.token if disks else 0}.partial"
        try:
            with self._agreement():
                self._check()
                for folder in (self.root, partial):  # a run folder that is gone stays so
                    folder.mkdir(exist_ok=True)
                entries = {"units": self._written(partial, units)}
                entries["states"] = self._written(partial, {n: t for n, t in states.items() if t})
            everyone, text = self.links.gather(entries), ""
            with self._agreement():
                if everyone is not None:
                    text = self._manifest(step, everyone, manifest)
            keeps = True
            if disks is not None and disks.apart:
                text, keeps = self.links.broadcast(text), disks.here < self.copies
                names = checkpoint.file_sizes(json.loads(text)) if keeps else ()
                with self.links.waiting("everyone"):
                    disks.bring(partial.name, names, partial.name)
            with self._agreement():
                if self._is_root and (keeps or not self.copies):
                    self._commit(partial, step, text)
                elif self._is_root:
                    shutil.rmtree(partial, ignore_errors=True)
        except AgreedError:
            if self._is_root:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.seconds += perf_counter() - start

    def _written(self, folder: Path, files: Files) -> dict[str, dict[str, Any]]:
        """Write files; give their entries in the manifest."""
        spread = self.disks is not None and self.disks.apart and not self.copies
        host = {"host": gethostname()} if spread else {}
        return {name: {**checkpoint.write(folder, name, t), **host} for name, t in files.items()}

    @property
    def _is_root(self) -> bool:
        return self.links.place.number == 0 if self.disks is None else self.disks.is_root

    def _check(self) -> None:
        """ValueError if this run no longer owns the folder; every rank calls it."""
        if self.disks is not None:
            self.disks.folder.check_owner()

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        """That of all ranks; if this run has lost its folder, that is why writing fails."""
        with self.links.agreement():
            try:
                yield
            except OSError:
                self._check()
                raise

    def _manifest(self, step: int, everyone: Sequence[Entries], manifest: Mapping[str, Any]) -> str:
        body = {**manifest, "format": checkpoint.FORMAT, "step": step}
        for kind in ("units", "states"):
            body[kind] = {name: entry for rank in everyone for name, entry in rank[kind].items()}
        body = json.loads(json.dumps(body))  # as it is read: keys are texts, tuples are lists
        text = json.dumps({**body, "sha256": checkpoint.digest(body)}, indent=1)
        checkpoint.check_readable(self.kind, body, text)
        return text

    def _commit(self, partial: Path, step: int, manifest: str) -> None:
        """Complete the folder, rename it and remove older checkpoints."""
        final = self.root / f"{step:08d}"
        write_durably(partial / MANIFEST, manifest)
        sync(partial)
        self._check()
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
