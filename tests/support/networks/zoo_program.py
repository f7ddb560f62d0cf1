"""Networks of the zoo, trained by a few methods on threads and on ranks."""

from pathlib import Path
from typing import Any

from networks import OWN
from trainings import digests
from world import launched

from hybrid.solvers import DDG, AugmentedLagrangian, Backprop

SERIAL, DELAYED = {"solver": Backprop()}, {"solver": DDG(micro_batches=2)}
PARALLEL = {"solver": AugmentedLagrangian(beta=0.1), "window": 2, "sweeps": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a U-Net, in parallel": ("U-Net", PARALLEL),
    "a Transformer, delayed": ("character Transformer", DELAYED),
    "two outputs, serially": ("two outputs", SERIAL),
}


def trained(case: str, out: Path) -> tuple[dict[str, str], float]:
    """The checksum of every unit's weights and momenta, and the loss of the test."""
    name, settings = CASES[case]
    network = OWN[name]
    summary = network.fit(network.trainer(2, out=out, **settings))
    return digests(out), summary["test_loss"]


def on_ranks(comm: Any, out: Path) -> dict[str, tuple[dict[str, str], float]]:
    """Every case on the ranks of a communicator."""
    with launched(comm):
        return {case: trained(case, out / case) for case in CASES}
