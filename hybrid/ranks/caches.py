"""The caches of compilers, whose content is executed when it is found again."""

import os
import stat
import tempfile
from pathlib import Path

_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUPY_CACHE_DIR": "cupy",
}


def keep_private() -> None:
    """Let torch.compile and CuPy store code in folders that only this user can write to.

    The folders are in `hybrid-UID` of TMPDIR: on the node, not in the home. Variables that are set
    already stay. Raises ValueError if that folder belongs to, or can be written by, another user.
    """
    folder = Path(tempfile.gettempdir(), f"hybrid-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & 0o077:
        raise ValueError(
            f"{folder} is not a folder that you alone can write to, and compiled code would be run "
            "from it: remove it, or set TMPDIR to a folder of your own"
        )
    for variable, name in _VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))
