"""The `hybrid` command, listening to signals before the imports that take seconds."""

import os
import sys
from contextlib import nullcontext
from importlib.metadata import entry_points

from hybrid.ranks.stopping import listening


def main() -> None:
    """Run the command; a training hears a request to stop even while Python still imports."""
    # else each rank adds frames of torch's own to the line that names a lost one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    trainings = {"train", *entry_points(group="hybrid.commands").names}
    with nullcontext() if trainings.isdisjoint(sys.argv[1:2]) else listening(last=True):
        from hybrid import cli

        cli.main()


if __name__ == "__main__":
    main()
