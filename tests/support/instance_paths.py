"""Small chains with units that may be left out, and a simulation of instances on them."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import torch
from conditions import check
from problems import Fixed, Problem, copied
from torch import nn
from torch.func import functional_call

from hybrid import split
from hybrid.links import run_threads
from hybrid.links.base import Start
from hybrid.links.mpi import MpiLinks
from hybrid.solvers import Batch
from hybrid.solvers.blocks.buffers import frozen_statistics
from hybrid.solvers.instances.nodes import node_slices
from hybrid.solvers.layers.residual import Skippable, nothing_left_out, survival
from hybrid.solvers.state import State

MOMENTUM = 0.9


class Branch(Skippable):
    def __init__(self, width, p):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.survival = p

    def forward(self, x):
        if self.left_out():
            return x
        return x + self.scaled(torch.tanh(self.bn(self.conv(x))))


def deep(cuts=(), survivals=(0.8, 0.6, 0.5, 0.4), batches=6, batch=12, seed=5):
    """Stem, as many residual units as there are probabilities, head; other learning rates."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    body = [Branch(3, p) for p in survivals]
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *body, *head).double()
    x = torch.randn(batch * batches, 1, 6, 6, dtype=torch.float64)
    source = Fixed(x, torch.randint(0, 4, (len(x),)))
    ids = torch.arange(len(x)).split(batch)
    made = [Batch(i, 0.1 / (t + 1), source, t) for t, i in enumerate(ids)]
    return Problem(split(model, cuts=[str(c) for c in cuts]), made)


def setup_of(problem):
    return replace(problem.setup(window=0), output=(4,), seed=3)


def trained(problem, solver, at=None, run=run_threads, pieces=None, watch=None):
    """The network after all mini-batches; broken off and gone on with at mini-batch `at`."""

    def program(block, links):
        setup = setup_of(problem)
        check(solver, setup)
        mine = solver.start(block, links, setup)
        if watch is not None:
            watch(mine)
        stats = []
        if at is not None:
            stats.append(mine.train(problem.window(1, 0, at)))
            kept = mine.state()
            state = State(block=copied(kept.block), flight=copied(kept.flight))
            block.module.zero_grad()
            mine = solver.start(block, links, setup)
            if watch is not None:
                watch(mine)
            mine.load_state(state)
        ends = [at or 0, *(pieces or []), len(problem.batches)]
        for first, end in pairwise(ends):
            stats.append(mine.train(problem.window(1, first, end)))
        stats.append(mine.drain())
        assert mine.state().flight == {}
        assert not mine._under_way
        assert all(t.contributions == 0 for t in mine._units.tallies)
        assert all(p.grad is None for p in block.module.parameters())
        late = sum((s.staleness for s in stats), Counter())
        return late, stats

    problem.stats = problem.on_every_block(program, MOMENTUM, run)
    return problem.tensors()


