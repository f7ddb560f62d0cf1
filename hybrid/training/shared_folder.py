"""A run's folder as its ranks share it: the first writes, and all learn whether it succeeded."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from math import inf
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import Any

from hybrid.errors import printable
from hybrid.files import remove
from hybrid.folder import checkpoint, traces
from hybrid.folder.checkpoint import MANIFEST
from hybrid.folder.disks import Disks
from hybrid.folder.manifest import ManifestPart
from hybrid.folder.runfolder import COURSE, METRICS, SUMMARY, RunFolder
from hybrid.folder.writer import Files, Writer
from hybrid.links import RankLinks
from hybrid.rounds.trace import Trace
from hybrid.settings.config import CheckpointSettings
from hybrid.settings.selection import Selection

RARITY = 20
"""Times the seconds of a checkpoint between those that checkpoint.minutes asks for."""


class SharedFolder:
    """Does nothing where a run has no folder (`path` is None). All ranks call public methods."""

    def __init__(
        self,
        path: Path | None,
        links: RankLinks,
        settings: CheckpointSettings,
        kind: type[ManifestPart] = ManifestPart,
        selection: Selection | None = None,
    ) -> None:
        """`kind` declares the manifests' other entries; `selection` decides which one is best."""
        self.path, self.links, self.settings, self.kind = path, links, settings, kind
        self.selection = (selection or Selection()) if settings.best else None
        self._first = links.place.number == 0
        self._folder = RunFolder(path or Path())
        self._disks: Disks | None = None
        self._writer: Writer | None = None
        self._cost = 0.0
        """Seconds that the newest checkpoint has taken."""
        self._copied = 0
        """The bytes of the metrics that the other disks with checkpoints have, too."""
        self._run = ""
        """The run's name in its checkpoints, which the first rank knows."""
        self._saved_at = monotonic()
        self.saved_since_rollback = True

    def claim(self, resume: bool) -> list[str]:
        """Own the folder until `release`; gives notices about the checkpoints that were found.

        AgreedError if it has a living owner, or no run to resume, or one where none should be.
        """
        if self.path is None:
            return []
        with self.links.waiting("everyone"):
            self._disks = disks = Disks(self._folder, self.links.everyone)
            notices = disks.recover() if resume else []
        with self.links.agreement():
            self._folder.check(resume, disks.here == 0)
            self._run = disks.token
            if resume and self._first and (newest := self._folder.newest()) is not None:
                self._run = checkpoint.read_manifest(newest).get("run", "")
        last, copies = self.settings.keep_last, self.settings.copies
        self._writer = Writer(
            *(self._folder.checkpoints, self.links, last, disks, copies, self.selection, self.kind)
        )
        if disks.apart:
            hosts = disks.hosts()
            where = f"kept on {' and '.join(hosts[:copies])}" if copies else "spread over them"
            notices.append(
                f"{', '.join(hosts)} do not share {self.path}: checkpoints are {printable(where)}"
            )
        return notices

    def release(self) -> None:
        """Give up the ownership of the folder. The other ranks need not call it."""
        self._folder.release()

    def stored_summary(self) -> dict[str, Any] | None:
        """The summary of a run that has ended, which is printed again; None without one."""
        if self.path is None:
            return None
        return self.links.broadcast(self._folder.summary() if self._first else None)

    def open(self, config: Callable[[], str], from_step: int, rollbacks: int) -> None:
        """Begin to write after step `from_step` and this number of roll-backs."""
        hosts = self.links.gather(gethostname())
        with self.links.agreement():
            if self.path is not None and hosts is not None:
                self._folder.open(config(), from_step, rollbacks, hosts)
            elif self._disks is not None and self._disks.is_root:
                self._folder.clear()
        self._copied = self._copy_to_others(COURSE)

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first, as the first rank sees them."""
        whole = self.path is not None and self._first
        found = checkpoint.complete(self._folder.checkpoints) if whole else ()
        names = self.links.broadcast([folder.name for folder in found])
        if self._disks is not None and self._disks.apart:
            with self.links.waiting("everyone"):
                names = [name for name in self._disks.whole() if name in names]
        return [self._folder.checkpoints / name for name in names]

    @contextmanager
    def fetched(
        self, folder: Path, wanted: Callable[[Mapping[str, Any]], Collection[str]]
    ) -> Iterator[Path]:
        """Give a checkpoint with the files that this rank wants of it, by its manifest.

        Those that this rank's disk lacks are brought there, and removed again.
        """
        disks = self._disks
        if disks is None or not disks.apart:
            yield folder
            return
        lasting = (folder / MANIFEST).is_file()
        local = folder if lasting else folder.with_name(f".{folder.name}.{disks.token}.partial")
        with self.links.waiting("everyone"):
            disks.bring(folder.name, {MANIFEST}, local.name)
            with self.links.agreement():
                names = wanted(checkpoint.read_manifest(local))
            disks.bring(folder.name, names, local.name)
        yield local
        if disks.is_root and not lasting:
            shutil.rmtree(local, ignore_errors=True)

    def best(self) -> Path | None:
        """The best checkpoint, if it is kept and not the newest; as the first rank sees it."""
        if self.path is None or self.selection is None:
            return None
        best = None
        if self._first:
            whole = checkpoint.complete(self._folder.checkpoints)
            best = checkpoint.best(whole, self.selection)
            best = None if best in whole[-1:] else best
        name = self.links.broadcast(best and best.name)
        return None if name is None else self._folder.checkpoints / name

    def rewind(self, to_step: int) -> None:
        """Continue after step `to_step`, to which the run has gone back."""
        self.saved_since_rollback = False
        with self.links.agreement():
            if self._first:
                self._folder.rewind(to_step)

    def write_metric(self, line: Mapping[str, Any]) -> str:
        """Append a line of metrics; gives a notice for the user, or an empty text."""
        if self.path is None or not self._first:
            return ""
        self._folder.metric(line)
        return self._folder.notice()

    @property
    def blocked_seconds(self) -> float:
        """Seconds that training has waited for checkpoints."""
        return self._writer.seconds if self._writer else 0.0

    def checkpoint_is_due(self) -> bool:
        """Whether, by this rank's clock, it is time for a checkpoint."""
        age = max(60 * self.settings.minutes, RARITY * self._cost)
        return self.settings.minutes > 0 and monotonic() - self._saved_at >= age

    def write_checkpoint(
        self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]
    ) -> str:
        """Write a checkpoint; AgreedError if a rank cannot. Gives a notice, or an empty text."""
        assert self._writer is not None
        begin, before = monotonic(), self._cost
        self._copied = self._copy_to_others((METRICS,), self._copied)
        self._writer.write(step, units, states, {**manifest, "run": self._run})
        self._saved_at, self.saved_since_rollback = monotonic(), True
        self._cost, seconds = self._saved_at - begin, 60 * self.settings.minutes
        if before or not 0 < seconds < RARITY * self._cost:
            return ""
        return (
            f"checkpoint.minutes is {self.settings.minutes:g}, but a checkpoint takes "
            f"{self._cost:.2g} s: within an epoch there is one every {RARITY * self._cost:.2g} s"
        )

    def write_results(self, summary: dict[str, Any] | None, trace: Trace) -> None:
        """Write all ranks' traces, then the summary.

        Without a summary, after a failure, each rank writes what it can and waits for no other,
        unless the run has lost its folder.
        """
        if self.path is None:
            return
        with self._ending(summary):
            self._folder.check_owner()
            traces.write(self.path, self.links.place.number, trace.events)
        with self._ending(summary):
            if self._first:
                self._folder.close(summary)
        if summary and self._disks is not None and self._disks.apart:
            with self.links.waiting("everyone"):
                for disk in range(1, len(self._disks.roots)):
                    ranks = [r for r, d in enumerate(self._disks.of_ranks) if d == disk]
                    self._disks.copy([traces.name(rank) for rank in ranks], disk, [0])
            self._copy_to_others((*COURSE, SUMMARY))
            if self._disks.is_root and self._disks.here >= (self.settings.copies or inf):
                with suppress(OSError):
                    remove(self.path / traces.FOLDER)
                    self._folder.checkpoints.rmdir()

    def _copy_to_others(self, names: Collection[str], begin: int = 0) -> int:
        """Copy files of the first disk to the others with checkpoints; give the metrics' size."""
        if self._disks is None or not self._disks.apart:
            return 0
        count = len(self._disks.roots)
        others = range(1, min(self.settings.copies or count, count))
        with self.links.waiting("everyone"):
            return self._disks.copy(names, 0, others, begin).get(METRICS, 0)

    def _ending(self, summary: dict[str, Any] | None) -> AbstractContextManager[None]:
        return self.links.agreement() if summary else suppress(OSError, ValueError)
