"""The `hybrid` command, listening to signals before the imports that take seconds."""

import sys
from contextlib import nullcontext

from hybrid.ranks.stopping import listening


def main() -> None:
    """Run the command; a training hears a request to stop even while Python still imports."""
    with listening(last=True) if sys.argv[1:2] in (["train"], ["rl"]) else nullcontext():
        from hybrid import cli

        cli.main()


if __name__ == "__main__":
    main()
