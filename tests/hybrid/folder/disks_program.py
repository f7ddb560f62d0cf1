"""The command on ranks whose run folders are on disks of their own, and parts of it."""

from pathlib import Path

import torch
import world
from torch import nn

from hybrid.errors import AgreedError
from hybrid.folder import disks
from hybrid.folder.disks import Disks, Piece, move
from hybrid.folder.runfolder import RunFolder


def hybrid(comm, folders, words, weights=()):
    """`hybrid train` on the ranks of a communicator, each with its own run folder."""
    more = ["--weights", weights[comm.rank]] if weights else []
    return world.hybrid(comm, [*words, *more, "--out", folders[comm.rank]])


def moved(comm, root, sizes, failing):
    """Move files of random sizes among all ranks at once; the error, if a rank cannot."""
    disks.CHUNK = 1000
    here = Path(root, str(comm.rank))
    if failing == comm.rank:
        here.rmdir()
    pieces = [
        Piece(source, target, here / name, here / f"from {source}, {name}", 0, size)
        for (source, name), size in sizes.items()
        for target in range(comm.size)
        if target != source
    ]
    try:
        move(pieces, comm)
    except AgreedError as error:
        return str(error)
    return ""


def found(comm, folders):
    """What the disks come to: each rank's, and the token; or the error."""
    folder = RunFolder(Path(folders[comm.rank]))
    try:
        here = Disks(folder, comm)
        return here.here, here.is_root, here.roots, here.token, here.whole()
    except AgreedError as error:
        return str(error)
    finally:
        folder.release()


def network():
    """Weights that only a file can have are 1.5 times these."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 90), nn.ReLU(), nn.Linear(90, 10))
