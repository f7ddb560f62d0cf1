"""Local steps as graphs: fixed memory, the same bits, and a reason where there are none."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from measures import Kappa
from problems import make_problem, recorded
from torch import nn

from hybrid.solvers import AugmentedLagrangian, BlockADMM, Penalty
from hybrid.solvers.blocks.graphs import WARM_UP, StepGraphs


class Repeat:
    """In place of a CUDA graph: computes again, from and into the memory of the first time."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.replays = 0

    def warm_up(self, compute):
        return compute()

    def record(self, compute):
        results = compute()
        gradients = [p.grad for p in self.parameters]

        def again():
            self.replays += 1
            for p in self.parameters:
                p.grad = None
            for mine, new in zip(results, compute(), strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
            for mine, p in zip(gradients, self.parameters, strict=True):
                if mine is not None and p.grad is not None:
                    mine.copy_(p.grad)

        return again, results


SOLVERS = {
    "penalty": Penalty(),
    "filtered": Penalty(filter=2),
    "clipped": AugmentedLagrangian(clip_norm=0.1),
    "block-admm": BlockADMM(rho=0.1, theta_steps=2, z_steps=2, constraint="box:-1:1"),
    "gauss-seidel": BlockADMM(rho=0.1, order="gauss-seidel"),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_with_graphs_has_the_bits_of_one_without(name):
    def weights(with_graphs):
        problem = make_problem(3, units=3, cuts=[2], batch=4, batches=3)
        sweeps = 4

        def program(block, links):
            solver = recorded(problem, SOLVERS[name], block, links, sweeps)
            if with_graphs:
                parameters = list(block.module.parameters())
                block.graphs = StepGraphs(parameters, Repeat(parameters))
            stats = solver.train(problem.window(sweeps))
            if with_graphs:
                assert block.graphs.count > 0
                assert block.graphs._capture.replays > 0
            return deepcopy(block.module.state_dict()), stats.per_step_losses()

        return problem.on_every_block(program)

    for (mine, losses), (plain, plain_losses) in zip(weights(True), weights(False), strict=True):
        assert losses == plain_losses
        assert all(torch.equal(mine[key], plain[key]) for key in plain)


def test_a_metric_that_accumulates_is_shown_the_same_by_graphs():
    def shown(with_graphs):
        problem = make_problem(3, units=3, cuts=[2], batch=4, batches=6)

        def program(block, links):
            solver = recorded(problem, Penalty(), block, links, 1)
            block.objective = replace(block.objective, metrics={"accuracy": Kappa()})
            if with_graphs:
                parameters = list(block.module.parameters())
                block.graphs = StepGraphs(parameters, Repeat(parameters))
            return solver.train(problem.window(1)).seen

        return problem.on_every_block(program)[-1]

    found, expected = shown(True), shown(False)
    assert len(found) == 6
    for mine, plain in zip(found, expected, strict=True):
        assert [*map(len, mine)] == [4, 4]
        assert all(map(torch.equal, mine, plain))


def summed(weight, x):
    loss = (weight * x).sum()
    loss.backward()
    return loss.detach(), None


def test_each_set_of_shapes_is_captured_once_after_its_warm_up():
    weight = nn.Parameter(torch.ones(3))
    capture = Repeat([weight])
    graphs = StepGraphs([weight], capture)
    for number in range(WARM_UP + 4):
        for size in (3, 1):
            weight.grad = None
            x = torch.full((size,), float(number))
            loss, nothing = graphs("sum", lambda x: summed(weight, x), x)
            assert (float(loss), nothing) == (3.0 * number, None)
            assert weight.grad.tolist() == [float(number)] * 3
    assert graphs.count == 2
    assert capture.replays == 2 * 4
    graphs("another kind", lambda x: summed(weight, x), torch.ones(3))
    assert graphs.count == 2


def test_what_moves_buffers_is_not_captured():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(2))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen += 1
            return (x * self.mask,)

    counting = Counting()
    for training in (False, True):
        counting.train(training)
        graphs = StepGraphs([], Repeat([]), counting)
        for _ in range(WARM_UP + 1):
            graphs("masked", counting, torch.ones(2))
        said = "not captured: a replay would not move seen" if training else ""
        assert (graphs.reason, graphs.count) == (said, int(not training))
    assert counting.seen == WARM_UP + 1


def test_what_cannot_be_captured_is_computed_and_the_reason_kept():
    class Refusing(Repeat):
        def record(self, compute):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    graphs = StepGraphs([], Refusing([]))
    for _ in range(WARM_UP + 3):
        (value,) = graphs("double", lambda x: (2 * x,), torch.ones(()))
        assert value is not None
        assert float(value) == 2
    assert graphs.reason == "not captured: operation not permitted when stream is capturing"
    assert graphs.count == 0


@pytest.mark.gpu
def test_blocks_of_one_process_capture_at_the_same_time():
    def capture(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            weight = nn.Parameter(torch.full((64, 64), 1.0 + seed, device="cuda"))
            graphs = StepGraphs([weight])
            for number in range(20):
                x = torch.full((64, 64), float(number), device="cuda")
                (loss,) = graphs("sum", lambda x: summed(weight, x)[:1], x)
                assert float(loss) == (1.0 + seed) * number * 64 * 64
                weight.grad = None
            return graphs.count == 1

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(capture, range(4))) == [True] * 4


@pytest.mark.gpu
def test_a_capture_that_waits_for_the_gpu_leaves_the_stream_as_it_was():
    graphs, current = StepGraphs([]), torch.cuda.current_stream()

    def waiting(x):
        return (x * x.sum().item(),)

    for _ in range(WARM_UP + 2):
        (value,) = graphs("wait", waiting, torch.full((2,), 3.0, device="cuda"))
        assert value is not None
        assert value.tolist() == [18.0, 18.0]
    assert graphs.reason.startswith("not captured: ")
    assert torch.cuda.current_stream() == current


@pytest.mark.gpu
def test_cuda_graphs_train_like_kernels_one_by_one():
    from hybrid.solvers.blocks.graphs import CudaCapture

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    graphed = deepcopy(plain)
    graphs = StepGraphs(list(graphed.parameters()), CudaCapture())

    def compute(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return (loss.detach(),)

    for number in range(10):
        x = torch.randn(32, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
        (wanted,) = compute(plain, x)
        (found,) = graphs("step", lambda x: compute(graphed, x), x)
        torch.testing.assert_close(found, wanted)
        for model in (plain, graphed):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad(set_to_none=True)
    assert graphs.count == 1, graphs.reason
