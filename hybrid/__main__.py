"""The `hybrid` command, listening to signals before the imports that take seconds."""

import os
import sys
from contextlib import nullcontext

from hybrid.ranks.stopping import listening
from hybrid.solvers.named import entry_points


def main() -> None:
    """Run the command; a training hears a request to stop even while Python still imports."""
    # else each rank adds frames of torch's own to the line that names a lost one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    trainings = {"command.train", *entry_points().names}
    trains = f"command.{' '.join(sys.argv[1:2])}" in trainings
    with listening(last=True) if trains else nullcontext():
        from hybrid import cli

        cli.main()


if __name__ == "__main__":
    main()