class Masked:
    """One process: the dense network with masks, every unit's weights by version.

    Ranks are simulated by what they do at every instant. A unit's mask is 0 where the instance's
    path leaves it out: its branch is multiplied by it, and its gradient is not counted.
    """

    def __init__(self, problem, solver, paths):
        self.problem, self.paths = problem, paths
        K = self.K = len(problem.blocks)
        self.most = solver.max_active_keys or 2 * K
        self.current = solver.weights == "current"
        self.m = solver.num_micro_batches(len(problem.batches[0]))
        self.muf = solver.min_update_frequency or self.m
        self.parts, self.names, self.w = [], [], []
        for k in range(K):
            module = problem.blocks.module(k).train()
            children = [*module]
            for some in node_slices(module):
                unit = nn.Sequential(*children[some])
                self.parts.append((k, unit))
                self.w.append([copied(dict(unit.named_parameters()))])
        self.late, self.momenta = Counter(), {}
        self.acc = [None] * len(self.parts)
        self.count, self.samples = [0] * len(self.parts), [0] * len(self.parts)
        self.rates = [0.0] * len(self.parts)

    def units(self, k):
        return [u for u, (block, _) in enumerate(self.parts) if block == k]

    def mask(self, i, u):
        k = self.parts[u][0]
        return float(u - self.units(k)[0] in self.paths[i].units[k])

    def run_unit(self, i, u, x, weights):
        unit = self.parts[u][1]
        if not survival(unit[0]) < 1:
            return functional_call(unit, weights, (x,))
        with nothing_left_out():
            return x + self.mask(i, u) * (functional_call(unit, weights, (x,)) - x)

    def ticks(self, i, k, forward):
        return (1 if forward else 2) * len(self.paths[i].units[k])

    def train(self):
        batches, K = self.problem.batches, self.K
        sizes = [len(ids) for ids in batches[0].ids.tensor_split(self.m)]
        total = len(batches) * self.m
        xs = [x for b in batches for x in b.images().split(sizes)]
        ys = [y for b in batches for y in b.labels().split(sizes)]
        self.rate = [b.learning_rate for b in batches for _ in sizes]
        up, home = [[*range(total)], *([] for _ in range(K - 1))], [[] for _ in range(K)]
        flying, busy, t = [set() for _ in range(K)], {}, 0
        limits = [min(self.most, max(self.most, K) - k) for k in range(K)]
        self.inputs, self.met, self.seen = defaultdict(dict), defaultdict(dict), defaultdict(dict)
        value, adjoint, homes = {}, {}, 0
        while homes < total:
            for k in range(K):
                if k in busy:
                    continue
                if home[k]:
                    i = min(home[k])
                    home[k].remove(i)
                    adjoint[i] = self.backward(i, k, adjoint[i], sizes)
                    busy[k] = (t + self.ticks(i, k, False), i, False)
                elif up[k] and len(flying[k]) < limits[k]:
                    i = up[k].pop(0)
                    flying[k].add(i)
                    value[i] = self.forward(i, k, xs[i] if k == 0 else value[i])
                    if k == self.paths[i].last:
                        out = value[i].detach().requires_grad_()
                        loss = nn.functional.cross_entropy(out, ys[i])
                        (loss * (len(ys[i]) / sum(sizes))).backward()
                        adjoint[i] = out.grad
                    busy[k] = (t + self.ticks(i, k, True), i, True)
            t = min(end for end, _, _ in busy.values())
            for k, (end, i, forward) in sorted(busy.items()):
                if end != t:
                    continue
                del busy[k]
                if forward and k < self.paths[i].last:
                    up[k + 1].append(i)
                elif forward:
                    home[k].append(i)
                else:
                    flying[k].discard(i)
                    homes += k == 0
                    if k:
                        home[k - 1].append(i)
        for u in range(len(self.parts)):
            self.settle(u, sum(sizes))
        return [w[-1] for w in self.w]

    def forward(self, i, k, x):
        for u in self.units(k):
            version = {n: w.clone().requires_grad_() for n, w in self.w[u][-1].items()}
            self.inputs[i][u] = x = x.detach().requires_grad_(u > 0)
            self.met[i][u], self.seen[i][u] = version, len(self.w[u])
            x = self.run_unit(i, u, x, version)
        return x

    def backward(self, i, k, p, sizes):
        for u in reversed(self.units(k)):
            met = self.met[i][u]
            if self.current:
                met = {n: w.clone().requires_grad_() for n, w in self.w[u][-1].items()}
            x = self.inputs[i][u]
            x.grad = None
            with frozen_statistics(self.parts[u][1]):
                self.run_unit(i, u, x, met).backward(p)
            p = x.grad
            if self.mask(i, u):
                self.add(i, u, {n: w.grad for n, w in met.items()}, sizes)
        return p

    def add(self, i, u, g, sizes):
        had = self.acc[u]
        self.acc[u] = g if had is None else {n: had[n] + g[n] for n in g}
        self.count[u] += 1
        self.samples[u] += sizes[i % self.m]
        self.rates[u] = self.rate[i]
        if g:
            self.late[len(self.w[u]) - self.seen[i][u]] += 1
        if self.count[u] >= self.muf:
            self.settle(u, sum(sizes))

    def settle(self, u, size):
        if not self.count[u]:
            return
        new = {}
        for name, w in self.w[u][-1].items():
            g = self.acc[u][name] * (size / self.samples[u])
            v = self.momenta.get((u, name))
            v = self.momenta[u, name] = g if v is None else v * MOMENTUM + g
            new[name] = w.add(g.add(v, alpha=MOMENTUM), alpha=-self.rates[u])
        self.w[u].append(new)
        self.acc[u], self.count[u], self.samples[u] = None, 0, 0


def on_ranks(comm, K, solver, cuts, at=None):
    """The weights of this MPI rank's block, as lists of bytes; None in any order if finite."""
    problem = deep(cuts)

    def run(count, program):
        return [MpiLinks.start(program, Start.of(comm))]

    tensors = trained(problem, solver, at, run)
    if solver.any_order:
        return all(t.isfinite().all() for t in tensors.values())
    module = problem.blocks.module(comm.rank)
    return {module.global_name(n): t.numpy().tobytes() for n, t in module.state_dict().items()}
