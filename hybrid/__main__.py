"""The `hybrid` command, listening to signals before the imports that take seconds."""

import sys
from contextlib import nullcontext
from importlib.metadata import entry_points

from hybrid.ranks.stopping import listening


def main() -> None:
    """Run the command; a training hears a request to stop even while Python still imports."""
    trainings = {"train", *entry_points(group="hybrid.commands").names}
    with nullcontext() if trainings.isdisjoint(sys.argv[1:2]) else listening(last=True):
        from hybrid import cli

        cli.main()


if __name__ == "__main__":
    main()
