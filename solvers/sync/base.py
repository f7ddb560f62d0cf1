"""The base of strategies by which the replicas of a block synchronize its weights."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hybrid.solvers.acting import REPLICAS, Acts, Needs, Settings
from hybrid.solvers.peers import Peers, Replica, Sync
from hybrid.solvers.registry import STRATEGIES

EXACT_MESSAGES = Acts(
    "sync.messages is float32, because rounded numbers are summed in the order of replicas",
    lambda run: getattr(run.sync, "messages", "float32") == "float32",
)
ANOTHER = "choose another solver or sync.name=all-reduce"


@dataclass(frozen=True, kw_only=True)
class Strategy(Settings, ABC):
    """A way to synchronize replicas: a frozen dataclass of its settings."""

    order: Annotated[Literal["auto", "replicas", "engine"], EXACT_MESSAGES] = "auto"
    """Order of sums: the replicas', or the communication library's own; auto: the latter beyond 8
    replicas."""

    name: ClassVar[str]
    program: ClassVar[type[Sync]]
    """The program that a rank runs."""
    exact: ClassVar[bool] = False
    """Whether all replicas have the same weights after every step."""
    anchored: ClassVar[bool] = False
    """Whether it keeps a copy of each weight of the network."""
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            REPLICAS.where,
            lambda run: run.replicas > 1 or run.sync.name == STRATEGIES.default,
            REPLICAS.remedy,
        ),
        Needs(
            "the solver trains the network's weights alone, because it keeps a copy of each",
            lambda run: not run.sync.anchored or not run.solver.has_auxiliary_weights,
            ANOTHER,
        ),
    )
    """Requirements of a run with the strategy."""
    acts: ClassVar[Mapping[str, Acts]] = {"sync.*": REPLICAS}
    """Conditions of inherited settings, see `hybrid.solvers.acting`."""

    def copies(self, replicas: int) -> float:
        """Count the numbers that a rank keeps for each weight between steps."""
        return 0.0

    def lossless(self) -> "Strategy":
        """Return the same strategy with gradients in float32."""
        return self

    def start(self, block: Replica, peers: Peers, share: float) -> Sync:
        """Start this rank's program; `share` is its replica's fraction of every mini-batch."""
        return self.program(self, block, peers, share)
