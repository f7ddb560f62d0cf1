"""Before its first step a run is held against the undivided network: what is broken is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import refusal
from proof_cases import Solved, network, samples, weights
from torch import nn
from torch.nn import functional as F
from trainings import assert_same, digits, trainer_of
from world import launched

from hybrid.method.method import Method
from hybrid.networks.units import BlockModule
from hybrid.proof import proof
from hybrid.proof.undivided import distance, sketch
from hybrid.solvers import DDG, FDG, Backprop, FeaturesReplay, Penalty
from hybrid.solvers.block import Block
from hybrid.solvers.engine.engine import Engine
from hybrid.solvers.engine.flights import Flight
from hybrid.solvers.exact.exact_pass import ExactPass
from hybrid.solvers.micro_batches import MicroBatch
from hybrid.solvers.numerics.regularizer import Regularizer
from hybrid.solvers.objective import CountOf, OverClasses
from hybrid.solvers.sync.all_reduce import AllReduced
from hybrid.solvers.sync.ties import Ties
from hybrid.solvers.wire import Wire

RIGHT: dict[str, Solved] = {
    "whole": (Backprop(), {}),
    "uneven parts": (Backprop(micro_batches=3), {}),
    "three replicas": (Backprop(micro_batches=2), {"replicas": 3}),
    "clipped": (Backprop(micro_batches=2, clip_norm=0.1), {}),
    "recomputed": (Backprop(micro_batches=2, recompute=True), {}),
    "late": (DDG(micro_batches=2), {"replicas": 2}),
    "shrunk": (FDG(micro_batches=3, gradient_shrinking=0.5), {}),
    "replayed": (FeaturesReplay(micro_batches=2), {}),
    "windows": (Penalty(), {}),
    "filled": (DDG(micro_batches=2), {"fill": "penalty"}),
    "int8": (Backprop(micro_batches=2, messages="int8"), {}),
    "3 bits": (DDG(micro_batches=2, messages="int8", adjoints="int3"), {}),
    "bfloat16": (DDG(micro_batches=2), {"train": {"precision": "bfloat16"}}),
    "weights of classes": (
        Backprop(micro_batches=2),
        {"replicas": 2, "loss": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 4.0]))},
    ),
    "penalty": (
        DDG(micro_batches=2),
        {"regularizer": lambda w: sum(p.square().sum() for p in w.values())},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_proof_of_a_right_run_passes_and_leaves_no_trace(name: str) -> None:
    solver, more = RIGHT[name]
    before = torch.get_rng_state()
    torch.manual_seed(5)
    one, numbers = weights("chain", solver, **more), torch.rand(3)
    torch.manual_seed(5)
    other = weights("chain", solver, "never", **more)
    assert torch.equal(torch.rand(3), numbers)
    assert_same(one, other)
    torch.set_rng_state(before)


@pytest.mark.parametrize("solver", [Backprop(), DDG(micro_batches=1), FDG(micro_batches=1)])
def test_a_network_that_is_cut_between_calls_is_proven_and_left_as_it_was(solver: Any) -> None:
    """With a weight of two blocks, a skip over the cut, dropout, BatchNorm and a counter."""
    assert_same(weights("calls", solver), weights("calls", solver, "never"))


def never_summed(ties: Ties, exact: bool) -> None:
    """Copies of a weight step on their own gradients."""
    ties.begin()
    ties.steps += 1


def on_block(index: int, factor: float) -> Callable[..., Any]:
    """A gradient that is `factor` times as large on one block."""
    backward = Block.backward

    def wrong(block: Block, out: Any, p_out: Any = None, *rest: Any, **more: Any) -> None:
        if block.index == index:
            out, p_out = (out * factor, None) if p_out is None else (out, p_out * factor)
        backward(block, out, p_out, *rest, **more)

    return wrong


def in_evaluation(method: Method, *arguments: Any) -> Block:
    """A block in the other mode than the one it is to be in."""
    made = MADE(method, *arguments)
    made.module.eval()
    return made


def without_a_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of all micro-batches but the first."""

    def wrong(engine: Engine, flight: Flight, *arguments: Any) -> None:
        function(engine, flight, *arguments)
        if flight.part.number == 0:
            engine.block.module.zero_grad(set_to_none=True)

    return wrong


