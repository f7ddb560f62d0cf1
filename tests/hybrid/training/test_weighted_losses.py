"""A loss that weighs or leaves out targets has the gradient of the undivided mini-batch."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from trainings import trainer_of

from hybrid.data.mapped import Mapped
from hybrid.data.sampling import epoch_order
from hybrid.links import run_threads
from hybrid.rounds.evaluation import measure_network
from hybrid.solvers import (
    DDG,
    FDG,
    AugmentedLagrangian,
    Backprop,
    BlockADMM,
    FeaturesReplay,
    LocalUpdates,
    Penalty,
)
from hybrid.solvers.block import Block
from hybrid.solvers.objective import Objective
from hybrid.solvers.sync.local_sgd import LocalSGD
from hybrid_auxnet import AuxNet
from hybrid_messages import PDASGD

BATCH, STEPS, CLASSES = 13, 4, 3
WEIGHT = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
LOSS = nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=-7, label_smoothing=0.1)
PARTED = (Backprop(), DDG(), FDG(), FeaturesReplay())
OTHERS = (Penalty(), AugmentedLagrangian(), BlockADMM(), AuxNet(), LocalUpdates())
UNEVEN = (4, 1), (2, 3)
"""Micro-batches and replicas that 13 samples are no multiple of."""


def case(solver, replicas, daily):
    name = f"{solver.name}-{solver.num_micro_batches(BATCH, 2)}-{replicas}"
    return pytest.param(solver, replicas, {}, id=name, marks=() if daily else pytest.mark.slow)


CASES = [
    *(
        case(replace(solver, micro_batches=m), replicas, (m, replicas) in UNEVEN)
        for solver in PARTED
        for m, replicas in (*UNEVEN, (2, 1), (1, 2), (1, 3), (4, 2))
    ),
    *(case(solver, replicas, replicas == 3) for solver in OTHERS for replicas in (1, 2, 3)),
    *(
        pytest.param(DDG(micro_batches=2), r, {"fill": AugmentedLagrangian()}, id=f"waits-{r}")
        for r in (1, 2, 3)
    ),
    pytest.param(PDASGD(micro_batches=4), 1, {}, id="pd-asgd"),
    pytest.param(Backprop(), 2, {"sync": LocalSGD(steps=2)}, id="local-sgd"),
]


def samples():
    """Inputs and targets; of the first mini-batch the first half has none that counts."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, 6, generator=random, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (BATCH * STEPS,), generator=random)
    order = epoch_order(0, 0, BATCH * STEPS)
    y[order[[*range(BATCH // 2 + 1), 20, 33]]] = LOSS.ignore_index
    return x, y, order


def network():
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(6, CLASSES)).double()


def trained(loss, targets, solver, replicas, settings):
    model = network()
    if settings.get("fill"):
        settings = settings | {"local_budget": [(1, 1), (0, 0), (0, 2)]}
    made = trainer_of(
        model,
        solver,
        cuts=["1.0", "2"],
        loss=loss,
        replicas=replicas,
        metrics={},
        train={"epochs": 1, "batch_size": BATCH},
        **settings,
    )
    data = samples()[0], targets
    made.fit(data, data)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("solver", "replicas", "settings"), CASES)
def test_every_method_has_the_gradient_of_the_undivided_loss(solver, replicas, settings):
    """As if each sample's loss came with N / (sum_j v_j) of its mini-batch, summed by hand."""
    _, y, order = samples()
    counts = (y >= 0).double()
    v = WEIGHT[y.clamp_min(0)] * counts
    factors = torch.empty_like(v)
    shares = replicas if "sync" in settings else 1  # whose steps are on its own mean
    for ids in (ids for batch in order.split(BATCH) for ids in batch.tensor_split(shares)):
        factors[ids] = counts[ids] * len(ids) / v[ids].sum().clamp_min(1e-9)

    def each(out, targets):
        """-sum_c v_c ((1 - e) [c = y] + e / C) log p_c of each sample, times its factor."""
        classes, factor = targets[:, 0].long(), targets[:, 1]
        e = LOSS.label_smoothing
        hits = F.one_hot(classes, CLASSES).double() * (1 - e) + e / CLASSES
        return -(out.log_softmax(1) * hits * WEIGHT).sum(1) * factor

    known = torch.stack([y.clamp_min(0).double(), factors], 1)
    expected = trained(each, known, solver, replicas, settings)
    found = trained(LOSS, y, solver, replicas, settings)
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-12, atol=1e-13)


def over_rows(out, targets):
    """Focal-like, of those that count, with a denominator that the function knows alone."""
    counted = targets >= 0
    each = F.cross_entropy(out, targets.clamp_min(0), reduction="none") * counted
    return each.sum() / counted.sum().clamp_min(1)


class Counting:
    """The same, and it says what it divides by."""

    def __call__(self, out, targets):
        return over_rows(out, targets)

    def denominator(self, targets):
        return (targets >= 0).sum()


@pytest.mark.parametrize(
    "loss", [LOSS, nn.CrossEntropyLoss(), Counting()], ids=["weighted", "left out", "own"]
)
def test_a_test_loss_is_that_of_all_samples_at_once(loss, monkeypatch):
    x, y, _ = samples()
    y = torch.where(y < 0, -100, y)
    if loss is LOSS:
        y = torch.where(y < 0, LOSS.ignore_index, y)
    whole = network()
    made = trainer_of(
        whole, Backprop(), 1, loss=loss, metrics={}, train={"epochs": 1, "batch_size": BATCH}
    )
    found = made.fit((x, y), (x, y))["test_loss"]
    with torch.no_grad():
        assert found == pytest.approx(float(loss(whole(x), y)), rel=1e-12)
        objective = Objective(loss, {})
        for size in (1, 7, 52):
            scores = measured(objective, whole, x, y, size)
            assert scores == pytest.approx(found, rel=1e-12)


def measured(objective, module, x, y, size):
    """The mean loss over data in batches of some size, in one process."""
    block = Block(module, 0, 1, {"exact": torch.optim.SGD(module.parameters())})
    (found,) = run_threads(
        1,
        lambda links: measure_network(block, links, Mapped(TensorDataset(x, y)), objective, size),
    )
    return found["loss"]
