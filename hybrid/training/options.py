"""What a run needs beside its blocks, its data and its method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybrid.method.options import GivenSettings, Options
from hybrid.settings.config import CheckpointSettings
from hybrid.training.callbacks import Callback


@dataclass(kw_only=True)
class RunOptions(Options):
    """The options of a method, and what only a run has: its folder, its callbacks, its names."""

    checkpoint: GivenSettings[CheckpointSettings] = GivenSettings(CheckpointSettings)
    """When checkpoints are written, and which are kept, as settings or a dict."""
    out: Path | None = None
    """Run folder; None keeps nothing."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder `out`."""
    callbacks: Sequence[Callback] = ()
    """They are called on the first rank while the run trains."""
    quiet: bool = False
    """Print no lines of progress."""
    names: dict[str, str] = field(default_factory=dict)
    """What the summary calls model and data."""
    describe: Callable[[list[str]], str] | None = None
    """Text of config.toml, given the cuts; None: as the settings are."""

    def check(self) -> None:
        """ValueError for what cannot be, whatever the method."""
        super().check()
        if not isinstance(self.callbacks, Sequence):
            raise ValueError(f"callbacks is a {type(self.callbacks).__name__}: give a list of them")
        strange = next((c for c in self.callbacks if not isinstance(c, Callback)), None)
        if strange is not None:
            raise ValueError(
                f"callbacks has {strange!r}, which is no object of a class that derives from "
                "hybrid.Callback: derive from it"
            )
