"""Least squares in float64, trained by replicas under any strategy."""

from functools import partial
from operator import attrgetter

import torch
from torch import nn

from hybrid.links import run_threads
from hybrid.solvers.block import Block

LR, SAMPLES, DECAY = 0.05, 6, 0.3
SGD, HEAVY = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
DECAYING = partial(torch.optim.SGD, weight_decay=DECAY)


def problem(steps, seed=0):
    """(x, y) of every step, and the first weights, float64."""
    random = torch.Generator().manual_seed(seed)
    made = partial(torch.randn, generator=random, dtype=torch.float64)
    return [(made(SAMPLES, 3), made(SAMPLES)) for _ in range(steps)], made(3)


def gradient(w, x, y):
    """Of half the mean square of x w - y."""
    return x.T @ (x @ w - y) / len(y)


def shares(x, y, replicas):
    return list(zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True))


def trained(
    strategy,
    replicas,
    steps,
    optimizer=SGD,
    seen_at=(),
    seed=0,
    peers=attrgetter("peers"),
    rates=(),
):
    """Weights of every replica after every step, and at the end of the training.

    After the steps in `seen_at` there is an evaluation; the weights it sees come last. `peers`
    makes a replica's peers of its links; `rates` are the learning rates of steps.
    """
    batches, first = problem(steps, seed)

    def program(links):
        module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(first)
        made = optimizer(module.parameters(), LR)
        block = Block(module, 0, 1, {"exact": made, "local": made})
        mine = [shares(x, y, replicas)[links.place.replica] for x, y in batches]
        share = len(mine[0][1]) / SAMPLES
        if strategy is not None:
            block.sync = strategy.start(block, peers(links), share)
        found, evaluated = [], []
        for step, (x, y) in enumerate(mine):
            loss = (module(x)[:, 0] - y).square().mean() / 2 * share
            loss.backward()
            block.step("exact", rates[step] if rates else LR)
            found.append(module.weight.detach()[0].clone())
            if step in seen_at:
                with block.as_tested():
                    evaluated.append(module.weight.detach()[0].clone())
        block.keep_tested_weights()
        return [*found, module.weight.detach()[0].clone(), *evaluated]

    return run_threads(1, program, replicas=replicas)


def mean(values, replicas):
    """Over replicas, each weighed by its samples."""
    sizes = [len(part) for part in torch.arange(SAMPLES).tensor_split(replicas)]
    return sum(n / SAMPLES * v for n, v in zip(sizes, values, strict=True))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