def kept(block: Block, lam: Any, *rest: Any, **more: Any) -> Any:
    """A forward pass that leaves running statistics as they were."""
    before = {name: b.clone() for name, b in block.module.named_buffers()}
    out = FORWARD(block, lam, *rest, **more)
    for name, b in block.module.named_buffers():
        b.data.copy_(before[name])
    return out


FORWARD, MADE = Block.forward, Method.block
CE = {"loss": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 4.0]))}
LEFT_OUT = {"loss": nn.CrossEntropyLoss(ignore_index=1)}
SQUARES = {"regularizer": lambda w: sum(p.square().sum() for p in w.values())}
PARTS = Backprop(micro_batches=2)
MULTIPLIED = property(lambda part: 1.1 * (part.stop - part.start) / part.size)
COUNTS = CountOf.__call__

BROKEN: dict[str, tuple[str, Any, dict[str, Any], Any, str, Any]] = {
    "a tie lost": ("calls", Backprop(), {}, Ties, "sum_gradients", never_summed),
    "a tie lost, late": ("calls", DDG(1), {}, Ties, "sum_gradients", never_summed),
    "a mode ignored": ("chain", Backprop(), {}, Method, "block", in_evaluation),
    "weights of classes ignored": (
        *("chain", PARTS, CE, OverClasses, "denominator"),
        lambda loss, targets: torch.tensor(float(len(targets))),
    ),
    "a target left out is counted": (
        *("chain", PARTS, LEFT_OUT, OverClasses, "denominator"),
        lambda loss, targets: torch.tensor(float(len(targets))),
    ),
    "replicas' denominators apart": (
        *("chain", Backprop(), {**CE, "replicas": 2}, AllReduced, "total", lambda sync, own: own),
    ),
    "a gradient halved on a block": (
        *("chain", Backprop(), {}, Block, "backward", on_block(0, 0.5)),
    ),
    "a loss scaled": ("chain", Backprop(), {}, Block, "backward", on_block(1, 1.01)),
    "a late gradient halved": ("chain", DDG(2), {}, Block, "backward", on_block(0, 0.5)),
    "an adjoint lost": (
        *(
            "chain",
            Backprop(),
            {},
            Block,
            "input_adjoint",
            lambda block, lam: torch.zeros_like(lam),
        ),
    ),
    "an adjoint shrunk": (*("chain", DDG(2), {}, DDG, "shrink", 0.9),),
    "a part lost": (
        *("chain", PARTS, {}, Engine, "_backward"),
        without_a_part(Engine._backward),
    ),
    "a part's share wrong": ("chain", PARTS, {}, MicroBatch, "share", MULTIPLIED),
    "replicas never summed": (
        *("chain", Backprop(), {"replicas": 2}, AllReduced, "before_step", lambda *_: True),
    ),
    "a stale buffer": ("chain", Backprop(), {}, Block, "forward", kept),
    "a message rounded": (
        *("chain", Backprop(), {}, Wire, "receive"),
        lambda wire, get, *_: get().bfloat16().float(),
    ),
    "rows of a message mixed": (
        *("chain", Backprop(), {}, Wire, "receive", lambda wire, get, *_: get().roll(1, 0)),
    ),
    "dropout twice": (
        *("chain", Backprop(), {}, BlockModule, "forward"),
        lambda module, x, parts=None: F.dropout(nn.Sequential.forward(module, x), 0.2),
    ),
    "a regularizer of no effect": (
        *("chain", Backprop(), SQUARES, Regularizer, "add_gradient", lambda *_: None),
    ),
    "a regularizer in every part": (
        *("chain", PARTS, SQUARES, ExactPass, "gradient"),
        lambda program, *rest, **more: (
            program.block.regularizer.add_gradient(1.0),
            GRADIENT(program, *rest, **more),
        ),
    ),
    "int8 of another scale": (
        *("chain", Backprop(messages="int8"), {}, Wire, "receive"),
        lambda wire, *message: (1 if wire.text == "float32" else -1) * RECEIVE(wire, *message),
    ),
}
GRADIENT, RECEIVE = ExactPass.gradient, Wire.receive


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_whose_package_is_broken_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, solver, more, owner, attribute, wrong = BROKEN[name]
    monkeypatch.setattr(owner, attribute, wrong)
    said = refusal(weights, kind, solver, **more)
    assert said.startswith("the run would train another network than the one that was given: ")
    assert ("int8" in name) == (" in the formats that are set, and is right in float32" in said)


