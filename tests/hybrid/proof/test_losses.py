"""A loss that is no mean over samples, or has weights or state, is refused before it trains."""

from typing import Any

import pytest
import torch
from answers import refusal
from proof_cases import BATCH, network, samples, weights
from torch import nn
from torch.nn import functional as F
from trainings import assert_same, trainer_of

from hybrid.solvers import DDG, Backprop

PARTS = Backprop(micro_batches=2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: F.cross_entropy(o, y).sqrt(),
        lambda o, y: F.cross_entropy(o, y, reduction="sum"),
        lambda o, y: F.cross_entropy(o, y, ignore_index=1),
        lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o))),
    ],
    ids=["root", "sum", "left out", "contrastive"],
)
@pytest.mark.parametrize("parts", [{"m": 2, "R": 1}, {"m": 1, "R": 2}], ids=["parts", "replicas"])
def test_a_loss_that_is_no_mean_is_refused_in_parts_and_trained_whole(
    loss: Any, parts: dict[str, int]
) -> None:
    refused = refusal(
        weights, "chain", Backprop(micro_batches=parts["m"]), loss=loss, replicas=parts["R"]
    )
    assert refused.startswith("the run would train another network")
    assert "give denominator=, or train undivided" in refused
    weights("chain", Backprop(), loss=loss)


def test_a_declared_denominator_makes_a_mean_of_it() -> None:
    def counted(out: Any, y: Any) -> Any:
        return F.cross_entropy(out, y, ignore_index=1)

    def count(y: Any) -> Any:
        return (y != 1).sum()

    weights("chain", Backprop(micro_batches=2), loss=counted, denominator=count, replicas=2)
    assert "its gradient" in refusal(
        weights, "chain", PARTS, loss=counted, denominator=lambda y: 1 + (y != 1).sum()
    ).replace("its loss", "its gradient")


def test_a_loss_that_reads_weights_of_another_block_is_refused() -> None:
    model, cuts = network("chain")

    def loss(out: Any, y: Any) -> Any:
        return F.cross_entropy(out, y) + 0.01 * sum(p.abs().sum() for p in model.parameters())

    made = trainer_of(model, Backprop(), cuts=cuts, loss=loss, metrics={})
    assert "the loss reads the weight '1.bias' of another block" in refusal(made.fit, samples())


def test_a_loss_with_weights_or_state_of_its_own_is_refused() -> None:
    class Centers(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            self.center = nn.Parameter(torch.zeros(3), requires_grad=trained)

        def forward(self, out: Any, y: Any) -> Any:
            if not self.center.requires_grad:
                self.calls = getattr(self, "calls", 0)
                self.register_buffer("seen", out.detach().mean(0))
            return F.cross_entropy(out - self.center, y)

    class Running(Centers):
        def __init__(self) -> None:
            super().__init__(False)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, out: Any, y: Any) -> Any:
            self.mean += out.detach().mean(0)
            return F.cross_entropy(out - self.mean, y)

    trained, running = Centers(True), Running()
    assert "has 1 parameters to train, 'center' first" in refusal(
        weights, "chain", Backprop(), loss=trained
    )
    assert "the loss keeps state ('mean' changes)" in refusal(
        weights, "chain", Backprop(), loss=running
    )
    assert not running.mean.any()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_that_is_bound_to_the_network_leaves_it_alone(replicas: int) -> None:
    """Checks of one block put back nothing that another one is training meanwhile."""

    class Task:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def loss(self, out: Any, y: Any) -> Any:
            return F.cross_entropy(out, y)

    results = []
    for bound in (True, False):
        model, cuts = network("chain")
        trainer_of(
            model,
            Backprop(micro_batches=2),
            cuts=cuts,
            sample=samples()[0][:4],
            loss=Task(model).loss if bound else F.cross_entropy,
            metrics={},
            replicas=replicas,
            train={"batch_size": BATCH, "verify": "always" if bound else "never"},
        ).fit(samples())
        results.append(dict(model.state_dict()))
    assert_same(*results)


def test_a_loss_that_stops_being_a_mean_ends_the_run_at_that_mini_batch() -> None:
    """Targets are left out in the last mini-batch alone, of a loss whose samples are all proven."""
    x, y = samples()

    def hard(out: Any, y: Any) -> Any:
        each = F.cross_entropy(out, y, reduction="none")
        return each[each > each.median()].mean() if len(each) > 12 else each.mean()

    for solver, more in (
        (PARTS, {}),
        (DDG(2), {}),
        (PARTS, {"replicas": 2}),
        (Backprop(), {"replicas": 4}),
    ):
        assert " samples of step 0 is " in refusal(
            trainer_of(
                network("chain")[0],
                solver,
                cuts=["4"],
                loss=hard,
                metrics={},
                train={"batch_size": BATCH * 2, "epochs": 1},
                **more,
            ).fit,
            (x, y),
        )
