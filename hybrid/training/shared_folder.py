"""A run's folder as its ranks share it: the first writes, and all learn whether it succeeded."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import Any

from hybrid.folder import checkpoint, traces
from hybrid.folder.manifest import ManifestPart
from hybrid.folder.runfolder import RunFolder
from hybrid.folder.writer import Files, Writer
from hybrid.links import RankLinks
from hybrid.rounds.trace import Trace
from hybrid.settings.config import CheckpointSettings
from hybrid.settings.selection import Selection


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
        self._writer: Writer | None = None
        self._saved_at = monotonic()
        self.saved_since_rollback = True

    def claim(self, resume: bool) -> list[str]:
        """Own the folder until `release`; gives notices about the checkpoints that were found.

        AgreedError if it has a living owner, or no run to resume, or one where none should be.
        """
        if self.path is None:
            return []
        token, notices = "", []
        with self.links.agreement():
            if self._first:
                token = self._folder.claim()
                notices = checkpoint.recover(self._folder.checkpoints) if resume else []
        with self.links.agreement():
            self._folder.check(resume)
        self._folder.token = token = self.links.broadcast(token)
        last, check = self.settings.keep_last, self._folder.check_owner
        self._writer = Writer(
            *(self._folder.checkpoints, self.links, last, token, check, self.selection),
            kind=self.kind,
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

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first, as the first rank sees them."""
        whole = self.path is not None and self._first
        found = checkpoint.complete(self._folder.checkpoints) if whole else list[Path]()
        return self.links.broadcast(found)

    def best(self) -> Path | None:
        """The best checkpoint, if it is kept and not the newest; as the first rank sees it."""
        if self.path is None or self.selection is None:
            return None
        best = None
        if self._first:
            whole = checkpoint.complete(self._folder.checkpoints)
            best = checkpoint.best(whole, self.selection)
            best = None if best in whole[-1:] else best
        return self.links.broadcast(best)

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
        minutes = self.settings.minutes
        return bool(minutes) and monotonic() - self._saved_at >= 60 * minutes

    def write_checkpoint(
        self, step: int, units: Files, states: Files, manifest: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint; AgreedError if a rank cannot."""
        assert self._writer is not None
        self._writer.write(step, units, states, manifest)
        self._saved_at, self.saved_since_rollback = monotonic(), True

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

    def _ending(self, summary: dict[str, Any] | None) -> AbstractContextManager[None]:
        return self.links.agreement() if summary else suppress(OSError, ValueError)
