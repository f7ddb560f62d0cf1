"""The methods and the strategies by name: this package's, and those of others by entry points."""

from typing import TYPE_CHECKING

from hybrid.solvers.named import Named

if TYPE_CHECKING:
    from hybrid.solvers.base import Solver

OWN = {
    "backprop": "hybrid.solvers.exact.exact_pass:Backprop",
    "penalty": "hybrid.solvers.splitting.penalty:Penalty",
    "augmented-lagrangian": "hybrid.solvers.splitting.augmented_lagrangian:AugmentedLagrangian",
    "block-admm": "hybrid.solvers.splitting.block_admm:BlockADMM",
    "ddg": "hybrid.solvers.delayed.ddg:DDG",
    "features-replay": "hybrid.solvers.delayed.features_replay:FeaturesReplay",
    "fdg": "hybrid.solvers.delayed.fdg:FDG",
    "petra": "hybrid.solvers.delayed.petra:Petra",
    "local-updates": "hybrid.solvers.local.local_updates:LocalUpdates",
}
"""Name -> module:class, one line for each method."""

DEFAULT, WINDOWED = "ddg", "augmented-lagrangian"
"""The method of a run that names none, and of one that names none and asks for windows."""

SOLVERS = Named("solver", OWN, DEFAULT, base="hybrid.solvers.base:Solver")

LOCAL_METHODS = Named(
    "local method",
    {
        "none": "hybrid.solvers.local_work.work:NoLocalWork",
        **{name: OWN[name] for name in ("penalty", "augmented-lagrangian")},
    },
    default="none",
)
"""The local methods that can fill a rank's idle time."""

STRATEGIES = Named(
    "strategy",
    {
        "all-reduce": "hybrid.solvers.sync.all_reduce:AllReduce",
        "local-sgd": "hybrid.solvers.sync.local_sgd:LocalSGD",
        "diloco": "hybrid.solvers.sync.diloco:DiLoCo",
    },
    default="all-reduce",
    base="hybrid.solvers.sync.base:Strategy",
)
"""How replicas keep together: name -> where its class is."""

CODECS = Named(
    "codec",
    {
        "float32": "hybrid.solvers.codecs.formats:Float32",
        "bfloat16": "hybrid.solvers.codecs.formats:BFloat16",
        "float16": "hybrid.solvers.codecs.formats:Float16",
        "int8": "hybrid.solvers.codecs.formats:Int8",
        "int6": "hybrid.solvers.codecs.groups:Int6",
        "int4": "hybrid.solvers.codecs.groups:Int4",
        "int3": "hybrid.solvers.codecs.groups:Int3",
    },
    base="hybrid.solvers.codecs.base:Codec",
)
"""What tensors travel as between blocks."""


def names() -> list[str]:
    """All methods, those of other packages among them, whether they can be imported or not."""
    return list(SOLVERS)


def solver_class(name: str) -> "type[Solver]":
    """The class of a method; ValueError names the nearest known name, or the package to install."""
    method: type[Solver] = SOLVERS[name]
    return method
