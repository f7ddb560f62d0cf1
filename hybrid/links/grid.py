"""The grid of K blocks x R replicas: places of ranks, and the grids that fit a rank count."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hybrid.errors import counted

Arrangement = Literal["chain", "peers"]
"""The ranks that a launcher numbers consecutively: the blocks of a chain, or peers."""


@dataclass(frozen=True)
class GridPlace:
    """A rank's place in the grid; by default a single rank."""

    block: int = 0
    blocks: int = 1
    replica: int = 0
    replicas: int = 1

    def __str__(self) -> str:
        of = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"block {self.block}{of}"

    @cached_property
    def number(self) -> int:
        """r K + k, which need not be the launcher's rank."""
        return self.replica * self.blocks + self.block

    @property
    def count(self) -> int:
        """The number of ranks of the grid."""
        return self.blocks * self.replicas

    @property
    def peers(self) -> list[int]:
        """The numbers of the ranks that own this block, one for each replica."""
        return [replica * self.blocks + self.block for replica in range(self.replicas)]

    def in_chain(self, number: int) -> bool:
        """Whether the rank with that number belongs to the same replica."""
        return number // self.blocks == self.replica


class Grid(NamedTuple):
    """K blocks x R replicas; in a request, 0 means that the number of ranks decides."""

    blocks: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.blocks * self.replicas

    def __str__(self) -> str:
        counts = (self.blocks, "block"), (self.replicas, "replica")
        return " x ".join(counted(n, what) for n, what in counts if n > 1) or "1 block"

    def place(self, rank: int, side_by_side: Arrangement = "chain") -> GridPlace:
        """Return the place of a launcher's rank.

        chain    0 1 2 | 3 4 5    of K = 3, R = 2: rank r K + k has block k of replica r
        peers    0 2 4 | 1 3 5                     rank k R + r has it
        """
        if side_by_side == "chain":
            return GridPlace(rank % self.blocks, self.blocks, rank // self.blocks, self.replicas)
        return GridPlace(rank // self.replicas, self.blocks, rank % self.replicas, self.replicas)

    def rank(self, number: int, side_by_side: Arrangement = "chain") -> int:
        """Return the launcher's rank of a place number: the inverse of `place`."""
        if side_by_side == "chain":
            return number
        return number % self.blocks * self.replicas + number // self.blocks

    def on(self, ranks: int, start: str = "mpirun -n") -> "Grid":
        """Fill in the open counts from the number of ranks; ValueError if no grid fits.

        With one count the ranks give the other; with none, each rank is a block. `start` is the
        command that sets the number of ranks, for the error.
        """
        blocks, replicas = self
        if not replicas:
            replicas = ranks // blocks if blocks and ranks % blocks == 0 else 1
        grid = Grid(blocks or ranks // replicas, replicas)
        if grid.ranks == ranks:
            return grid
        ways = [f"{start} {(blocks or 1) * replicas}" + " or a multiple of it" * (0 in self)]
        if blocks and ranks % blocks == 0:
            ways.append(counted(ranks // blocks, "replica"))
        if blocks and ranks % replicas == 0:
            ways.append(counted(ranks // replicas, "block"))
        raise ValueError(
            f"{counted(ranks, 'rank')} cannot form a grid of {self}: choose {', or '.join(ways)}"
        )

    def resumed(self, wanted: "Grid", ranks: int) -> "Grid":
        """Choose the grid of a run that resumes on these ranks; a wanted count decides.

        A run with replicas keeps its number of blocks if it can; otherwise each rank is a block.
        """
        if any(wanted):
            return wanted
        if self.replicas == 1:
            return Grid(ranks)
        if ranks % self.blocks == 0:
            return Grid(self.blocks, ranks // self.blocks)
        if ranks % self.replicas == 0:
            return Grid(ranks // self.replicas, self.replicas)
        raise ValueError(
            f"the run has {self}, and {ranks} ranks are a multiple of neither: start "
            f"mpirun -n {self.blocks} or a multiple of it, or give blocks and replicas"
        )


def factorizations(ranks: int, most_blocks: int) -> list[Grid]:
    """List every way to write a number of ranks as K x R, most blocks first."""
    blocks = range(min(most_blocks, ranks), 0, -1)
    return [Grid(K, ranks // K) for K in blocks if ranks % K == 0]


def grids(ranks: int, units: int, samples: int) -> list[Grid]:
    """List every grid of these ranks, most blocks first; ValueError if there is none.

    A block needs at least one unit of the model, and a replica one sample of the mini-batch.
    """

    def fitting(count: int) -> list[Grid]:
        return [grid for grid in factorizations(count, units) if grid.replicas <= samples]

    if possible := fitting(ranks):
        return possible
    near = next(count for count in range(min(ranks, units * samples), 0, -1) if fitting(count))
    raise ValueError(
        f"{ranks} ranks cannot form K blocks x R replicas of a model of {units} units and a "
        f"mini-batch of {samples} samples: take {near} ranks, or a larger batch"
    )


def share_size(size: int, replica: int, replicas: int) -> int:
    """Count a replica's samples of a mini-batch of `size`; shares differ by at most one."""
    return (size + replicas - 1 - replica) // replicas