def test_what_is_not_proven_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(loss: Any = None, **train: Any) -> str:
        made = trainer_of(network("chain")[0], loss=loss, metrics={}, quiet=False, train=train)
        return str(made.fit(samples())["proof"])

    assert fit(verify="never") == "skipped: train.verify is never"
    assert "its gradient was not proven: train.verify is never" in capsys.readouterr().out
    assert "the loss is not finite" in refusal(fit, lambda out, y: out.sum() * torch.inf)
    assert "not proven: the loss of its samples is not a finite" in capsys.readouterr().out
    assert fit() == "passed"
    assert "its gradient is the undivided network's" in capsys.readouterr().out
    monkeypatch.setattr(proof, "available_memory", lambda: [("host", 1 << 40), ("a group", 9)])
    made = trainer_of(network("chain")[0], metrics={})
    made.whole = lambda: network("chain")[0]
    assert "has no room in the first rank's memory" in made.fit(samples())["proof"]


def test_this_packages_own_is_not_compared_unless_it_is_asked_for() -> None:
    made = trainer_of(network_of_digits(), train={"epochs": 1})
    assert made.fit(*digits(2))["proof"].startswith("skipped: network, data and loss are this")
    made = trainer_of(network_of_digits(), train={"epochs": 1, "verify": "always"})
    assert made.fit(*digits(2))["proof"] == "passed"


def network_of_digits() -> nn.Sequential:
    from trainings import network as named

    return named()


def test_a_counter_of_passes_is_no_mean_over_parts() -> None:
    """A plain loop counts once in a mini-batch; a copy of the last value is none of its kind."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows, self.calls = nn.Linear(6, 6), 0, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows, self.calls = len(x), self.calls + self.training * COUNTING
            return self.layer(x)

    def fit() -> Any:
        made = trainer_of(nn.Sequential(Counts(), nn.Linear(6, 3)), PARTS, 2, metrics={})
        return made.fit(samples())

    COUNTING = 0
    fit()
    COUNTING = 1
    assert "the attribute '0.calls' differs after the pass: 2, and 1 in a plain loop" in refusal(
        fit
    )


def test_sketches_tell_the_distance_of_two_tensors() -> None:
    for shape in ((3,), (50, 7), (9000, 3)):
        random = torch.Generator().manual_seed(0)
        x, y = (torch.randn(shape, generator=random) for _ in range(2))
        found = [distance(sketch(f"w{i}", x), sketch(f"w{i}", x + 1e-3 * y)) for i in range(50)]
        expected = float((1e-3 * y).norm())
        assert torch.tensor(found).square().mean().sqrt() == pytest.approx(expected, rel=0.2)
        assert sketch("w", x)[0] == pytest.approx(float(x.norm()))
    assert distance(sketch("w", x), sketch("w", torch.full_like(x, torch.nan))) == float("inf")


def unlike_networks(comm: Any) -> list[str]:
    """What two trainings, one after the other, say of their proofs."""
    torch.manual_seed(comm.rank)
    layers = [nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3)]
    random = torch.Generator().manual_seed(0)
    samples = torch.randn(32, 6, generator=random), torch.randint(3, (32,), generator=random)
    with launched(comm):
        made = trainer_of(nn.Sequential(*layers), Backprop(), cuts=["2"], metrics={})
        return [made.fit(samples)["proof"] for _ in range(2)]


def test_ranks_that_have_drawn_other_networks_are_proven_with_the_weights_they_train(
    world: Any,
) -> None:
    """Again, too, after a training that has let go of the weights of other blocks."""
    assert world.run(2, f"{__name__}:unlike_networks") == [["passed", "passed"]] * 2
